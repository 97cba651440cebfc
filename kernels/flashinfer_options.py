"""How the FlashInfer backend runs, and what follows from it for a model and a store."""

from dataclasses import dataclass, field

import torch

from phloem.kernels.attention import AttentionSpec
from phloem.kernels.flashinfer_calls import AttentionCall
from phloem.kernels.flashinfer_library import FlashInferUnavailable, why_unsupported
from phloem.kernels.flashinfer_rows import CascadeGate
from phloem.kernels.kv_store import MAX_BLOCK_SIZE, PagedKVStore

_MERGE_THREADS = 1024
"""Threads of one block of the merge kernel: one per head and vector of `_MERGE_VECTOR` values."""
_MERGE_VECTOR = 8


@dataclass(frozen=True, slots=True)
class FlashInferOptions:
    """How the backend runs. The defaults suit any model that `why_unsupported` lets through."""

    q_dtype: torch.dtype | None = None
    """The model's dtype; None takes the store's, and 8-bit stores need it."""
    deterministic: bool = False
    """A token's bits depend on its path alone."""
    split_tokens: int | None = None
    """With `deterministic`: KV is split at multiples of this many tokens, for long contexts with few rows. None never
    splits, which needs no scratch memory and allows every step to run as a CUDA graph."""
    cascade: CascadeGate | None = field(default_factory=CascadeGate)
    """When shared prefixes are read once; None for never. Off with `deterministic`."""
    workspace_bytes: int = 384 << 20
    """Scratch memory on the device, one for all wrappers."""
    k_scale: float = 1.0
    """8-bit KV: keys are stored divided by this."""
    v_scale: float = 1.0
    """8-bit KV: values are stored divided by this."""
    enable_pdl: bool | None = None
    """Programmatic dependent launch; None lets FlashInfer ask the device."""

    def __post_init__(self) -> None:
        """Refuse what can't work.

        Raises:
            ValueError: naming the field.
        """
        if self.split_tokens is not None and (self.split_tokens < 1 or self.split_tokens % MAX_BLOCK_SIZE):
            raise ValueError(
                f"split_tokens is {self.split_tokens}; it must be a positive multiple of {MAX_BLOCK_SIZE}, or None"
            )
        if self.workspace_bytes < 1 << 20:
            raise ValueError(f"workspace_bytes is {self.workspace_bytes}; FlashInfer needs a MiB at least")
        for name in ("k_scale", "v_scale"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be positive")


def attention_calls(
    spec: AttentionSpec, store: PagedKVStore, options: FlashInferOptions
) -> dict[int | None, AttentionCall]:
    """The calls' common arguments for each distinct window of the model.

    Raises:
        FlashInferUnavailable: FlashInfer has no code for this model.
    """
    q_dtype = options.q_dtype or store.dtype
    reason = why_unsupported(spec, q_dtype=q_dtype, kv_dtype=store.dtype, block_size=store.block_size)
    if reason is not None:
        raise FlashInferUnavailable(f'{reason}; use the "cpu" backend')
    split = options.split_tokens if options.deterministic else None
    return {
        window: AttentionCall(
            spec=spec,
            block_size=store.block_size,
            window=window,
            q_dtype=q_dtype,
            kv_dtype=store.dtype,
            # a window's rows are short, and where a kernel would split them depends on the window
            split_pages=split // store.block_size if split and window is None else None,
            never_split=options.deterministic and (split is None or window is not None),
            k_scale=options.k_scale,
            v_scale=options.v_scale,
            enable_pdl=options.enable_pdl,
        )
        for window in dict.fromkeys(spec.window(layer) for layer in range(spec.num_layers))
    }


def can_merge(spec: AttentionSpec) -> bool:
    """Whether the merge kernel has threads enough for the model's heads."""
    vector = max(_MERGE_VECTOR, spec.head_dim // 32)
    return spec.num_q_heads * (spec.head_dim // vector) <= _MERGE_THREADS


def check_queries(q: torch.Tensor, num_tokens: int, call: AttentionCall) -> None:
    """Refuse queries that do not fit the plan.

    Raises:
        ValueError: another shape.
        TypeError: another dtype.
    """
    wanted = [num_tokens, call.spec.num_q_heads, call.spec.head_dim]
    if list(q.shape) != wanted:
        raise ValueError(f"q has shape {list(q.shape)}; the plan needs {wanted}")
    if q.dtype != call.q_dtype:
        raise TypeError(f"q is {q.dtype}; the backend was made for {call.q_dtype}")
