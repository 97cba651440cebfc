"""What a machine would need at least: bytes and operations of decode steps, attention and prefill. Pure arithmetic.

A decode step can't be faster than reading what it must read once, a prefill not than its multiplications.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch

from phloem.runtime.models.config import ModelConfig
from phloem.runtime.models.weights import expected_shapes

_EMBEDDING, _HEAD = "model.embed_tokens.weight", "lm_head.weight"


@dataclass(frozen=True, slots=True)
class Rates:
    """What this card, or this machine, was measured to do."""

    bytes_per_s: float
    """On a GPU of a large copy, read and written bytes together; on a CPU of reading."""

    flops_per_s: float
    """Of large matrix products, multiplications and additions."""


@dataclass(frozen=True, slots=True)
class DecodeStage:
    """Decode steps that are alike."""

    steps: float
    rows: int
    """In each step."""

    kv_tokens: float
    """Distinct tokens that the rows of a step read together, on average."""


@dataclass(frozen=True, slots=True)
class FloorModel:
    """The least time that a model takes on a machine."""

    model: ModelConfig
    dtype: torch.dtype
    """Of the weights."""

    kv_dtype: torch.dtype
    rates: Rates

    def decode_step_s(self, *, rows: int, kv_tokens: float) -> float:
        """Seconds of a decode step that reads so many distinct tokens: of its reads or its products, whichever take longer."""
        read = decode_step_bytes(self.model, self.dtype, self.kv_dtype, num_rows=1, context=kv_tokens)
        flops = 2 * rows * _matrix_values(self.model, with_head=True)
        return max(read / self.rates.bytes_per_s, flops / self.rates.flops_per_s)

    def prefill_s(self, num_tokens: int, *, cached: int = 0) -> float:
        """Seconds of a prompt of which so many tokens are cached."""
        return prefill_flops(self.model, num_tokens, cached=cached) / self.rates.flops_per_s

    def total_s(self, prompts: Iterable[tuple[int, int]], stages: Iterable[DecodeStage]) -> float:
        """Seconds of prompts, as (tokens, of these cached), and of decode steps."""
        prefills = sum(self.prefill_s(length, cached=cached) for length, cached in prompts)
        decodes = sum(
            stage.steps * self.decode_step_s(rows=stage.rows, kv_tokens=stage.kv_tokens) for stage in stages
        )
        return prefills + decodes


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


def prefill_flops(model: ModelConfig, num_tokens: int, *, cached: int = 0) -> int:
    """Multiplications and additions of a prompt: all layers, causal attention, the head once.

    Args:
        model: The model's shape.
        num_tokens: Of the prompt.
        cached: Of these, those whose KV is there.
    """
    layers = 2 * (num_tokens - cached) * _matrix_values(model, with_head=False)
    head = 2 * model.vocab_size * model.hidden_size
    # Scores and sums of values, two operations each, over half of all pairs.
    pairs = num_tokens**2 - cached**2
    attention = 2 * pairs * model.num_q_heads * model.head_dim * model.num_layers
    return layers + attention + head


def linear_shapes(model: ModelConfig) -> list[tuple[int, int]]:
    """Return (outputs, inputs) of a layer's matrix products as the decoder makes them: fused QKV, output, fused gate and up, down."""
    qkv = (model.num_q_heads + 2 * model.num_kv_heads) * model.head_dim
    return [
        (qkv, model.hidden_size),
        (model.hidden_size, model.num_q_heads * model.head_dim),
        (2 * model.intermediate_size, model.hidden_size),
        (model.hidden_size, model.intermediate_size),
    ]


def _matrix_values(model: ModelConfig, *, with_head: bool) -> int:
    shapes = expected_shapes(model)
    inside = sum(
        math.prod(shape)
        for name, shape in shapes.items()
        if len(shape) == 2 and name not in (_EMBEDDING, _HEAD)
    )
    return inside + (model.vocab_size * model.hidden_size if with_head else 0)
