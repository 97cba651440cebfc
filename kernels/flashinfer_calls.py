"""The keyword arguments of every FlashInfer call, made by pure functions.

The backend calls FlashInfer with these dictionaries and nothing else, and the tests bind the same dictionaries to the
signatures of the installed package. Imports no FlashInfer.

Rules that the arguments keep: the "fa2" kernels always (the others drop options without a word), int32 CSR arrays with the
small ones on the host, dtypes named (the default of `q_data_type` is float16), lengths given (they halve a plan's cost).
"""

from dataclasses import dataclass
from typing import Any

import torch

from phloem.kernels.attention import AttentionSpec

Kwargs = dict[str, Any]

_LAYOUT = "NHD"
_BACKEND = "fa2"
_DECODE_GROUP_SIZES = (1, 2, 3)
"""GQA groups for which decode on CUDA cores exists and is no slower than on tensor cores."""


@dataclass(frozen=True, slots=True, eq=False)
class PagedRows:
    """What one wrapper plans: rows of queries, each over a run of pages."""

    qo_indptr: torch.Tensor
    """int32 `[num_rows + 1]` on the host: row i owns queries [qo_indptr[i], qo_indptr[i + 1])."""
    kv_indptr: torch.Tensor
    """int32 `[num_rows + 1]` on the host: row i reads kv_indices[kv_indptr[i] : kv_indptr[i + 1]]."""
    kv_indices: torch.Tensor
    """int32 `[num_pages]`: block ids, on the store's device when a wrapper gets them."""
    kv_last_page_len: torch.Tensor
    """int32 `[num_rows]` on the host: tokens in the last page, 1 to the block size."""
    kv_lens: torch.Tensor
    """int32 `[num_rows]` on the host: tokens that the row reads."""
    max_count: int
    """Queries of the longest row."""

    @property
    def num_rows(self) -> int:
        """Rows, each with a query or more."""
        return self.kv_lens.shape[0]

    @property
    def num_tokens(self) -> int:
        """Queries of all rows."""
        return int(self.qo_indptr[-1])


@dataclass(frozen=True, slots=True)
class AttentionCall:
    """What all plans and runs of one layer kind have in common."""

    spec: AttentionSpec
    block_size: int
    window: int | None
    """Sliding window of the layers, in tokens, the query's own included; None for full layers."""
    q_dtype: torch.dtype
    kv_dtype: torch.dtype
    split_pages: int | None = None
    """Pages after which a row's KV is always split; None leaves it to FlashInfer, unless `never_split`."""
    never_split: bool = False
    k_scale: float = 1.0
    """What 8-bit keys are multiplied by when they are read."""
    v_scale: float = 1.0
    enable_pdl: bool | None = None
    """Programmatic dependent launch; None lets FlashInfer ask the device."""

    @property
    def decodes_on_tensor_cores(self) -> bool:
        """Whether decode rows need, or gain from, tensor cores."""
        return self.spec.group_size not in _DECODE_GROUP_SIZES or self.kv_dtype.itemsize == 1


@dataclass(frozen=True, slots=True, eq=False)
class GraphBuffers:
    """Where a captured wrapper reads its rows; int32, on the device, at addresses that never change."""

    qo_indptr: torch.Tensor
    kv_indptr: torch.Tensor
    kv_indices: torch.Tensor
    kv_last_page_len: torch.Tensor


def prefill_wrapper_kwargs(workspace: torch.Tensor, buffers: GraphBuffers | None = None) -> Kwargs:
    """Of `BatchPrefillWithPagedKVCacheWrapper`; with buffers, one that can be captured."""
    kwargs: Kwargs = {"float_workspace_buffer": workspace, "kv_layout": _LAYOUT, "backend": _BACKEND}
    if buffers is not None:
        kwargs |= {
            "use_cuda_graph": True,
            "qo_indptr_buf": buffers.qo_indptr,
            "paged_kv_indptr_buf": buffers.kv_indptr,
            "paged_kv_indices_buf": buffers.kv_indices,
            "paged_kv_last_page_len_buf": buffers.kv_last_page_len,
        }
    return kwargs


def decode_wrapper_kwargs(
    workspace: torch.Tensor, call: AttentionCall, buffers: GraphBuffers | None = None
) -> Kwargs:
    """Of `BatchDecodeWithPagedKVCacheWrapper`; with buffers, one that can be captured."""
    kwargs: Kwargs = {
        "float_workspace_buffer": workspace,
        "kv_layout": _LAYOUT,
        "use_tensor_cores": call.decodes_on_tensor_cores,
        "backend": _BACKEND,
    }
    if buffers is not None:
        kwargs |= {
            "use_cuda_graph": True,
            "paged_kv_indptr_buffer": buffers.kv_indptr,
            "paged_kv_indices_buffer": buffers.kv_indices,
            "paged_kv_last_page_len_buffer": buffers.kv_last_page_len,
        }
    return kwargs


def reset_workspace_kwargs(workspace: torch.Tensor, int_workspace: torch.Tensor) -> Kwargs:
    """Of both wrappers' `reset_workspace_buffer`."""
    return {"float_workspace_buffer": workspace, "int_workspace_buffer": int_workspace}


def prefill_plan_kwargs(call: AttentionCall, rows: PagedRows, *, causal: bool) -> Kwargs:
    """Of the prefill wrapper's `plan`. Causal rows are aligned bottom-right: the queries are the last tokens."""
    return {
        "qo_indptr": rows.qo_indptr,
        "paged_kv_indptr": rows.kv_indptr,
        "paged_kv_indices": rows.kv_indices,
        "paged_kv_last_page_len": rows.kv_last_page_len,
        "num_qo_heads": call.spec.num_q_heads,
        "num_kv_heads": call.spec.num_kv_heads,
        "head_dim_qk": call.spec.head_dim,
        "page_size": call.block_size,
        "causal": causal,
        "max_token_per_sequence": rows.max_count,
        **_masks(call, rows),
    }


def decode_plan_kwargs(call: AttentionCall, rows: PagedRows) -> Kwargs:
    """Of the decode wrapper's `plan`; every row has one query."""
    return {
        "indptr": rows.kv_indptr,
        "indices": rows.kv_indices,
        "last_page_len": rows.kv_last_page_len,
        "num_qo_heads": call.spec.num_q_heads,
        "num_kv_heads": call.spec.num_kv_heads,
        "head_dim": call.spec.head_dim,
        "page_size": call.block_size,
        **_masks(call, rows),
    }


def run_kwargs(
    call: AttentionCall, q: torch.Tensor, kv: torch.Tensor, out: torch.Tensor, *, return_lse: bool = False
) -> Kwargs:
    """Of both wrappers' `run`: queries `[num_tokens, num_q_heads, head_dim]` over one layer of the store."""
    kwargs: Kwargs = {
        "q": q,
        "paged_kv_cache": kv,
        "out": out,
        "return_lse": return_lse,
        "enable_pdl": call.enable_pdl,
    }
    if call.kv_dtype.itemsize == 1:
        kwargs |= {"k_scale": call.k_scale, "v_scale": call.v_scale}
    return kwargs


def merge_kwargs(
    out: torch.Tensor, lse: torch.Tensor, other: torch.Tensor, other_lse: torch.Tensor
) -> Kwargs:
    """Of `merge_state_in_place`: `out` and `lse` (base 2, float32 `[num_tokens, num_q_heads]`) take in the other."""
    return {"v": out, "s": lse, "v_other": other, "s_other": other_lse}


def rms_norm_kwargs(x: torch.Tensor, weight: torch.Tensor, eps: float) -> Kwargs:
    """Of `rmsnorm`: rows `[num_tokens, hidden]` or `[num_tokens, num_heads, head_dim]`."""
    return {"input": x, "weight": weight, "eps": eps}


def silu_and_mul_kwargs(gate_up: torch.Tensor) -> Kwargs:
    """Of `silu_and_mul`: `[num_tokens, 2 * width]`, gate before up."""
    return {"input": gate_up}


def rope_kwargs(q: torch.Tensor, k: torch.Tensor, positions: torch.Tensor, table: torch.Tensor) -> Kwargs:
    """Of `apply_rope_with_cos_sin_cache`: q and k `[num_tokens, num_heads, head_dim]`, rotated by halves.

    Args:
        q: Queries.
        k: Keys.
        positions: Integer `[num_tokens]`.
        table: float32 `[max_position, rotary_dim]`, cosines before sines.
    """
    return {
        "positions": positions,
        "query": q.flatten(1),
        "key": k.flatten(1),
        "head_size": q.shape[2],
        "cos_sin_cache": table,
        "is_neox": True,
    }


def _masks(call: AttentionCall, rows: PagedRows) -> Kwargs:
    """What both `plan`s share. Splits are named only where they are set: decode on CUDA cores refuses them."""
    kwargs: Kwargs = {
        # FlashInfer counts the tokens before the query, we count the query as well
        "window_left": -1 if call.window is None else call.window - 1,
        "logits_soft_cap": call.spec.logits_soft_cap,
        "sm_scale": call.spec.softmax_scale,
        "q_data_type": call.q_dtype,
        "kv_data_type": call.kv_dtype,
        "seq_lens": rows.kv_lens,
    }
    if call.never_split:
        kwargs["disable_split_kv"] = True
    elif call.split_pages is not None:
        kwargs["fixed_split_size"] = call.split_pages
    return kwargs
