"""The compiled cpu backend: `cpu_work.py` cuts a plan into tiles and items, `cpu_attention.cpp` does the arithmetic."""

import ctypes

import torch

from phloem.kernels.attention import AttentionSpec, check_fit, check_plan
from phloem.kernels.cpu_work import Limits, cut
from phloem.kernels.kv_store import PagedKVStore
from phloem.kernels.plan import AttentionPlan

DTYPES = (torch.float32, torch.bfloat16)
"""Types of KV, of queries and of hidden states that the compiled code is for."""
MAX_HEAD_DIM = 512
MAX_PARTIAL_BYTES = 1 << 29
"""Memory for the results of spans; what needs more is computed row by row, with the same bits."""


class AttentionStruct(ctypes.Structure):
    """`PhloemAttention` of cpu_kernels.h: the same fields in the same order."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("kv", "q", "out")),
        *((name, ctypes.c_void_p) for name in ("positions", "token_partial")),
        *((name, ctypes.c_void_p) for name in ("kv_indptr", "kv_indices", "kv_lens", "query_rows")),
        *((name, ctypes.c_void_p) for name in ("tile_row", "tile_begin", "tile_count", "tile_kept")),
        *((name, ctypes.c_void_p) for name in ("item_tile", "item_span", "partials", "scratch")),
        *((name, ctypes.c_int64) for name in ("num_tokens", "num_tiles", "num_items", "window", "q_stride")),
        *((name, ctypes.c_int32) for name in ("block_size", "num_q_heads", "num_kv_heads", "head_dim")),
        *((name, ctypes.c_int32) for name in ("kv_is_bf16", "q_is_bf16", "num_threads")),
        *((name, ctypes.c_float) for name in ("scale", "soft_cap")),
    )


class _Append(ctypes.Structure):
    """`PhloemAppend` of cpu_kernels.h."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("kv", "k", "v", "tokens", "slots")),
        *((name, ctypes.c_int64) for name in ("row_bytes", "stride_bytes")),
        ("block_size", ctypes.c_int32),
    )


class NativeBackend:
    """Attention in compiled code. Owner of its scratch memory; one call at a time."""

    def __init__(
        self,
        spec: AttentionSpec,
        store: PagedKVStore,
        *,
        library: ctypes.CDLL,
        num_threads: int | None = None,
        max_partial_bytes: int = MAX_PARTIAL_BYTES,
    ) -> None:
        """Bind the kernel to a store.

        Args:
            spec: The model's attention.
            store: Its KV, float32 or bfloat16, in CPU memory.
            library: What `native_build.load_library` gives.
            num_threads: Threads per call; None follows torch.get_num_threads().
            max_partial_bytes: Memory for the results of spans, beside the store.

        Raises:
            ValueError: a store that does not fit the spec, or a shape that the kernel has no code for.
        """
        check_fit(spec, store)
        reason = why_unsupported(spec, store)
        if reason is not None:
            raise ValueError(reason)
        self.spec = spec
        self.store = store
        self.windows = torch.tensor([spec.window(layer) or 0 for layer in range(spec.num_layers)])
        """int64 `[num_layers]`: each layer's sliding window in tokens, 0 for none."""
        self._num_threads = num_threads
        self._attend = library.phloem_attend
        self._attend.argtypes, self._attend.restype = (ctypes.c_void_p,), None
        self._append = library.phloem_append
        self._append.argtypes, self._append.restype = (ctypes.c_void_p, ctypes.c_int64), None
        for function in (library.phloem_scratch_floats, library.phloem_partial_floats):
            function.argtypes, function.restype = (ctypes.c_int32,), ctypes.c_int64
        self._scratch_floats: int = library.phloem_scratch_floats(spec.head_dim)
        self._partial_floats: int = library.phloem_partial_floats(spec.head_dim)
        self._limits = Limits(
            tile_rows=library.phloem_tile_rows(),
            span_keys=library.phloem_span_keys(),
            max_kept=max_partial_bytes // (4 * self._partial_floats * spec.num_kv_heads),
        )
        self._scratch = torch.empty(0)
        self._partials = torch.empty(0)
        self._arguments = AttentionStruct()
        self.plan(AttentionPlan.from_rows((), block_size=store.block_size))

    def plan(self, plan: AttentionPlan) -> None:
        """Take a step's metadata. See `AttentionBackend.plan`."""
        check_plan(plan, self.store)
        threads = self._num_threads or torch.get_num_threads()
        work = cut(
            plan,
            self._limits,
            group_size=self.spec.group_size,
            num_kv_heads=self.spec.num_kv_heads,
            num_threads=threads,
        )
        self._scratch = _at_least(self._scratch, threads * self._scratch_floats)
        num_partials = work.num_partials * self.spec.num_q_heads
        self._partials = _at_least(self._partials, num_partials * self._partial_floats)
        self._plan, self._work, self._kv_lens = plan, work, plan.kv_lens
        self._arguments = self._describe(threads)

    def append(self, layer: int, k: torch.Tensor, v: torch.Tensor) -> None:
        """Write the step's KV. See `AttentionBackend.append`.

        Raises:
            ValueError: keys or values of another shape than the plan's tokens need.
        """
        wanted = (self._plan.num_tokens, self.spec.num_kv_heads, self.spec.head_dim)
        if k.shape != wanted or v.shape != wanted:
            raise ValueError(f"k is {list(k.shape)} and v {list(v.shape)}; the plan needs {list(wanted)}")
        k, v = k.to(self.store.dtype).contiguous(), v.to(self.store.dtype).contiguous()
        plan = self._plan
        self._write(layer, k, v, None, plan.slot_mapping)
        if plan.num_mirrors:
            self._write(layer, k, v, plan.mirror_tokens, plan.mirror_slots)

    def attend(self, layer: int, q: torch.Tensor) -> torch.Tensor:
        """Attend. See `AttentionBackend.attend`.

        Raises:
            ValueError: queries of another shape than the plan's tokens need.
            TypeError: queries that are neither float32 nor bfloat16.
        """
        wanted = (self._plan.num_tokens, self.spec.num_q_heads, self.spec.head_dim)
        if q.shape != wanted:
            raise ValueError(f"q is {list(q.shape)}; the plan needs {list(wanted)}")
        if q.dtype not in DTYPES:
            raise TypeError(f"q is {q.dtype}; the cpu kernel takes {DTYPES}")
        q = q.contiguous()
        out = torch.empty_like(q)
        arguments = self._arguments
        arguments.kv = self._layer_address(layer)
        arguments.q, arguments.out = q.data_ptr(), out.data_ptr()
        arguments.q_is_bf16 = q.dtype == torch.bfloat16
        arguments.q_stride = self.spec.num_q_heads * self.spec.head_dim
        arguments.window = int(self.windows[layer])
        self._attend(ctypes.addressof(arguments))
        return out

    @property
    def current_plan(self) -> AttentionPlan:
        """The plan of this step."""
        return self._plan

    @property
    def struct(self) -> AttentionStruct:
        """This step's arguments of the kernel, all but what differs by layer: kv, q and out, the window."""
        return self._arguments

    def _write(
        self, layer: int, k: torch.Tensor, v: torch.Tensor, tokens: torch.Tensor | None, slots: torch.Tensor
    ) -> None:
        row_bytes = self.spec.num_kv_heads * self.spec.head_dim * self.store.dtype.itemsize
        arguments = _Append(
            kv=self._layer_address(layer),
            k=k.data_ptr(),
            v=v.data_ptr(),
            tokens=None if tokens is None else tokens.data_ptr(),
            slots=slots.data_ptr(),
            row_bytes=row_bytes,
            stride_bytes=row_bytes,
            block_size=self.store.block_size,
        )
        self._append(ctypes.addressof(arguments), len(slots))

    def _layer_address(self, layer: int) -> int:
        if not 0 <= layer < self.spec.num_layers:
            raise IndexError(f"layer {layer} of {self.spec.num_layers}")
        return self.store.data.data_ptr() + layer * self.store.data.stride(0) * self.store.dtype.itemsize

    def _describe(self, num_threads: int) -> AttentionStruct:
        plan, work, spec = self._plan, self._work, self.spec
        return AttentionStruct(
            positions=plan.positions.data_ptr(),
            token_partial=work.token_partial.data_ptr(),
            kv_indptr=plan.kv_indptr.data_ptr(),
            kv_indices=plan.kv_indices.data_ptr(),
            kv_lens=self._kv_lens.data_ptr(),
            query_rows=work.query_rows.data_ptr(),
            tile_row=work.tile_row.data_ptr(),
            tile_begin=work.tile_begin.data_ptr(),
            tile_count=work.tile_count.data_ptr(),
            tile_kept=work.tile_kept.data_ptr(),
            item_tile=work.item_tile.data_ptr(),
            item_span=work.item_span.data_ptr(),
            partials=self._partials.data_ptr(),
            scratch=self._scratch.data_ptr(),
            num_tokens=plan.num_tokens,
            num_tiles=work.tile_kept.shape[0],
            num_items=work.item_tile.shape[0],
            block_size=self.store.block_size,
            num_q_heads=spec.num_q_heads,
            num_kv_heads=spec.num_kv_heads,
            head_dim=spec.head_dim,
            kv_is_bf16=self.store.dtype == torch.bfloat16,
            num_threads=num_threads,
            scale=spec.softmax_scale,
            soft_cap=spec.logits_soft_cap or 0.0,
        )


def why_unsupported(spec: AttentionSpec, store: PagedKVStore) -> str | None:
    """Why the kernel has no code for this shape; None if it has."""
    if store.dtype not in DTYPES:
        return f"the compiled cpu kernel has no code for {store.dtype} KV; use float32 or bfloat16"
    if store.data.device.type != "cpu":
        return f"the store is on {store.data.device}; the cpu kernel needs it in CPU memory"
    if spec.head_dim % 8 or spec.head_dim > MAX_HEAD_DIM:
        return f"head_dim is {spec.head_dim}; the cpu kernel takes multiples of 8 up to {MAX_HEAD_DIM}"
    return None


def _at_least(buffer: torch.Tensor, size: int) -> torch.Tensor:
    return buffer if buffer.numel() >= size else torch.empty(size)
