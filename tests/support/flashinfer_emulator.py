"""FlashInfer's paged wrappers in dense float64 on the CPU, with FlashInfer's rules as hard errors.

Nothing of FlashInfer is imported: the emulator reads only the documented arguments, and takes exactly those that phloem
uses; another keyword is a TypeError. What FlashInfer accepts in silence and answers with garbage (int64 indices, a wrong
last page, an empty batch, two empty states, a replay without a plan) is an error here.

With `noise`, outputs also depend, by a step that every dtype shows, on what FlashInfer's arithmetic depends on: the query
tile that the batch's mean row length picks, the splits of KV, and, under a window, the row around the token.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from phloem.kernels.flashinfer_library import FlashInferLibrary


class RuleBroken(AssertionError):
    """An argument that FlashInfer refuses, or accepts and answers wrongly."""


def require(holds: bool, message: str) -> None:
    if not holds:
        raise RuleBroken(message)


@dataclass
class Emulation:
    """What all wrappers of one library share, and what they have seen."""

    noise: bool = False
    step: int = 0
    """Of `next_step`: a captured wrapper runs only if it was planned in the same step."""
    runs: list[str] = field(default_factory=list)
    """Kind of each run: "prefill", "decode", with "graph " before it where captured; and "merge"."""
    see: Callable[[str, dict[str, Any]], None] = lambda name, kwargs: None
    """Called before each call with its name in FlashInfer, methods as "class.method", and its arguments."""

    def next_step(self) -> None:
        self.step += 1

    def library(self) -> FlashInferLibrary:
        return FlashInferLibrary(
            prefill_wrapper=lambda **kwargs: _Seen(self, EmulatedPrefill, kwargs),
            decode_wrapper=lambda **kwargs: _Seen(self, EmulatedDecode, kwargs),
            merge_state_in_place=self._seen("merge_state_in_place", self.merge_state_in_place),
            rmsnorm=self._seen("rmsnorm", rmsnorm),
            silu_and_mul=self._seen("silu_and_mul", silu_and_mul),
            apply_rope=self._seen("apply_rope_with_cos_sin_cache", apply_rope),
        )

    def _seen(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(**kwargs: Any) -> Any:
            self.see(name, kwargs)
            return function(**kwargs)

        return call

    def merge_state_in_place(
        self, v: torch.Tensor, s: torch.Tensor, v_other: torch.Tensor, s_other: torch.Tensor
    ) -> None:
        self.runs.append("merge")
        require(s.dtype == s_other.dtype == torch.float32, "the log-sum-exps are float32")
        require(v.shape == v_other.shape and v.dtype == v_other.dtype, "the states have one shape and dtype")
        require(s.shape == s_other.shape == v.shape[:2], "one log-sum-exp per token and head")
        require(all(t.is_contiguous() for t in (v, s, v_other, s_other)), "the states are contiguous")
        require(v.shape[1] * (v.shape[2] // max(8, v.shape[2] // 32)) <= 1024, "too many threads to merge")
        require(not bool((s.isinf() & s_other.isinf()).any()), "two empty states merge to NaN")
        weights = torch.softmax(torch.stack((s, s_other)).double() * _LN2, dim=0).unsqueeze(-1)
        merged = weights[0] * v.double() + weights[1] * v_other.double()
        s.copy_(torch.logsumexp(torch.stack((s, s_other)).double() * _LN2, dim=0) / _LN2)
        v.copy_(merged)


class _Seen:
    """A wrapper whose calls are shown to `Emulation.see` first."""

    def __init__(self, emulation: Emulation, made: type[_Paged], kwargs: dict[str, Any]) -> None:
        self._emulation = emulation
        self._name = made.name
        emulation.see(made.name, kwargs)
        self._wrapper = made(emulation, **kwargs)

    def __getattr__(self, method: str) -> Callable[..., Any]:
        def call(**kwargs: Any) -> Any:
            self._emulation.see(f"{self._name}.{method}", kwargs)
            return getattr(self._wrapper, method)(**kwargs)

        return call


_LN2 = 0.6931471805599453
_CUDA_CORE_GROUPS = (1, 2, 3, 4, 6, 8)


@dataclass
class _Rows:
    """The CSR arrays that a kernel reads."""

    qo_indptr: torch.Tensor
    kv_indptr: torch.Tensor
    kv_indices: torch.Tensor
    kv_last_page_len: torch.Tensor


@dataclass
class _Problem:
    """What a plan fixes for its runs."""

    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    page_size: int
    causal: bool
    window_left: int
    soft_cap: float | None
    scale: float
    q_dtype: torch.dtype
    kv_dtype: torch.dtype
    batch_size: int
    num_tokens: int
    tile: int
    chunk: int | None
    """Tokens of a split; None for no splits."""
    auto_split: tuple[int, ...]
    """KV lengths of the batch, where they decide on the splits."""
    step: int


class _Paged:
    """Both wrappers: rules of construction, plan and run; a dense kernel."""

    kind: str
    name: str
    """Of the class in FlashInfer."""

    def __init__(
        self,
        emulation: Emulation,
        workspace: torch.Tensor,
        kv_layout: str,
        backend: str,
        buffers: _Rows | None,
    ) -> None:
        require(workspace.dtype == torch.uint8 and workspace.numel() >= 1 << 20, "a MiB of workspace")
        require(kv_layout == "NHD" and backend == "fa2", "NHD and fa2, named")
        if buffers is not None:
            for name, array in vars(buffers).items():
                require(array.dtype == torch.int32 and array.dim() == 1, f"{name} buffer is int32")
            require(len(buffers.kv_indptr) == len(buffers.kv_last_page_len) + 1, "buffers of one batch size")
            require(len(buffers.qo_indptr) == len(buffers.kv_indptr), "buffers of one batch size")
        self.emulation = emulation
        self.workspace = workspace
        self.buffers = buffers
        self.max_tokens: int | None = None
        self.problem: _Problem | None = None
        self.rows: _Rows | None = None

    def reset_workspace_buffer(
        self, *, float_workspace_buffer: torch.Tensor, int_workspace_buffer: torch.Tensor
    ) -> None:
        for buffer in (float_workspace_buffer, int_workspace_buffer):
            require(buffer.dtype == torch.uint8 and buffer.numel() >= 1 << 20, "a MiB of workspace")

    def _take(self, rows: _Rows, seq_lens: torch.Tensor, problem: _Problem) -> None:
        check_rows(rows, seq_lens, page_size=problem.page_size, causal=problem.causal)
        require(problem.num_q_heads % problem.num_kv_heads == 0, "heads divide")
        require(problem.soft_cap is None or problem.soft_cap > 0, "no cap is None")
        require(problem.window_left >= -1, "window_left is -1 or more")
        require(problem.causal or problem.window_left == -1 or self.kind == "decode", "windows are causal")
        if self.buffers is None:
            # copies, as on a device: what the caller changes later is not seen
            self.rows = _Rows(*(array.clone() for array in vars(rows).values()))
        else:
            self._freeze(rows, problem)
        self.problem = problem

    def _freeze(self, rows: _Rows, problem: _Problem) -> None:
        buffers = self.buffers
        assert buffers is not None
        self.max_tokens = self.max_tokens or problem.num_tokens
        require(problem.num_tokens <= self.max_tokens, "the first plan freezes the number of tokens")
        require(problem.batch_size == len(buffers.kv_last_page_len), "the buffers freeze the batch size")
        require(len(rows.kv_indices) <= len(buffers.kv_indices), "more pages than the buffer holds")
        for name, array in vars(rows).items():
            getattr(buffers, name)[: len(array)].copy_(array)
        self.rows = buffers

    def run(
        self,
        *,
        q: torch.Tensor,
        paged_kv_cache: torch.Tensor,
        out: torch.Tensor,
        return_lse: bool,
        enable_pdl: bool | None,
        k_scale: float = 1.0,
        v_scale: float = 1.0,
    ) -> Any:
        problem, rows = self.problem, self.rows
        require(problem is not None and rows is not None, "plan before run")
        assert problem is not None
        assert rows is not None
        in_graph = self.buffers is not None
        self.emulation.runs.append(f"graph {self.kind}" if in_graph else self.kind)
        require(not in_graph or problem.step == self.emulation.step, "plan before every replay")
        shape = (problem.num_tokens, problem.num_q_heads, problem.head_dim)
        require(tuple(q.shape) == shape and q.dtype == problem.q_dtype, f"q is {shape} {problem.q_dtype}")
        require(out.shape == q.shape and out.dtype == q.dtype, "out is like q")
        require(q.stride(-1) == 1 and out.is_contiguous(), "q's heads and out are contiguous")
        page = (2, problem.page_size, problem.num_kv_heads, problem.head_dim)
        require(tuple(paged_kv_cache.shape[1:]) == page, f"pages are {page}")
        require(paged_kv_cache.dtype == problem.kv_dtype, f"KV is {problem.kv_dtype}")
        lse = torch.full(shape[:2], torch.nan)
        for row in range(problem.batch_size):
            begin, end = rows.qo_indptr[row : row + 2].tolist()
            pages = rows.kv_indices[rows.kv_indptr[row] : rows.kv_indptr[row + 1]].long()
            require(bool((pages < len(paged_kv_cache)).all()), "pages are in the store")
            kv_len = (len(pages) - 1) * problem.page_size + int(rows.kv_last_page_len[row])
            kv = paged_kv_cache[pages].transpose(0, 1).flatten(1, 2)[:, :kv_len].double()
            result, sums = attend_densely(q[begin:end].double(), kv[0] * k_scale, kv[1] * v_scale, problem)
            if self.emulation.noise:
                result *= 1 + self._step_of(problem, end - begin, kv_len) / 16
            out[begin:end], lse[begin:end] = result, sums
        return (out, lse) if return_lse else out

    def _step_of(self, problem: _Problem, qo_len: int, kv_len: int) -> int:
        num_chunks = 1 if problem.chunk is None else -(-kv_len // problem.chunk)
        row = (qo_len, kv_len) if problem.window_left >= 0 else ()
        seen = (problem.tile, num_chunks, problem.auto_split, row)
        return zlib.crc32(repr(seen).encode()) % 8


class EmulatedPrefill(_Paged):
    kind = "prefill"
    name = "BatchPrefillWithPagedKVCacheWrapper"

    def __init__(
        self,
        emulation: Emulation,
        *,
        float_workspace_buffer: torch.Tensor,
        kv_layout: str,
        backend: str,
        use_cuda_graph: bool = False,
        qo_indptr_buf: torch.Tensor | None = None,
        paged_kv_indptr_buf: torch.Tensor | None = None,
        paged_kv_indices_buf: torch.Tensor | None = None,
        paged_kv_last_page_len_buf: torch.Tensor | None = None,
    ) -> None:
        buffers = _graph_buffers(
            use_cuda_graph,
            (qo_indptr_buf, paged_kv_indptr_buf, paged_kv_indices_buf, paged_kv_last_page_len_buf),
        )
        super().__init__(emulation, float_workspace_buffer, kv_layout, backend, buffers)

    def plan(
        self,
        *,
        qo_indptr: torch.Tensor,
        paged_kv_indptr: torch.Tensor,
        paged_kv_indices: torch.Tensor,
        paged_kv_last_page_len: torch.Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        page_size: int,
        causal: bool,
        window_left: int,
        logits_soft_cap: float | None,
        sm_scale: float,
        q_data_type: torch.dtype,
        kv_data_type: torch.dtype,
        seq_lens: torch.Tensor,
        max_token_per_sequence: int,
        fixed_split_size: int | None = None,
        disable_split_kv: bool = False,
    ) -> None:
        rows = _Rows(qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len)
        batch_size, num_tokens = len(qo_indptr) - 1, int(qo_indptr[-1])
        counts = qo_indptr[1:] - qo_indptr[:-1]
        require(batch_size > 0 and max_token_per_sequence == int(counts.max()), "max_token_per_sequence")
        require(fixed_split_size is None or not disable_split_kv, "one way to split")
        require(fixed_split_size is None or self.buffers is None, "no fixed splits in graphs")
        group = num_qo_heads // num_kv_heads
        mean = num_tokens * group // batch_size
        if self.buffers is not None:
            mean = ((self.max_tokens or num_tokens) - batch_size + 1) * group
        problem = _Problem(
            num_q_heads=num_qo_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim_qk,
            page_size=page_size,
            causal=causal,
            window_left=window_left,
            soft_cap=logits_soft_cap,
            scale=sm_scale,
            q_dtype=q_data_type,
            kv_dtype=kv_data_type,
            batch_size=batch_size,
            num_tokens=num_tokens,
            tile=query_tile(mean, head_dim_qk),
            chunk=fixed_split_size * page_size if fixed_split_size else None,
            auto_split=() if fixed_split_size or disable_split_kv else tuple(seq_lens.tolist()),
            step=self.emulation.step,
        )
        self._take(rows, seq_lens, problem)
        self._allocate(problem, counts, seq_lens)

    def _allocate(self, problem: _Problem, counts: torch.Tensor, seq_lens: torch.Tensor) -> None:
        """FlashInfer's sum for fixed splits: a float32 tile and its sums per row, head, query tile and chunk."""
        if problem.chunk is None or not bool((seq_lens > problem.chunk).any()):
            return
        packed = counts * (problem.num_q_heads // problem.num_kv_heads)
        tiles = int((-(-packed // problem.tile) * -(-seq_lens // problem.chunk)).sum())
        needed = tiles * problem.num_q_heads * problem.tile * (problem.head_dim + 1) * 4
        if needed > self.workspace.numel():
            raise RuntimeError(
                f"allocating {needed} of {self.workspace.numel()}. Increase the workspace buffer size."
            )


class EmulatedDecode(_Paged):
    kind = "decode"
    name = "BatchDecodeWithPagedKVCacheWrapper"

    def __init__(
        self,
        emulation: Emulation,
        *,
        float_workspace_buffer: torch.Tensor,
        kv_layout: str,
        use_tensor_cores: bool,
        backend: str,
        use_cuda_graph: bool = False,
        paged_kv_indptr_buffer: torch.Tensor | None = None,
        paged_kv_indices_buffer: torch.Tensor | None = None,
        paged_kv_last_page_len_buffer: torch.Tensor | None = None,
    ) -> None:
        given = (paged_kv_indptr_buffer, paged_kv_indices_buffer, paged_kv_last_page_len_buffer)
        queries = None
        if paged_kv_indptr_buffer is not None:
            queries = torch.arange(len(paged_kv_indptr_buffer), dtype=torch.int32)
        buffers = _graph_buffers(use_cuda_graph, (queries, *given))
        super().__init__(emulation, float_workspace_buffer, kv_layout, backend, buffers)
        self.use_tensor_cores = use_tensor_cores

    def plan(
        self,
        *,
        indptr: torch.Tensor,
        indices: torch.Tensor,
        last_page_len: torch.Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        window_left: int,
        logits_soft_cap: float | None,
        sm_scale: float,
        q_data_type: torch.dtype,
        kv_data_type: torch.dtype,
        seq_lens: torch.Tensor,
        fixed_split_size: int | None = None,
        disable_split_kv: bool = False,
    ) -> None:
        group, batch_size = num_qo_heads // num_kv_heads, len(last_page_len)
        if not self.use_tensor_cores:
            require(group in _CUDA_CORE_GROUPS, f"CUDA cores have no code for groups of {group}")
            require(kv_data_type.itemsize == 2, "8-bit KV decodes on tensor cores")
            require(fixed_split_size is None, "CUDA cores can't split where they are told")
        rows = _Rows(torch.arange(batch_size + 1, dtype=torch.int32), indptr, indices, last_page_len)
        problem = _Problem(
            num_q_heads=num_qo_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            page_size=page_size,
            causal=False,
            window_left=window_left,
            soft_cap=logits_soft_cap,
            scale=sm_scale,
            q_dtype=q_data_type,
            kv_dtype=kv_data_type,
            batch_size=batch_size,
            num_tokens=batch_size,
            tile=query_tile(group, head_dim) if self.use_tensor_cores else 1,
            chunk=fixed_split_size * page_size if fixed_split_size else None,
            auto_split=() if fixed_split_size or disable_split_kv else tuple(seq_lens.tolist()),
            step=self.emulation.step,
        )
        self._take(rows, seq_lens, problem)


def _graph_buffers(use_cuda_graph: bool, arrays: Sequence[torch.Tensor | None]) -> _Rows | None:
    given = [array for array in arrays if array is not None]
    require(len(given) == (4 if use_cuda_graph else 0), "buffers with use_cuda_graph, and only then")
    return _Rows(*given) if use_cuda_graph else None


def check_rows(rows: _Rows, seq_lens: torch.Tensor, *, page_size: int, causal: bool) -> None:
    """The rules that FlashInfer does not check, or only in part."""
    for name, array in {**vars(rows), "seq_lens": seq_lens}.items():
        require(array.dtype == torch.int32, f"{name} is int32, got {array.dtype}")
        require(array.dim() == 1 and array.is_contiguous(), f"{name} is flat")
        require(name == "kv_indices" or array.device.type == "cpu", f"{name} is on the host")
    batch_size = len(rows.kv_last_page_len)
    require(batch_size > 0, "an empty batch is never sent")
    require(len(rows.qo_indptr) == len(rows.kv_indptr) == batch_size + 1, "indptrs have a row more")
    require(len(seq_lens) == batch_size, "a length per row")
    require(int(rows.qo_indptr[0]) == int(rows.kv_indptr[0]) == 0, "indptrs start at 0")
    require(int(rows.kv_indptr[-1]) == len(rows.kv_indices), "kv_indptr ends at the last page")
    counts, num_pages = rows.qo_indptr.diff(), rows.kv_indptr.diff()
    require(bool((counts >= 1).all() and (num_pages >= 1).all()), "every row has a query and a page")
    last = rows.kv_last_page_len
    require(bool((last >= 1).all() and (last <= page_size).all()), f"last pages hold 1 to {page_size}")
    kv_lens = (num_pages - 1) * page_size + last
    require(torch.equal(kv_lens, seq_lens), "seq_lens are what the pages hold")
    require(not causal or bool((kv_lens >= counts).all()), "causal rows have kv_len >= q_len")
    require(bool((rows.kv_indices >= 0).all()), "pages are in the store")


def query_tile(mean_packed_length: int, head_dim: int) -> int:
    """How FlashInfer 0.6.18 picks the query tile of a batch on Ampere and later (FA2DetermineCtaTileQ)."""
    if mean_packed_length > 64 and head_dim < 256:
        return 128
    return 64 if mean_packed_length > 16 else 16


def attend_densely(
    q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, problem: _Problem
) -> tuple[torch.Tensor, torch.Tensor]:
    """One row in float64: its queries are the last tokens of its KV if causal. Returns output and base-2 log-sum-exp."""
    group = problem.num_q_heads // problem.num_kv_heads
    keys, values = (x.repeat_interleave(group, dim=1) for x in (keys, values))
    scores = torch.einsum("qhd,khd->hqk", q, keys) * problem.scale
    if problem.soft_cap is not None:
        scores = problem.soft_cap * torch.tanh(scores / problem.soft_cap)
    place = torch.arange(len(q)).unsqueeze(1) + len(keys) - len(q)
    distance = place - torch.arange(len(keys))
    hidden = distance < 0 if problem.causal else torch.zeros_like(distance, dtype=torch.bool)
    if problem.window_left >= 0:
        hidden |= distance > problem.window_left
    scores.masked_fill_(hidden, -torch.inf)
    weights = torch.softmax(scores, dim=-1)
    out = torch.einsum("hqk,khd->qhd", weights, values)
    return out, (torch.logsumexp(scores, dim=-1) / _LN2).T


def rmsnorm(*, input: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    require(input.dim() in (2, 3) and input.dtype == weight.dtype and input.itemsize == 2, "16-bit rows")
    require(input.stride(-1) == 1, "rows are contiguous")
    wide = input.double()
    return (wide * (wide.square().mean(-1, keepdim=True) + eps).rsqrt() * weight.double()).to(input.dtype)


def silu_and_mul(*, input: torch.Tensor) -> torch.Tensor:
    require(input.itemsize == 2 and input.is_contiguous(), "16-bit rows, contiguous")
    require(input.shape[-1] * input.itemsize % 16 == 0, "rows of whole vectors")
    gate, up = input.double().chunk(2, dim=-1)
    return (torch.nn.functional.silu(gate) * up).to(input.dtype)


def apply_rope(
    *,
    positions: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    head_size: int,
    cos_sin_cache: torch.Tensor,
    is_neox: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    require(is_neox and cos_sin_cache.dtype == torch.float32, "halves, float32 tables")
    require(query.dim() == key.dim() == 2 and head_size in (64, 128, 256, 512), "flat heads of known sizes")
    require(int(positions.max()) < len(cos_sin_cache), "positions are in the table")
    cos, sin = cos_sin_cache[positions].double().unsqueeze(1).chunk(2, dim=-1)

    def rotate(x: torch.Tensor) -> torch.Tensor:
        heads = x.unflatten(1, (-1, head_size)).double()
        low, high, rest = heads.split((cos.shape[-1], cos.shape[-1], head_size - 2 * cos.shape[-1]), dim=-1)
        turned = torch.cat((low * cos - high * sin, high * cos + low * sin, rest), dim=-1)
        return turned.flatten(1).to(x.dtype)

    return rotate(query), rotate(key)
