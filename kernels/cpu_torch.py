"""The cpu backend without a compiler: the span arithmetic of `phloem.kernels.cpu` in torch operations.

Slow (Python per query tile and span), right, and row-invariant as the compiled kernel is, for these reasons: matrix
products have one fixed shape, `[num_kv_heads, 16, head_dim] x [num_kv_heads, head_dim, 256]`, whose rows don't depend on
each other; reductions run over 256 contiguous values; and exp and tanh are called on fewer elements than torch's parallel
grain, in multiples of the vector width, so that no element falls to the scalar code that ends a range.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from phloem.kernels.attention import AttentionSpec, append_step, check_fit, check_plan
from phloem.kernels.kv_store import PagedKVStore
from phloem.kernels.plan import AttentionPlan

SPAN = 256
_TILE = 16
_GRAIN = 32768
"""at::internal::GRAIN_SIZE: an elementwise call with fewer elements runs as one range."""


@dataclass(slots=True)
class _Partial:
    """Softmax over some keys, not yet normalised: float32, `[num_kv_heads, tile, 1]` twice, `[.., tile, head_dim]`."""

    maximum: torch.Tensor
    total: torch.Tensor
    weighted: torch.Tensor


class TorchBackend:
    """Attention by fixed tiles of 16 query rows and spans of 256 keys. Threads are torch's own."""

    def __init__(self, spec: AttentionSpec, store: PagedKVStore, *, build_error: str | None = None) -> None:
        """Bind to a store; `build_error` tells why the compiled kernel is not used, for reports."""
        check_fit(spec, store)
        self.build_error = build_error
        self.spec = spec
        self.store = store
        self._plan = AttentionPlan.from_rows((), block_size=store.block_size)

    def plan(self, plan: AttentionPlan) -> None:
        """Take a step's metadata. See `AttentionBackend.plan`."""
        check_plan(plan, self.store)
        self._plan = plan

    def append(self, layer: int, k: torch.Tensor, v: torch.Tensor) -> None:
        """Write the step's KV. See `AttentionBackend.append`."""
        append_step(self.store, self._plan, layer, k, v)

    def attend(self, layer: int, q: torch.Tensor) -> torch.Tensor:
        """Attend. See `AttentionBackend.attend`."""
        out = torch.empty_like(q)
        plan, spec = self._plan, self.spec
        qo_indptr, kv_indptr = plan.qo_indptr.tolist(), plan.kv_indptr.tolist()
        for row, kv_len in enumerate(plan.kv_lens.tolist()):
            begin, end = qo_indptr[row], qo_indptr[row + 1]
            if begin == end:
                continue
            blocks = plan.kv_indices[kv_indptr[row] : kv_indptr[row + 1]].long()
            keys, values = self._gather(layer, blocks, kv_len)
            # query rows of one KV head: [num_kv_heads, count * group_size, head_dim], token by token
            heads = (end - begin, spec.num_kv_heads, spec.group_size, spec.head_dim)
            rows = (q[begin:end].float() * spec.softmax_scale).view(heads).transpose(0, 1).flatten(1, 2)
            positions = plan.positions[begin:end].repeat_interleave(spec.group_size)
            result = self._attend_row(rows, keys, values, positions, spec.window(layer))
            by_head = result.view(spec.num_kv_heads, end - begin, spec.group_size, spec.head_dim)
            out[begin:end] = by_head.transpose(0, 1).flatten(1, 2)
        return out

    def _gather(self, layer: int, blocks: torch.Tensor, kv_len: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of a row, float32 `[num_spans, num_kv_heads, 256, head_dim]`, zero beyond kv_len."""
        paged = self.store.layer(layer)[blocks].transpose(0, 1).flatten(1, 2)[:, :kv_len]
        num_spans = -(-kv_len // SPAN)
        heads = paged.shape[2:]
        padded = torch.zeros((2, num_spans * SPAN, *heads))
        padded[:, :kv_len] = paged
        spans = padded.view(2, num_spans, SPAN, *heads).transpose(2, 3).contiguous()
        return spans[0], spans[1]

    def _attend_row(
        self,
        rows: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        positions: torch.Tensor,
        window: int | None,
    ) -> torch.Tensor:
        """All query rows of one path, `[num_kv_heads, num_rows, head_dim]`, tile by tile."""
        num_rows = rows.shape[1]
        out = torch.empty_like(rows)
        for begin in range(0, num_rows, _TILE):
            count = min(_TILE, num_rows - begin)
            tile = torch.zeros((rows.shape[0], _TILE, rows.shape[2]))
            tile[:, :count] = rows[:, begin : begin + count]
            # padding rows repeat the last position: any visible key will do, their result is dropped
            place = positions[begin : begin + count]
            place = torch.cat((place, place[-1:].expand(_TILE - count)))
            out[:, begin : begin + count] = self._attend_tile(tile, keys, values, place, window)[:, :count]
        return out

    def _attend_tile(
        self,
        tile: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        positions: torch.Tensor,
        window: int | None,
    ) -> torch.Tensor:
        """16 query rows over their visible spans, merged in span order."""
        last = int(positions[-1])
        first = 0 if window is None else max(0, int(positions[0]) - window + 1)
        merged: _Partial | None = None
        for span in range(first // SPAN, last // SPAN + 1):
            key_positions = torch.arange(span * SPAN, (span + 1) * SPAN)
            distance = positions.unsqueeze(1) - key_positions
            visible = distance >= 0 if window is None else (distance >= 0) & (distance < window)
            partial = self._span(tile, keys[span], values[span], visible)
            merged = partial if merged is None else _merge(merged, partial)
        assert merged is not None
        return merged.weighted / merged.total

    def _span(
        self, tile: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, visible: torch.Tensor
    ) -> _Partial:
        """One span from scratch. Masked keys get weight zero; a row without a visible key has maximum -inf."""
        scores = torch.bmm(tile, keys.transpose(1, 2))
        cap = self.spec.logits_soft_cap
        if cap is not None:
            scores = _by_head(torch.tanh, scores / cap) * cap
        scores = scores.masked_fill_(~visible, -torch.inf)
        maximum = scores.amax(-1, keepdim=True)
        weights = _by_head(torch.exp, scores - maximum.clamp(min=torch.finfo(torch.float32).min))
        return _Partial(maximum, weights.sum(-1, keepdim=True), torch.bmm(weights, values))


def _merge(left: _Partial, right: _Partial) -> _Partial:
    """Join two partials at their common maximum; a side without a visible key leaves the other as it is."""
    maximum = torch.maximum(left.maximum, right.maximum)
    floor = maximum.clamp(min=torch.finfo(torch.float32).min)
    keep, add = _by_head(torch.exp, left.maximum - floor), _by_head(torch.exp, right.maximum - floor)
    return _Partial(
        maximum, left.total * keep + right.total * add, left.weighted * keep + right.weighted * add
    )


def _by_head(function: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    """Apply an elementwise function to `[num_heads, ...]` in calls below torch's parallel grain."""
    if x.numel() < _GRAIN:
        return function(x)
    return torch.stack([function(head) for head in x])
