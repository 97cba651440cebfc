"""Compiled linear layers: `cpu_linear.cpp`, and weights packed as it reads them.

A row's bits do not depend on the other rows, their number, or the threads.
"""

from __future__ import annotations

import ctypes
from enum import IntEnum

import torch
import torch.nn.functional as F

_STRIPE = 32
"""Outputs that are computed together; weights are padded to a multiple of it with zeros."""
_TILE_STEP = 32
"""Inputs that one instruction on tiles takes; their number must be a multiple of it."""
_WORD_BYTES = 4
"""Inputs of an output that stand together in lanes."""
_INT8_MAX = 127
_DTYPES = (torch.float32, torch.bfloat16)
"""Types of inputs and of results."""


class Format(IntEnum):
    """How a weight lies in memory: the same numbers are in cpu_kernels.h."""

    FLOAT_LANES = 0
    BF16_LANES = 1
    INT8_LANES = 2
    BF16_TILES = 3
    INT8_TILES = 4

    @property
    def is_tiled(self) -> bool:
        """Whether it is for processors that multiply tiles."""
        return self in (Format.BF16_TILES, Format.INT8_TILES)


class LinearStruct(ctypes.Structure):
    """`PhloemLinear` of cpu_kernels.h: the same fields in the same order."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("weight", "bias", "scale")),
        *((name, ctypes.c_int32) for name in ("in_features", "out_features", "format", "is_gated")),
    )


class _Input(ctypes.Structure):
    """`PhloemInput` of cpu_kernels.h."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("num_rows", "row_stride")),
        ("is_bf16", ctypes.c_int32),
    )


class _Result(ctypes.Structure):
    """`PhloemResult` of cpu_kernels.h."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("row_stride", ctypes.c_int64),
        ("is_bf16", ctypes.c_int32),
    )


class LinearKernel:
    """The compiled product, bound to a library."""

    def __init__(self, library: ctypes.CDLL, *, int8: bool = False) -> None:
        """Bind it.

        Args:
            library: What `native_build.load_library` gives.
            int8: Keep weights as int8, with a scale per output; inputs, sums and results stay what they are.
        """
        self.int8 = int8
        self.library = library
        self.run = library.phloem_linear
        self.run.argtypes, self.run.restype = (*(ctypes.c_void_p,) * 3, ctypes.c_int32), None
        self.has_tiles = bool(library.phloem_linear_has_tiles())
        """Whether the processor multiplies tiles of bf16 (AMX)."""

    def fits(self, weight: torch.Tensor) -> bool:
        """Whether there is code for this weight: float32 or bf16, in CPU memory, `in_features` even for bf16, for int8 a multiple of 4."""
        if weight.device.type != "cpu" or weight.dtype not in _DTYPES or not weight.numel():
            return False
        return weight.shape[1] % (_WORD_BYTES // (1 if self.int8 else weight.itemsize)) == 0

    def layer(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> CompiledLinear:
        """Pack a weight `[out_features, in_features]` that fits."""
        return CompiledLinear(self, weight, bias, num_results=weight.shape[0])

    def gated_layer(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> CompiledLinear:
        """Pack a weight `[2 * width, in_features]` that fits, gates first: a layer with its SwiGLU.

        It gives `[num_rows, width]`, the bits that `layer` and then the compiled `silu_and_mul` give.
        """
        bias = None if bias is None else _interleave(bias)
        return CompiledLinear(
            self, _interleave(weight), bias, num_results=weight.shape[0] // 2, is_gated=True
        )


class CompiledLinear:
    """y = x W^T + b over a packed weight, of which it holds the only copy."""

    __slots__ = ("_bias", "_in_features", "_kernel", "_num_results", "_scale", "_weight", "struct")

    def __init__(
        self,
        kernel: LinearKernel,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        *,
        num_results: int,
        is_gated: bool = False,
    ) -> None:
        """Pack; see `LinearKernel`, which calls this."""
        self._kernel, self._num_results, self._in_features = kernel, num_results, weight.shape[1]
        self._bias = None if bias is None else _padded(bias.float())
        form = _format(weight, has_tiles=kernel.has_tiles, int8=kernel.int8)
        self._scale: torch.Tensor | None = None
        if kernel.int8:
            weight, scale = quantize(weight)
            self._scale = _padded(scale)
        self._weight = pack(weight, form)
        self.struct = LinearStruct(
            weight=self._weight.data_ptr(),
            bias=None if self._bias is None else self._bias.data_ptr(),
            scale=None if self._scale is None else self._scale.data_ptr(),
            in_features=self._in_features,
            out_features=num_results,
            format=form,
            is_gated=is_gated,
        )

    def __call__(self, x: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Multiply.

        Args:
            x: float32 or bfloat16 `[num_rows, in_features]`; for weights in tiles, bfloat16.
            dtype: Of the result, float32 or bfloat16; None means that of x.

        Raises:
            ValueError: an x of another type or width.
        """
        types = (torch.bfloat16,) if self.format.is_tiled else _DTYPES
        if x.dtype not in types or x.dim() != 2 or x.shape[1] != self._in_features:
            names = " or ".join(str(each).removeprefix("torch.") for each in types)
            raise ValueError(
                f"x is {x.dtype} {list(x.shape)}; it must be {names} [num_rows, {self._in_features}]"
            )
        if x.stride(1) != 1:
            x = x.contiguous()
        out = torch.empty((x.shape[0], self._num_results), dtype=dtype or x.dtype)
        rows = _Input(x.data_ptr(), x.shape[0], x.stride(0), x.dtype == torch.bfloat16)
        results = _Result(out.data_ptr(), self._num_results, out.dtype == torch.bfloat16)
        self._kernel.run(
            ctypes.byref(self.struct), ctypes.byref(rows), ctypes.byref(results), torch.get_num_threads()
        )
        return out

    @property
    def format(self) -> Format:
        """How the weight lies in memory."""
        return Format(self.struct.format)


def pack(weight: torch.Tensor, form: Format) -> torch.Tensor:
    """Order a weight `[out_features, in_features]` as the kernel reads it, in stripes of 32 outputs; a copy.

    Lanes: `[stripes, in_features / n, 32, n]`, words of n inputs (1, 2 or 4) beside those of the other outputs.
    Tiles: `[stripes, in_features / 32, 2, 16, 16, 2]`; the last three are a tile: pairs of inputs, outputs, the two of a pair.
    """
    padded = F.pad(weight, (0, 0, 0, -weight.shape[0] % _STRIPE))
    if form.is_tiled:
        tiles = padded.view(-1, 2, 16, weight.shape[1] // _TILE_STEP, 16, 2)
        return tiles.permute(0, 3, 1, 4, 2, 5).contiguous()
    per_word = _WORD_BYTES // weight.itemsize
    words = padded.view(-1, _STRIPE, weight.shape[1] // per_word, per_word)
    return words.transpose(1, 2).contiguous()


def quantize(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Round a weight `[out_features, in_features]` to 255 steps per output, symmetric around zero.

    Returns:
        int8 of the weight's shape, and the scales, float32 `[out_features]`: their product is the weight, to half a step.
    """
    wide = weight.float()
    scale = wide.abs().amax(dim=1) / _INT8_MAX
    steps = (wide / scale.clamp_min(torch.finfo(torch.float32).tiny)[:, None]).round_()
    return steps.nan_to_num_().clamp_(-_INT8_MAX, _INT8_MAX).to(torch.int8), scale


def _format(weight: torch.Tensor, *, has_tiles: bool, int8: bool) -> Format:
    is_tiled = has_tiles and weight.dtype == torch.bfloat16 and weight.shape[1] % _TILE_STEP == 0
    if int8:
        return Format.INT8_TILES if is_tiled else Format.INT8_LANES
    if weight.dtype == torch.float32:
        return Format.FLOAT_LANES
    return Format.BF16_TILES if is_tiled else Format.BF16_LANES


def _padded(values: torch.Tensor) -> torch.Tensor:
    return F.pad(values, (0, -values.shape[0] % _STRIPE))


def _interleave(gate_up: torch.Tensor) -> torch.Tensor:
    """Put 16 gates before the 16 that they gate, and so on; both parts are padded to a multiple of 16 with zeros."""
    width, rest = gate_up.shape[0] // 2, gate_up.shape[1:]
    padding = (*(0, 0) * len(rest), 0, -width % 16)
    gates, ups = (F.pad(part, padding).view(-1, 16, *rest) for part in torch.tensor_split(gate_up, 2))
    return torch.stack((gates, ups), dim=1).flatten(0, 2)
