"""How a plan is cut into work for the compiled attention kernel. Integers only; the bits of a result don't depend on it.

A *query row* is one head of one token, numbered token * group_size + head of the group, and counted per KV head. A *tile* is up to
64 query rows that read the same blocks. There are two kinds::

    own tiles       query rows of one plan row, over all of its spans
    shared tiles    query rows of all plan rows of a group, over the whole spans that the group shares

An *item* is one span of a tile, computed first, its result kept until the own tiles merge theirs in span order. All spans of a shared
tile are items; where there are too few own tiles to keep the threads busy, all of their other spans are, too. What would need more
memory for results than there may be is computed in the own tiles, one row after the other.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from phloem.kernels.plan import AttentionPlan

IntArray = npt.NDArray[np.int64]

_TILES_PER_THREAD = 4
"""With fewer (own tile, KV head) pairs per thread than this, the spans of each pair are shared out too."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What the kernel was compiled with, and what it may use."""

    tile_rows: int
    """Query rows of a tile, at most."""
    span_keys: int
    """Keys of a span."""
    max_kept: int
    """Results that may be kept at a time, counted as spans times query rows."""


@dataclass(frozen=True, slots=True)
class Work:
    """One step's tiles and items, as the arrays that the kernel reads; int32 but for token_partial."""

    query_rows: torch.Tensor
    """`[num_query_rows]`: those of the own tiles, in order, then those of the shared ones."""
    tile_row: torch.Tensor
    """`[num_tiles + num_shared_tiles]`: the plan row whose blocks the tile reads. Own tiles first, here and below."""
    tile_begin: torch.Tensor
    """`[num_tiles + num_shared_tiles]`: where the tile's rows begin in query_rows."""
    tile_count: torch.Tensor
    """`[num_tiles + num_shared_tiles]`: how many there are."""
    tile_kept: torch.Tensor
    """`[num_tiles]`: spans, from the first, that are items."""
    item_tile: torch.Tensor
    """`[num_items]`"""
    item_span: torch.Tensor
    """`[num_items]`"""
    token_partial: torch.Tensor
    """int64 `[num_tokens + 1]`: kept spans of the tokens before each one."""

    @property
    def num_partials(self) -> int:
        """Kept results, per query head."""
        return int(self.token_partial[-1])


@dataclass(frozen=True, slots=True)
class _Tiles:
    """Tiles of one kind: each array `[num_tiles]`."""

    row: IntArray
    """Plan row whose blocks the tile reads."""
    begin: IntArray
    """First of its query rows, in `query_rows`."""
    count: IntArray


@dataclass(frozen=True, slots=True)
class _Items:
    """Single spans of tiles: each array `[num_items]`."""

    tile: IntArray
    span: IntArray


@dataclass(frozen=True, slots=True)
class _Region:
    """Spans [begin, end) that rows of the plan attend to together."""

    rows: tuple[int, ...]
    begin: int
    end: int


def cut(plan: AttentionPlan, limits: Limits, *, group_size: int, num_kv_heads: int, num_threads: int) -> Work:
    """Cut a plan's rows into tiles, and choose which of their spans are items. O(query rows + items).

    Args:
        plan: A checked plan.
        limits: Of the kernel.
        group_size: Query heads per KV head.
        num_kv_heads: KV heads; each tile runs once for every one of them.
        num_threads: How many there are to keep busy.
    """
    counts = np.diff(plan.qo_indptr.numpy()).astype(np.int64)
    kv_lens = plan.kv_lens.numpy().astype(np.int64)
    num_query_rows = counts * group_size
    first_query_row = np.cumsum(num_query_rows) - num_query_rows
    own = _tiles(np.arange(len(counts)), num_query_rows, first_query_row, limits.tile_rows)
    regions = list(_regions(plan, num_query_rows, limits))
    kept = np.zeros(len(counts), np.int64)
    query_rows = [np.arange(int(num_query_rows.sum()))]
    for region in regions:
        rows = np.array(region.rows)
        kept[rows] = region.end
        query_rows.append(_runs(first_query_row[rows], num_query_rows[rows]))
    sizes = np.array([len(each) for each in query_rows])
    begins = np.cumsum(sizes) - sizes
    first_rows = np.array([region.rows[0] for region in regions], np.int64)
    shared = _tiles(first_rows, sizes[1:], begins[1:], limits.tile_rows)
    items = _shared_items(regions, -(-sizes[1:] // limits.tile_rows), first_tile=len(own.row))
    if num_threads > 1 and len(own.row) * num_kv_heads < num_threads * _TILES_PER_THREAD:
        last_token = (own.begin + own.count - 1) // group_size - (first_query_row // group_size)[own.row]
        num_spans = (kv_lens - counts)[own.row] + last_token
        all_spans = -(-kv_lens // limits.span_keys)
        if int((all_spans * num_query_rows).sum()) <= limits.max_kept:
            items.append(_rest(kept[own.row], num_spans // limits.span_keys + 1))
            kept = all_spans
    return _arrays(query_rows, [own, shared], items, kept=kept, counts=counts)


def _runs(begins: IntArray, counts: IntArray) -> IntArray:
    """The numbers [begin, begin + count) of each run, one run after the other."""
    numbers: IntArray = np.repeat(begins - (np.cumsum(counts) - counts), counts)
    return numbers + np.arange(len(numbers))


def _tiles(rows: IntArray, num_query_rows: IntArray, begins: IntArray, tile_rows: int) -> _Tiles:
    """Cut runs of query rows, one run for each of `rows`, into tiles."""
    num_tiles = -(-num_query_rows // tile_rows)
    run = np.repeat(np.arange(len(rows)), num_tiles)
    offset = _runs(np.zeros(len(rows), np.int64), num_tiles) * tile_rows
    return _Tiles(rows[run], begins[run] + offset, np.minimum(num_query_rows[run] - offset, tile_rows))


def _regions(plan: AttentionPlan, num_query_rows: IntArray, limits: Limits) -> Iterator[_Region]:
    """Yield what the plan's groups share in whole spans, each span in the widest group that shares it.

    A row that fills tiles by itself gains nothing from company, and is left out. The widest groups share until the memory for
    results is used up.
    """
    left = limits.max_kept
    done = dict.fromkeys(np.flatnonzero(num_query_rows < limits.tile_rows).tolist(), 0)
    for group in plan.groups:
        rows = tuple(row for row in group.rows if row in done)
        if len(rows) < 2:
            continue
        begin, size = done[rows[0]], int(num_query_rows[list(rows)].sum())
        end = min(group.num_shared_blocks * plan.block_size // limits.span_keys, begin + left // size)
        if end > begin:
            left -= (end - begin) * size
            yield _Region(rows, begin, end)
            done.update(dict.fromkeys(rows, end))


def _shared_items(regions: list[_Region], num_tiles: IntArray, *, first_tile: int) -> list[_Items]:
    """All spans of the regions' tiles; tiles that read the same keys come one after the other."""
    items = []
    for region, count in zip(regions, num_tiles.tolist(), strict=True):
        spans = np.arange(region.begin, region.end)
        items.append(_Items(np.tile(np.arange(count) + first_tile, len(spans)), np.repeat(spans, count)))
        first_tile += count
    return items


def _rest(kept: IntArray, num_spans: IntArray) -> _Items:
    """The spans [kept, num_spans) of each own tile."""
    counts = num_spans - kept
    return _Items(np.repeat(np.arange(len(counts)), counts), _runs(kept, counts))


def _arrays(
    query_rows: list[IntArray], tiles: list[_Tiles], items: list[_Items], *, kept: IntArray, counts: IntArray
) -> Work:
    def joined(parts: list[IntArray]) -> torch.Tensor:
        return torch.from_numpy(np.concatenate([*parts, np.empty(0, np.int64)]).astype(np.int32))

    token_partial = np.zeros(int(counts.sum()) + 1, np.int64)
    np.cumsum(np.repeat(kept, counts), out=token_partial[1:])
    return Work(
        query_rows=joined(query_rows),
        tile_row=joined([kind.row for kind in tiles]),
        tile_begin=joined([kind.begin for kind in tiles]),
        tile_count=joined([kind.count for kind in tiles]),
        tile_kept=joined([kept[tiles[0].row]]),
        item_tile=joined([each.tile for each in items]),
        item_span=joined([each.span for each in items]),
        token_partial=torch.from_numpy(token_partial),
    )
