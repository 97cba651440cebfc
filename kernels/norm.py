"""RMSNorm (Zhang and Sennrich, 2019), row by row."""

import torch


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Scale each row to unit root mean square, then by `weight`.

    Computed in float32 and rounded to x's dtype before the weight is applied, in the order of transformers'
    LlamaRMSNorm, so that both give the same bits. A row's bits don't depend on the other rows: the mean runs over the
    contiguous last dimension, everything else is elementwise in exact operations.

    Args:
        x: `[..., hidden]`, any floating type.
        weight: `[hidden]`.
        eps: Added to the mean square.

    Returns:
        `[..., hidden]`, dtype of x times dtype of weight.
    """
    wide = x.float()
    wide = wide * torch.rsqrt((wide * wide).mean(-1, keepdim=True) + eps)
    return weight * wide.to(x.dtype)


def add_norm(
    hidden: torch.Tensor, delta: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return `hidden + delta` and its `rms_norm`: what stands between two layers of a decoder."""
    total = hidden + delta
    return total, rms_norm(total, weight, eps)
