"""Linear layers compiled for processors that multiply tiles: `cpu_linear.cpp`, and the weights packed as it reads them."""

import ctypes
from collections.abc import Callable

import torch
import torch.nn.functional as F

_STRIPE = 32
"""Outputs that are computed together; weights are padded to a multiple of it with zeros."""
_STEP = 32
"""Inputs that one instruction takes; their number must be a multiple of it."""
_BFLOAT16, _FLOAT32, _GATED = range(3)
"""Kinds of results of `phloem_linear`."""

TileProduct = Callable[[torch.Tensor, torch.dtype], torch.Tensor]
"""Of x bf16 `[num_rows, in_features]` and the type of the result, bfloat16 or float32."""


class TileLinear:
    """The compiled product, bound to a library that supports it. A row's bits do not depend on the other rows."""

    def __init__(self, library: ctypes.CDLL) -> None:
        pointer, size, number = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32
        self._run = library.phloem_linear
        self._run.argtypes = (pointer, size, size, pointer, pointer, pointer, *(number,) * 4)
        self._run.restype = None

    def fits(self, weight: torch.Tensor) -> bool:
        """Whether there is code for this weight: bf16, in CPU memory, `in_features` a positive multiple of 32."""
        is_bf16 = weight.device.type == "cpu" and weight.dtype == torch.bfloat16
        return is_bf16 and weight.shape[1] % _STEP == 0 and weight.numel() > 0

    def product(self, weight: torch.Tensor, bias: torch.Tensor | None) -> TileProduct:
        """Pack a weight `[out_features, in_features]` that fits, and bind the product to it.

        The product raises ValueError for an x of another type or width.
        """
        run = self._bound(weight, bias, weight.shape[0])

        def product(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
            return run(x, dtype, _FLOAT32 if dtype == torch.float32 else _BFLOAT16)

        return product

    def gated_product(
        self, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> Callable[[torch.Tensor], torch.Tensor]:
        """Pack a weight `[2 * width, in_features]`, gates first, and bind to it the product with its SwiGLU.

        Gives bf16 `[num_rows, width]`, the bits that `product` and then the compiled `silu_and_mul` give.
        """
        gates_beside = _interleave(weight), None if bias is None else _interleave(bias)
        run = self._bound(*gates_beside, weight.shape[0] // 2)
        return lambda x: run(x, torch.bfloat16, _GATED)

    def _bound(
        self, weight: torch.Tensor, bias: torch.Tensor | None, num_results: int
    ) -> Callable[[torch.Tensor, torch.dtype, int], torch.Tensor]:
        in_features = weight.shape[1]
        packed = pack(weight)
        padded_bias = None if bias is None else F.pad(bias.float(), (0, -weight.shape[0] % _STRIPE))

        def run(x: torch.Tensor, dtype: torch.dtype, result: int) -> torch.Tensor:
            if x.dtype != torch.bfloat16 or x.dim() != 2 or x.shape[1] != in_features:
                raise ValueError(
                    f"x is {x.dtype} {list(x.shape)}; it must be bfloat16 [num_rows, {in_features}]"
                )
            if x.stride(1) != 1:
                x = x.contiguous()
            out = torch.empty((x.shape[0], num_results), dtype=dtype)
            self._run(
                x.data_ptr(),
                x.shape[0],
                x.stride(0),
                packed.data_ptr(),
                None if padded_bias is None else padded_bias.data_ptr(),
                out.data_ptr(),
                in_features,
                num_results,
                result,
                torch.get_num_threads(),
            )
            return out

        return run


def tile_linear(library: ctypes.CDLL) -> TileLinear | None:
    """Bind the compiled product, or None where the processor, the compiler or the kernel has no tiles."""
    return TileLinear(library) if library.phloem_linear_is_supported() else None


def pack(weight: torch.Tensor) -> torch.Tensor:
    """Order a weight as the kernel reads it: `[out_features / 32, in_features / 32, 2, 16, 16, 2]`, a copy.

    The last three are a tile: pairs of inputs, outputs, the two of a pair.
    """
    padded = F.pad(weight, (0, 0, 0, -weight.shape[0] % _STRIPE))
    tiles = padded.view(-1, 2, 16, weight.shape[1] // _STEP, 16, 2)
    return tiles.permute(0, 3, 1, 4, 2, 5).contiguous()


def _interleave(gate_up: torch.Tensor) -> torch.Tensor:
    """Put 16 gates before the 16 that they gate, and so on; both parts are padded to a multiple of 16 with zeros."""
    width, rest = gate_up.shape[0] // 2, gate_up.shape[1:]
    padding = (*(0, 0) * len(rest), 0, -width % 16)
    gates, ups = (F.pad(part, padding).view(-1, 16, *rest) for part in torch.tensor_split(gate_up, 2))
    return torch.stack((gates, ups), dim=1).flatten(0, 2)
