"""The first layer of an MLP with its activation: SwiGLU over one product, fused where the product is compiled."""

from collections.abc import Callable

import torch

from phloem.kernels.cpu_linear import CompiledLinear, LinearKernel
from phloem.kernels.linear import PackedLinear, RowLadder


class GatedLinear:
    """silu(x Wg^T + bg) * (x Wu^T + bu). Row-invariant as `PackedLinear` is; holds the only copy of the weights."""

    __slots__ = ("_run", "compiled")

    def __init__(
        self,
        weight: torch.Tensor,
        bias: torch.Tensor | None = None,
        *,
        silu_and_mul: Callable[[torch.Tensor], torch.Tensor],
        ladder: RowLadder | None = None,
        deterministic: bool = True,
        kernel: LinearKernel | None = None,
    ) -> None:
        """Repack the weight.

        Args:
            weight: `[2 * width, in_features]`, Wg above Wu.
            bias: `[2 * width]`, same dtype.
            silu_and_mul: The activation, where it is an operation of its own.
            ladder: See `PackedLinear`.
            deterministic: See `PackedLinear`.
            kernel: Computes the weights that it has code for, activation included.

        Raises:
            ValueError: As `PackedLinear` does, and for a weight with an odd number of rows.
        """
        if weight.shape[0] % 2:
            raise ValueError(
                f"weight has {weight.shape[0]} rows; it must have as many gates as gated outputs"
            )
        self._run: Callable[[torch.Tensor], torch.Tensor]
        self.compiled: CompiledLinear | None = None
        """The layer, where the kernel computes it."""
        if kernel is not None and kernel.fits(weight):
            self._run = self.compiled = kernel.gated_layer(weight, bias)
            return
        linear = PackedLinear(weight, bias, ladder=ladder, deterministic=deterministic)
        self._run = lambda x: silu_and_mul(linear(x))

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Compute `[num_rows, width]` of `x [num_rows, in_features]`."""
        return self._run(x)
