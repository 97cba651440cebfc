"""The GPU backend: FlashInfer's paged attention over the very plan that the CPU backends read.

A *lane* is all layers of one sliding window: it owns the wrappers that plan a step's rows once and run them for each of
those layers. A step that shares prefixes is a cascade: the shared blocks are read once per group by one prefill wrapper,
each row's own KV by another, and the two states are merged. Layers with a window run without, since what a window hides
of a prefix differs from token to token.

With `deterministic`, a token's bits don't depend on its company, on chunking or on what was cached (`exact_layout`); that
leaves out cascades and costs prefill speed, since it runs in the smallest query tile.

The store's device decides where this runs. On the CPU, given an emulated library, it runs in the tests.
"""

from collections.abc import Mapping
from dataclasses import replace

import torch

from phloem.kernels.attention import AttentionSpec, check_fit, check_plan
from phloem.kernels.device_copy import PlanFence, on_device, stage
from phloem.kernels.flashinfer_calls import (
    AttentionCall,
    Kwargs,
    PagedRows,
    decode_plan_kwargs,
    decode_wrapper_kwargs,
    merge_kwargs,
    prefill_plan_kwargs,
    prefill_wrapper_kwargs,
    run_kwargs,
)
from phloem.kernels.flashinfer_library import (
    FlashInferLibrary,
    FlashInferUnavailable,
    PagedWrapper,
    load_flashinfer,
)
from phloem.kernels.flashinfer_options import FlashInferOptions, attention_calls, can_merge, check_queries
from phloem.kernels.flashinfer_rows import Layout, SharedRows, choose_groups, exact_layout, fast_layout
from phloem.kernels.kv_store import PagedKVStore
from phloem.kernels.plan import AttentionPlan, PlanError
from phloem.kernels.shared_prefix import SharedGroup


class FlashInferBackend:
    """An `AttentionBackend` over a store on a GPU. Owner of its wrappers and scratch memory."""

    def __init__(
        self,
        spec: AttentionSpec,
        store: PagedKVStore,
        *,
        options: FlashInferOptions | None = None,
        library: FlashInferLibrary | None = None,
    ) -> None:
        """Make the wrappers. Kernels are compiled, in minutes, when a first plan needs them and no cache has them.

        Raises:
            FlashInferUnavailable: FlashInfer can't run here, or has no code for this model.
            ValueError: a spec that does not fit the store.
        """
        check_fit(spec, store)
        self.spec = spec
        self.store = store
        self.options = options or FlashInferOptions()
        self.library = library or load_flashinfer()
        self.device = store.data.device
        if library is None and self.device.type != "cuda":
            raise FlashInferUnavailable(f"the KV store is on {self.device}; FlashInfer reads it on a GPU")
        self.calls = attention_calls(spec, store, self.options)
        self._fence = PlanFence(self.device)
        self._num_tokens = 0
        self._key_rows = torch.empty(0, dtype=torch.int64, device=self.device)
        self._written: torch.Tensor | None = None
        with on_device(self.device):
            self.workspace = torch.zeros(self.options.workspace_bytes, dtype=torch.uint8, device=self.device)
            self._lanes = {
                window: _Lane(self.library, call, self.workspace) for window, call in self.calls.items()
            }

    def plan(self, plan: AttentionPlan) -> None:
        """Take a step's metadata, and send it to the device in one copy. See `AttentionBackend.plan`.

        Raises:
            PlanError: a rule is broken, or the plan needs more scratch memory than there is.
        """
        check_plan(plan, self.store)
        self._num_tokens = 0
        layouts = {window: self.layout(plan, window) for window in self._lanes}
        with on_device(self.device):
            self._fence.wait()
            staged = stage({**self._writes(plan), **_device_arrays(layouts)}, self.device)
            self._key_rows, self._written = staged["key_rows"], staged.get("written")
            for window, lane in self._lanes.items():
                lane.plan(_placed(layouts[window], staged, window))
            self._fence.record()
        self._num_tokens = plan.num_tokens

    def layout(self, plan: AttentionPlan, window: int | None, *, cascade: bool = True) -> Layout:
        """How a step runs in the layers of one window; without `cascade`, every row reads all of its blocks."""
        if self.options.deterministic:
            return exact_layout(
                plan,
                group_size=self.spec.group_size,
                split_tokens=self.options.split_tokens,
                window=window,
            )
        return fast_layout(plan, self.shared_groups(plan) if cascade and window is None else ())

    def shared_groups(self, plan: AttentionPlan) -> tuple[SharedGroup, ...]:
        """The groups of rows that a step would run as a cascade, in layers without a window."""
        gate = self.options.cascade
        if gate is None or self.options.deterministic or not can_merge(self.spec):
            return ()
        return choose_groups(plan.groups, block_size=plan.block_size, gate=gate)

    def _writes(self, plan: AttentionPlan) -> dict[str, torch.Tensor]:
        """Where the step's KV goes, and, if it goes to mirrors too, which token's goes to each place."""
        if not plan.num_mirrors:
            return {"key_rows": self.store.key_rows(plan.slot_mapping)}
        slots = torch.cat((plan.slot_mapping, plan.mirror_slots))
        written = torch.cat((torch.arange(plan.num_tokens), plan.mirror_tokens))
        return {"key_rows": self.store.key_rows(slots), "written": written}

    def append(self, layer: int, k: torch.Tensor, v: torch.Tensor) -> None:
        """Write the step's KV. See `AttentionBackend.append`."""
        if self._written is not None:
            k, v = k[self._written], v[self._written]
        write_kv(self.store, self.options, layer, k=k, v=v, key_rows=self._key_rows)

    def attend(self, layer: int, q: torch.Tensor) -> torch.Tensor:
        """Attend. See `AttentionBackend.attend`.

        Raises:
            ValueError: queries that do not fit the plan.
        """
        window = self.spec.window(layer)
        check_queries(q, self._num_tokens, self.calls[window])
        with on_device(self.device):
            return self._lanes[window].run(q, self.store.layer(layer))


class _Lane:
    """The wrappers of all layers with one window, and the step that they have planned."""

    def __init__(self, library: FlashInferLibrary, call: AttentionCall, workspace: torch.Tensor) -> None:
        self._library = library
        self._call = call
        self._layout = Layout(None, None, None, None)
        prefill = prefill_wrapper_kwargs(workspace)
        self._prefill = library.prefill_wrapper(**prefill)
        self._decode = library.decode_wrapper(**decode_wrapper_kwargs(workspace, call))
        self._prefix = library.prefill_wrapper(**prefill)
        self._suffix = library.prefill_wrapper(**prefill)

    def plan(self, layout: Layout) -> None:
        """Plan each section's wrappers; the page ids are on the device."""
        self._layout = Layout(None, None, None, None)
        call = self._call
        if layout.decode is not None:
            plan_wrapper(self._decode, decode_plan_kwargs(call, layout.decode))
        if layout.prefill is not None:
            plan_wrapper(self._prefill, prefill_plan_kwargs(call, layout.prefill, causal=True))
        if layout.shared is not None:
            plan_wrapper(self._prefix, prefill_plan_kwargs(call, layout.shared.prefix, causal=False))
            plan_wrapper(self._suffix, prefill_plan_kwargs(call, layout.shared.suffix, causal=True))
        self._layout = layout

    def run(self, q: torch.Tensor, kv: torch.Tensor) -> torch.Tensor:
        """One layer: queries in the step's order over `[num_blocks, 2, block_size, num_kv_heads, head_dim]`."""
        layout = self._layout
        if layout.token_order is None:
            return self._run_sections(q, kv)
        out = torch.empty_like(q)
        return out.index_copy_(0, layout.token_order, self._run_sections(q[layout.token_order], kv))

    def _run_sections(self, q: torch.Tensor, kv: torch.Tensor) -> torch.Tensor:
        """Queries in the layout's order."""
        layout, out = self._layout, torch.empty_like(q)
        begin = 0
        for rows, wrapper in ((layout.decode, self._decode), (layout.prefill, self._prefill)):
            if rows is not None:
                part = slice(begin, begin + rows.num_tokens)
                wrapper.run(**run_kwargs(self._call, q[part], kv, out[part]))
                begin = part.stop
        if layout.shared is not None:
            self._run_shared(q[begin:], kv, out[begin:])
        return out

    def _run_shared(self, q: torch.Tensor, kv: torch.Tensor, out: torch.Tensor) -> None:
        """Both levels, merged into `out`. Neither state is empty: a prefix has a block, a suffix its own token."""
        _, lse = self._suffix.run(**run_kwargs(self._call, q, kv, out, return_lse=True))
        prefix = torch.empty_like(out)
        _, prefix_lse = self._prefix.run(**run_kwargs(self._call, q, kv, prefix, return_lse=True))
        self._library.merge_state_in_place(**merge_kwargs(out, lse, prefix, prefix_lse))


def plan_wrapper(wrapper: PagedWrapper, kwargs: Kwargs) -> None:
    """Plan, and tell what to do where scratch memory is short.

    Raises:
        PlanError: it is.
    """
    try:
        wrapper.plan(**kwargs)
    except RuntimeError as error:
        if "workspace" not in str(error):
            raise
        raise PlanError(
            "the step's partial results don't fit the workspace; raise workspace_bytes, "
            f"split less often (split_tokens), or run fewer tokens a step: {error}"
        ) from error


def write_kv(
    store: PagedKVStore,
    options: FlashInferOptions,
    layer: int,
    *,
    k: torch.Tensor,
    v: torch.Tensor,
    key_rows: torch.Tensor,
) -> None:
    """Write KV to its slots, scaled where the store has 8 bits."""
    if store.dtype.itemsize == 1:
        k, v = k / options.k_scale, v / options.v_scale
    store.write_rows(layer, k, v, key_rows)


def place_rows(rows: PagedRows, kv_indices: torch.Tensor) -> PagedRows:
    """Rows as a wrapper wants them: the page ids where they are now, the rest in pinned memory if that is a GPU.

    FlashInfer copies the small arrays to the GPU itself; out of pageable memory it would wait for each copy.
    """
    if kv_indices.device.type == "cpu":
        return replace(rows, kv_indices=kv_indices)
    return PagedRows(
        qo_indptr=rows.qo_indptr.pin_memory(),
        kv_indptr=rows.kv_indptr.pin_memory(),
        kv_indices=kv_indices,
        kv_last_page_len=rows.kv_last_page_len.pin_memory(),
        kv_lens=rows.kv_lens.pin_memory(),
        max_count=rows.max_count,
    )


def _sections(layout: Layout) -> dict[str, PagedRows]:
    shared = layout.shared
    found = {
        "decode": layout.decode,
        "prefill": layout.prefill,
        "prefix": shared.prefix if shared else None,
        "suffix": shared.suffix if shared else None,
    }
    return {name: rows for name, rows in found.items() if rows is not None}


def _device_arrays(layouts: Mapping[int | None, Layout]) -> dict[str, torch.Tensor]:
    """What the lanes need on the device, by a name for each."""
    arrays = {}
    for window, layout in layouts.items():
        for section, rows in _sections(layout).items():
            arrays[f"{window} {section}"] = rows.kv_indices
        if layout.token_order is not None:
            arrays[f"{window} order"] = layout.token_order
    return arrays


def _placed(layout: Layout, staged: Mapping[str, torch.Tensor], window: int | None) -> Layout:
    """The layout with its device arrays where they are now."""
    rows = {name: place_rows(rows, staged[f"{window} {name}"]) for name, rows in _sections(layout).items()}
    return Layout(
        decode=rows.get("decode"),
        prefill=rows.get("prefill"),
        shared=SharedRows(rows["prefix"], rows["suffix"]) if layout.shared is not None else None,
        token_order=staged.get(f"{window} order"),
    )
