"""The operations between matrix products, chosen once for a device: torch's, or FlashInfer's fused kernels.

FlashInfer's RMSNorm and SwiGLU round once, at the end; torch's round as transformers does. So a model gives slightly
different numbers with either, and one process stays with one.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from phloem.kernels.activation import silu_and_mul
from phloem.kernels.flashinfer_calls import rms_norm_kwargs, rope_kwargs, silu_and_mul_kwargs
from phloem.kernels.flashinfer_library import FlashInferLibrary
from phloem.kernels.norm import add_norm, rms_norm
from phloem.kernels.rope import RotaryEmbedding

Rotate = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
"""Of q `[num_tokens, num_q_heads, head_dim]`, k and integer positions; returns both rotated, as new tensors."""

_VECTOR_BYTES = 16
"""FlashInfer's activation reads rows in vectors of this size."""


@dataclass(frozen=True, slots=True)
class FusedOps:
    """One implementation of each."""

    rms_norm: Callable[[torch.Tensor, torch.Tensor, float], torch.Tensor]
    """As `norm.rms_norm`."""
    add_norm: Callable[[torch.Tensor, torch.Tensor, torch.Tensor, float], tuple[torch.Tensor, torch.Tensor]]
    """As `norm.add_norm`; the first argument is worthless afterwards, since the sum may be written over it."""
    silu_and_mul: Callable[[torch.Tensor], torch.Tensor]
    """As `activation.silu_and_mul`."""
    make_rotate: Callable[[RotaryEmbedding, torch.device], Rotate]
    """Bind an embedding's tables on a device; once per model."""


def torch_ops() -> FusedOps:
    """Plain torch, row-invariant on the CPU."""
    return FusedOps(rms_norm, add_norm, silu_and_mul, lambda rope, device: rope.to(device))


def flashinfer_ops(library: FlashInferLibrary) -> FusedOps:
    """FlashInfer's kernels for tensors on a GPU, in float16 or bfloat16."""

    def norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        out: torch.Tensor = library.rmsnorm(**rms_norm_kwargs(x, weight, eps))
        return out

    def activate(gate_up: torch.Tensor) -> torch.Tensor:
        if gate_up.shape[1] // 2 * gate_up.itemsize % _VECTOR_BYTES:
            return silu_and_mul(gate_up)
        out: torch.Tensor = library.silu_and_mul(**silu_and_mul_kwargs(gate_up))
        return out

    def make_rotate(rope: RotaryEmbedding, device: torch.device) -> Rotate:
        table = rope.cos_sin().to(device)

        def rotate(
            q: torch.Tensor, k: torch.Tensor, positions: torch.Tensor
        ) -> tuple[torch.Tensor, torch.Tensor]:
            new_q, new_k = library.apply_rope(**rope_kwargs(q, k, positions, table))
            return new_q.view(q.shape), new_k.view(k.shape)

        return rotate

    def norm_sum(
        hidden: torch.Tensor, delta: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        total = hidden + delta
        return total, norm(total, weight, eps)

    return FusedOps(norm, norm_sum, activate, make_rotate)
