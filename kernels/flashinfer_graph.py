"""Decode steps as CUDA graphs: one backend per captured batch size, always of exactly that many rows.

How it is used::

    decode = GraphDecodeBackend(backend, GraphBucket(num_rows=8, padding_block=..., max_blocks_per_row=...))
    decode.plan(plan)                        # outside of the graph; fills up with padding rows
    ... run the model once to warm up, then capture it, over 8 tokens: `append` and `attend` as in any backend ...
    decode.plan(next_plan); graph.replay()   # before every replay, also of the same rows: KV has grown

The captured kernels read their rows from buffers that `plan` rewrites; nothing of a step is frozen but the number of rows.
Padding rows read and write the first slot of one reserved block, which no path may own.
"""

from dataclasses import dataclass, replace

import torch

from phloem.kernels.attention import check_plan
from phloem.kernels.device_copy import PlanFence, on_device, stage
from phloem.kernels.flashinfer import FlashInferBackend, place_rows, plan_wrapper, write_kv
from phloem.kernels.flashinfer_calls import (
    AttentionCall,
    GraphBuffers,
    PagedRows,
    decode_plan_kwargs,
    decode_wrapper_kwargs,
    prefill_plan_kwargs,
    prefill_wrapper_kwargs,
    reset_workspace_kwargs,
    run_kwargs,
)
from phloem.kernels.flashinfer_library import PagedWrapper
from phloem.kernels.flashinfer_options import check_queries
from phloem.kernels.flashinfer_rows import pad_decode
from phloem.kernels.plan import AttentionPlan, PlanError

_INT_WORKSPACE_BYTES = 1 << 20
"""For the tile lists of a decode plan; FlashInfer's own 8 MiB, times the wrappers of all buckets, would add up."""


@dataclass(frozen=True, slots=True)
class GraphBucket:
    """One captured batch size."""

    num_rows: int
    """Tokens of every step, padding included."""
    padding_block: int
    """A block id that no path will ever own."""
    max_blocks_per_row: int
    """The longest path that a row may have, in blocks; sizes the buffers."""

    def __post_init__(self) -> None:
        """Refuse what has no rows.

        Raises:
            ValueError: naming the field.
        """
        for name in ("num_rows", "max_blocks_per_row"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be 1 or more")


class GraphDecodeBackend:
    """An `AttentionBackend` for steps of `num_rows` decode rows. Owner of its buffers; shares the rest with its base."""

    def __init__(self, base: FlashInferBackend, bucket: GraphBucket) -> None:
        """Make the wrappers of one bucket, over the base's store, options and scratch memory.

        Raises:
            ValueError: a padding block outside of the store.
        """
        if not 0 <= bucket.padding_block < base.store.num_blocks:
            raise ValueError(
                f"padding_block is {bucket.padding_block}; the store has blocks 0 to {base.store.num_blocks - 1}"
            )
        self.base = base
        self.bucket = bucket
        self._fence = PlanFence(base.device)
        with on_device(base.device):
            slots = torch.full((bucket.num_rows,), bucket.padding_block * base.store.block_size)
            self._key_rows = base.store.key_rows(slots).to(base.device)
            self._lanes = {window: _GraphLane(base, bucket, call) for window, call in base.calls.items()}

    def why_not(self, plan: AttentionPlan) -> str | None:
        """Tell why a step can't run here, so that the base must run it; None if it can."""
        counts = plan.qo_indptr[1:] - plan.qo_indptr[:-1]
        rows, blocks = plan.num_tokens, plan.kv_indptr[1:] - plan.kv_indptr[:-1]
        if plan.num_mirrors:
            return (
                f"{plan.num_mirrors} more slots are written than there are tokens, and graphs write one each"
            )
        if rows and int(counts.max()) > 1:
            return f"a row computes {int(counts.max())} tokens, and graphs run decode rows only"
        if not 1 <= rows <= self.bucket.num_rows:
            return f"the step has {rows} rows, the graph runs 1 to {self.bucket.num_rows}"
        if int(blocks.max()) > self.bucket.max_blocks_per_row:
            return f"a row reads {int(blocks.max())} blocks, the graph has room for {self.bucket.max_blocks_per_row}"
        split = self.base.options.split_tokens if self.base.options.deterministic else None
        if split is not None and int(plan.kv_lens.max()) > split:
            return f"a row reads {int(plan.kv_lens.max())} tokens, which are split at {split}, and graphs can't split"
        return None

    def plan(self, plan: AttentionPlan) -> None:
        """Take a step's decode rows and fill up with padding; never while a graph is being captured.

        Raises:
            PlanError: a rule is broken, a row reads the reserved block, or `why_not` says no.
        """
        check_plan(plan, self.base.store)
        reason = self.why_not(plan)
        if reason is not None:
            raise PlanError(reason)
        padded = {window: self._padded(plan, window) for window in self._lanes}
        key_rows = self.base.store.key_rows(self._padded_slots(plan))
        with on_device(self.base.device):
            self._fence.wait()
            pages = {str(window): rows.kv_indices for window, rows in padded.items()}
            staged = stage({"key_rows": key_rows, **pages}, self.base.device)
            self._key_rows.copy_(staged["key_rows"], non_blocking=True)
            for window, lane in self._lanes.items():
                lane.plan(place_rows(padded[window], staged[str(window)]))
            self._fence.record()

    def append(self, layer: int, k: torch.Tensor, v: torch.Tensor) -> None:
        """Write the KV of `num_rows` tokens; padding rows write to the reserved block. See `AttentionBackend.append`."""
        write_kv(self.base.store, self.base.options, layer, k=k, v=v, key_rows=self._key_rows)

    def attend(self, layer: int, q: torch.Tensor) -> torch.Tensor:
        """Attend with `num_rows` tokens; what comes back for padding rows is worthless. See `AttentionBackend.attend`.

        Raises:
            ValueError: another number of tokens.
        """
        lane = self._lanes[self.base.spec.window(layer)]
        check_queries(q, self.bucket.num_rows, lane.call)
        with on_device(self.base.device):
            return lane.run(q, self.base.store.layer(layer))

    def _padded(self, plan: AttentionPlan, window: int | None) -> PagedRows:
        layout = self.base.layout(plan, window, cascade=False)
        rows = layout.prefill if self.base.options.deterministic else layout.decode
        assert rows is not None
        return pad_decode(rows, self.bucket.num_rows, self.bucket.padding_block)

    def _padded_slots(self, plan: AttentionPlan) -> torch.Tensor:
        missing = self.bucket.num_rows - plan.num_tokens
        padding = torch.full((missing,), self.bucket.padding_block * plan.block_size)
        return torch.cat((plan.slot_mapping, padding))


class _GraphLane:
    """The one wrapper of all layers with one window."""

    def __init__(self, base: FlashInferBackend, bucket: GraphBucket, call: AttentionCall) -> None:
        # In deterministic mode the graph runs the kernel that the base runs, in its smallest tile, on rows of one split.
        self._is_exact = base.options.deterministic
        self.call = replace(call, split_pages=None, never_split=True) if self._is_exact else call
        buffers = _make_buffers(bucket, base.device)
        self._wrapper: PagedWrapper
        if self._is_exact:
            self._wrapper = base.library.prefill_wrapper(**prefill_wrapper_kwargs(base.workspace, buffers))
        else:
            kwargs = decode_wrapper_kwargs(base.workspace, call, buffers)
            self._wrapper = base.library.decode_wrapper(**kwargs)
        integers = torch.zeros(_INT_WORKSPACE_BYTES, dtype=torch.uint8, device=base.device)
        self._wrapper.reset_workspace_buffer(**reset_workspace_kwargs(base.workspace, integers))

    def plan(self, rows: PagedRows) -> None:
        """Plan exactly `num_rows` rows."""
        if self._is_exact:
            plan_wrapper(self._wrapper, prefill_plan_kwargs(self.call, rows, causal=True))
        else:
            plan_wrapper(self._wrapper, decode_plan_kwargs(self.call, rows))

    def run(self, q: torch.Tensor, kv: torch.Tensor) -> torch.Tensor:
        """One layer of the step."""
        out = torch.empty_like(q)
        self._wrapper.run(**run_kwargs(self.call, q, kv, out))
        return out


def _make_buffers(bucket: GraphBucket, device: torch.device) -> GraphBuffers:
    def zeros(length: int) -> torch.Tensor:
        return torch.zeros(length, dtype=torch.int32, device=device)

    return GraphBuffers(
        qo_indptr=zeros(bucket.num_rows + 1),
        kv_indptr=zeros(bucket.num_rows + 1),
        kv_indices=zeros(bucket.num_rows * bucket.max_blocks_per_row),
        kv_last_page_len=zeros(bucket.num_rows),
    )
