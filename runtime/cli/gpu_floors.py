"""What a GPU would need at least: bytes and operations of decode steps, attention and prefill. Pure arithmetic.

A decode step can't be faster than reading what it must read once, a prefill not than its multiplications.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from phloem.runtime.models.config import ModelConfig
from phloem.runtime.models.weights import expected_shapes

_EMBEDDING, _HEAD = "model.embed_tokens.weight", "lm_head.weight"


@dataclass(frozen=True, slots=True)
class Card:
    """What this card was measured to do."""

    bytes_per_s: float
    """Of a large copy, read and written bytes together."""

    flops_per_s: float
    """Of a large matrix product in bfloat16, multiplications and additions."""


def kv_bytes_per_token(model: ModelConfig, kv_dtype: torch.dtype, *, num_layers: int) -> int:
    """K and V of one token in so many layers."""
    return num_layers * 2 * model.num_kv_heads * model.head_dim * kv_dtype.itemsize


def decode_step_bytes(
    model: ModelConfig,
    dtype: torch.dtype,
    kv_dtype: torch.dtype,
    *,
    num_rows: int,
    context: float,
) -> float:
    """Bytes that a decode step reads at least: the weights once, and each row's own KV.

    Args:
        model: The model's shape.
        dtype: Of the weights.
        kv_dtype: Of the KV.
        num_rows: Requests in the step.
        context: Tokens that each reads, on average.
    """
    # Of the embedding a step reads a few rows only; tied, it is the head, too.
    weights = _matrix_values(model, with_head=True) * dtype.itemsize
    return weights + num_rows * context * kv_bytes_per_token(model, kv_dtype, num_layers=model.num_layers)


def prefill_flops(model: ModelConfig, num_tokens: int) -> int:
    """Multiplications and additions of a prompt from an empty cache: all layers, causal attention, the head once."""
    layers = 2 * num_tokens * _matrix_values(model, with_head=False)
    head = 2 * model.vocab_size * model.hidden_size
    # Scores and sums of values, two operations each, over half of all pairs.
    attention = 2 * num_tokens**2 * model.num_q_heads * model.head_dim * model.num_layers
    return layers + attention + head


def _matrix_values(model: ModelConfig, *, with_head: bool) -> int:
    shapes = expected_shapes(model)
    inside = sum(
        math.prod(shape)
        for name, shape in shapes.items()
        if len(shape) == 2 and name not in (_EMBEDDING, _HEAD)
    )
    return inside + (model.vocab_size * model.hidden_size if with_head else 0)
