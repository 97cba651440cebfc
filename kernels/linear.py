"""Linear layers over weights repacked once, where a row has the same bits in any company.

On a CPU, float32 and bf16 weights go to a product of our own (`cpu_linear`), whose arithmetic is the same for any number of
rows, wherever there is a compiler. Elsewhere two facts, both measured, make this file. A matrix product over weights that oneDNN has repacked is faster than
`F.linear`. And the bits of a row depend on how many rows the call has (the library picks its blocking by that), but not
on what the other rows are. So a call is only ever made with row counts of a *ladder*: the base count, and those counts
that a self-test has found to give a row the same bits as the base does. An input of n rows is cut into such pieces,
largest first, and the last one is padded with zero rows.

Which counts agree differs by machine (on AMX none do), shape, dtype and threads; `RowLadder` tests each when it is
first needed and remembers the answer. The private torch names are in this file only; without them `F.linear` serves.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from phloem.kernels.cpu_linear import CompiledLinear, LinearKernel

_RUNGS = (1024, 256, 64, 32, 8, 4, 1)
"""Row counts that are worth a test, beside the base: large ones for prefill's rate, small ones for decode's."""
_MIN_TRIALS = 2
_MIN_OUTPUTS_16_BIT = 1 << 17
"""Outputs to compare: rounding to 16 bits hides another order of summation in all but a few of 10,000 outputs."""


@dataclass(frozen=True, slots=True)
class _LadderKey:
    out_features: int
    in_features: int
    dtype: torch.dtype
    device: torch.device
    has_bias: bool
    num_threads: int
    num_rows: int


def has_amx() -> bool:
    """Whether this machine multiplies tiles (AMX), which changes how many rows a base call should have."""
    probe: Callable[[], bool] | None = getattr(torch.cpu, "_is_amx_tile_supported", None)
    return probe is not None and probe()


class RowLadder:
    """Remembers which row counts give a row the same bits as the base count does.

    One object serves all layers of a model, since layers of one shape share the answer. Owned by the model.
    """

    __slots__ = ("_agrees", "_base")

    def __init__(self, base: int | None = None) -> None:
        """Use `base` rows as the arithmetic that the others must equal.

        Args:
            base: Rows of a base call, a power of two; None picks 64 on a GPU and for bf16 on AMX machines, 16 otherwise.

        Raises:
            ValueError: a base that is no power of two.
        """
        if base is not None and (base < 1 or base & (base - 1)):
            raise ValueError(f"base is {base}; it must be a power of two")
        self._base = base
        self._agrees: dict[_LadderKey, bool] = {}

    def base(self, linear: "PackedLinear") -> int:
        """Rows of a base call."""
        if self._base is not None:
            return self._base
        is_wide = linear.device.type != "cpu" or (linear.dtype == torch.bfloat16 and has_amx())
        return 64 if is_wide else 16

    def cut(self, num_rows: int, linear: "PackedLinear") -> list[int]:
        """Row counts of the calls that compute `num_rows` rows; their sum is num_rows or more. O(pieces)."""
        base = self.base(linear)
        pieces: list[int] = []
        for rung in sorted({base, *_RUNGS}, reverse=True):
            if rung > base and num_rows >= rung and self._holds(rung, linear):
                pieces += [rung] * (num_rows // rung)
                num_rows %= rung
            elif rung == base:
                pieces += [base] * (num_rows // base)
                num_rows %= base
        if num_rows:
            small = [r for r in sorted(_RUNGS) if num_rows <= r < base and self._holds(r, linear)]
            pieces.append(small[0] if small else base)
        return pieces

    def agreeing(self, linear: "PackedLinear") -> tuple[int, ...]:
        """All row counts that hold for this layer, the base among them, ascending. Runs every test; for reports."""
        base = self.base(linear)
        return tuple(r for r in sorted({base, *_RUNGS}) if r == base or self._holds(r, linear))

    def _holds(self, rung: int, linear: "PackedLinear") -> bool:
        key = _LadderKey(
            linear.out_features,
            linear.in_features,
            linear.dtype,
            linear.device,
            linear.has_bias,
            torch.get_num_threads(),
            rung,
        )
        if key not in self._agrees:
            self._agrees[key] = rows_agree(linear, rung, self.base(linear))
        return self._agrees[key]


class PackedLinear:
    """y = x W^T + b over weights that were repacked once. Holds the only copy: drop the original after construction."""

    __slots__ = (
        "_bias",
        "_ladder",
        "_product",
        "compiled",
        "device",
        "dtype",
        "has_bias",
        "in_features",
        "is_packed",
        "out_features",
    )

    def __init__(
        self,
        weight: torch.Tensor,
        bias: torch.Tensor | None = None,
        *,
        ladder: RowLadder | None = None,
        deterministic: bool = True,
        kernel: LinearKernel | None = None,
    ) -> None:
        """Repack the weight.

        Args:
            weight: `[out_features, in_features]`. On a GPU it stays as it is.
            bias: `[out_features]`, same dtype.
            ladder: Shared memory of the self-test; None makes one for this layer alone.
            deterministic: False gives up row invariance: one call, whatever the number of rows.
            kernel: Computes the weights that it has code for, row-invariant without a ladder.

        Raises:
            ValueError: a weight that is not a matrix, or a bias that does not fit.
        """
        if weight.dim() != 2:
            raise ValueError(f"weight has shape {list(weight.shape)}; it must be [out_features, in_features]")
        if bias is not None and bias.shape != weight.shape[:1]:
            raise ValueError(f"bias has shape {list(bias.shape)}, the weight {list(weight.shape)}")
        self.out_features, self.in_features = weight.shape
        self.dtype, self.device = weight.dtype, weight.device
        self.has_bias = bias is not None
        self._bias = bias
        self.compiled: CompiledLinear | None = None
        """The layer, where the kernel computes it."""
        if kernel is not None and kernel.fits(weight):
            self.compiled = kernel.layer(weight, bias)
        needs_ladder = deterministic and self.compiled is None
        self._ladder = (ladder or RowLadder()) if needs_ladder else None
        packed = self.compiled or _packed_product(weight, bias)
        self.is_packed = packed is not None
        self._product = packed or _plain_product(weight, bias)

    def in_float32(self, x: torch.Tensor) -> torch.Tensor:
        """As a call, giving float32; where it is compiled, sums are not rounded to the weight's type before."""
        return self(x).float() if self.compiled is None else self.compiled(x, torch.float32)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Multiply `x [num_rows, in_features]`, giving `[num_rows, out_features]`."""
        num_rows = x.shape[0]
        if self._ladder is None or num_rows == 0:
            return self.product(x) if num_rows else x.new_empty((0, self.out_features))
        pieces = self._ladder.cut(num_rows, self)
        if len(pieces) == 1:
            return self._padded(x, pieces[0])
        outputs: list[torch.Tensor] = []
        begin = 0
        for rows in pieces:
            outputs.append(self._padded(x[begin : begin + rows], rows))
            begin += rows
        return torch.cat(outputs)

    def product(self, x: torch.Tensor) -> torch.Tensor:
        """One library call with exactly the rows of x: the bits depend on how many they are."""
        return self._product(x)

    def _padded(self, x: torch.Tensor, num_rows: int) -> torch.Tensor:
        missing = num_rows - x.shape[0]
        if not missing:
            return self._product(x)
        return self._product(F.pad(x, (0, 0, 0, missing)))[: x.shape[0]]


def rows_agree(linear: PackedLinear, num_rows: int, base: int) -> bool:
    """Whether a call with `num_rows` rows gives each row the bits that a call with `base` rows gives it.

    Tries random rows in several places and companies; a blocking that differs shows in nearly every row.
    """
    generator = torch.Generator().manual_seed(num_rows)
    total = math.lcm(num_rows, base, 64)
    min_outputs = _MIN_OUTPUTS_16_BIT if linear.dtype.itemsize == 2 else 1
    for _ in range(max(_MIN_TRIALS, min_outputs // (total * linear.out_features))):
        x = torch.randn((total, linear.in_features), generator=generator).to(linear.device, linear.dtype)
        order = torch.randperm(total, generator=generator).to(linear.device)
        wanted = torch.cat([linear.product(part) for part in torch.split(x, base)])
        given = torch.cat([linear.product(part) for part in torch.split(x[order], num_rows)])
        if not torch.equal(given, wanted[order]):
            return False
    return True


def _packed_product(
    weight: torch.Tensor, bias: torch.Tensor | None
) -> Callable[[torch.Tensor], torch.Tensor] | None:
    """The product over a repacked copy of the weight, or None where this torch or machine has no such thing."""
    can_repack = weight.device.type == "cpu" and weight.dtype in (torch.float32, torch.bfloat16)
    if not can_repack or not torch._C._has_mkldnn:
        return None
    try:
        packed = torch.ops.mkldnn._reorder_linear_weight(weight, None)
        run = torch.ops.mkldnn._linear_pointwise.default
        run(weight.new_zeros((1, weight.shape[1])), packed, bias, "none", [], "")
    except (RuntimeError, AttributeError):
        # private names, and bf16 needs instructions that old machines lack: plain F.linear serves
        return None

    def product(x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = run(x, packed, bias, "none", [], "")
        return result

    return product


def _plain_product(weight: torch.Tensor, bias: torch.Tensor | None) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda x: F.linear(x, weight, bias)
