"""From a step's plan to the rows of FlashInfer's wrappers: which wrapper runs which rows, over which pages.

Pure functions on host arrays. There are two ways to lay a step out.

`fast_layout` runs decode rows, prefill rows, and rows that share a prefix in three sections, so tokens may change order::

    step      | d0 | p1 p1 p1 | s2 | d3 | s4 |        sections   decode   d0 d3
                                                                 prefill  p1 p1 p1
                                                                 shared   s2 s4   the prefix once, then each one's own KV

`exact_layout` gives every token the same bits in any company. FlashInfer's arithmetic depends on the query tile that a
batch's mean row length picks, on where KV is split, and, under a sliding window, on the last token of the row. So rows
are cut into pieces that fill at most the smallest tile: then every batch picks that one, prefill and decode alike. No
piece crosses a split, and under a window every token is a row of its own.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from phloem.kernels.flashinfer_calls import PagedRows
from phloem.kernels.plan import AttentionPlan, PlanError
from phloem.kernels.shared_prefix import SharedGroup

IntArray = npt.NDArray[np.int64]

SMALLEST_TILE = 16
"""Packed queries (tokens times GQA group) of FlashInfer's smallest query tile."""


@dataclass(frozen=True, slots=True)
class CascadeGate:
    """From where on reading a shared prefix once is worth two more launches and a merge."""

    min_rows: int = 8
    min_tokens: int = 256

    def __post_init__(self) -> None:
        """Refuse what is no group.

        Raises:
            ValueError: naming the field.
        """
        if self.min_rows < 2 or self.min_tokens < 1:
            raise ValueError(
                f"a cascade needs min_rows 2 or more and min_tokens 1 or more, got {self.min_rows}, {self.min_tokens}"
            )


@dataclass(frozen=True, slots=True, eq=False)
class SharedRows:
    """Two levels of one section: `prefix` has a row per group, `suffix` a row per member, over the same queries."""

    prefix: PagedRows
    """All queries of a group over its shared blocks, each of which every query sees."""
    suffix: PagedRows
    """Each member's queries over the KV that follows the shared blocks, causal."""


@dataclass(frozen=True, slots=True, eq=False)
class Layout:
    """A step's tokens in up to three sections, one behind the other in this order. None where a section has no row."""

    decode: PagedRows | None
    prefill: PagedRows | None
    shared: SharedRows | None
    token_order: torch.Tensor | None
    """int64 `[num_tokens]`: the step's token at each place of the sections; None where that is the step's own order."""


def choose_groups(
    groups: Sequence[SharedGroup], *, block_size: int, gate: CascadeGate
) -> tuple[SharedGroup, ...]:
    """Choose disjoint groups whose shared blocks are read once, so that the most reading is saved.

    Args:
        groups: Nested groups, a group before those inside it.
        block_size: Tokens per block.
        gate: What a group needs to be worth it.

    Returns:
        Groups of which no two share a row.
    """
    # inner groups first: (saved token reads, the groups that save them) of the best choice within each group
    best: dict[int, tuple[int, tuple[SharedGroup, ...]]] = {}
    for index in reversed(range(len(groups))):
        group = groups[index]
        rows = set(group.rows)
        inside = [best.pop(other) for other in list(best) if groups[other].rows[0] in rows]
        inner = (sum(saved for saved, _ in inside), tuple(g for _, chosen in inside for g in chosen))
        shared = group.num_shared_blocks * block_size
        fits = len(rows) >= gate.min_rows and shared >= gate.min_tokens
        own = ((len(rows) - 1) * shared, (group,)) if fits else (0, ())
        best[index] = max(own, inner, key=lambda choice: choice[0])
    return tuple(sorted((g for _, chosen in best.values() for g in chosen), key=lambda group: group.rows))


def fast_layout(plan: AttentionPlan, groups: Sequence[SharedGroup] = ()) -> Layout:
    """Lay out decode, prefill and shared rows apart. Rows without tokens are dropped.

    Args:
        plan: A step, checked.
        groups: Disjoint groups of its rows, as `choose_groups` returns them.
    """
    counts, kv_lens = _counts(plan), plan.kv_lens.numpy().astype(np.int64)
    # a row without tokens may stand in a group: it has nothing to read
    members = [np.array([row for row in group.rows if counts[row]], np.int64) for group in groups]
    kept = [(group, rows) for group, rows in zip(groups, members, strict=True) if len(rows)]
    grouped = np.concatenate([rows for _, rows in kept]) if kept else np.empty(0, np.int64)
    alone = np.ones(plan.num_rows, bool)
    alone[grouped] = False
    decode, prefill = np.flatnonzero(alone & (counts == 1)), np.flatnonzero(alone & (counts > 1))
    zero = np.zeros(plan.num_rows, np.int64)
    return Layout(
        decode=_paged_rows(plan, decode, counts[decode], zero[decode], kv_lens[decode]),
        prefill=_paged_rows(plan, prefill, counts[prefill], zero[prefill], kv_lens[prefill]),
        shared=_shared_rows(plan, kept) if kept else None,
        token_order=_token_order(plan, np.concatenate((decode, prefill, grouped))),
    )


def exact_layout(
    plan: AttentionPlan, *, group_size: int, split_tokens: int | None, window: int | None
) -> Layout:
    """Cut all rows into pieces whose tokens have the same bits in any company. O(tokens + blocks of the pieces).

    Args:
        plan: A step, checked.
        group_size: Query heads per KV head.
        split_tokens: Where KV is split, a multiple of the block size; None for never.
        window: The layers' sliding window in tokens, None for full layers.
    """
    counts = _counts(plan)
    positions = plan.positions.numpy()
    rows = np.repeat(np.arange(plan.num_rows), counts)
    size = 1 if window is not None else max(1, SMALLEST_TILE // group_size)
    split, offset = np.divmod(positions, split_tokens) if split_tokens else (0 * positions, positions)
    keys = np.stack((rows, split, offset // size))
    begins = np.flatnonzero(np.diff(keys, axis=1, prepend=-1).any(axis=0))
    ends = np.append(begins[1:], len(positions))
    kv_ends = positions[ends - 1] + 1 if len(begins) else begins
    # pages wholly before the window are left out, so that where a row starts depends on its token alone
    first = np.zeros_like(begins) if window is None else np.maximum(positions[begins] - window + 1, 0)
    pieces = _paged_rows(plan, rows[begins], ends - begins, first // plan.block_size, kv_ends)
    return Layout(decode=None, prefill=pieces, shared=None, token_order=None)


def pad_decode(rows: PagedRows, num_rows: int, padding_block: int) -> PagedRows:
    """Append rows of one query over one token of the reserved block, up to `num_rows`.

    Raises:
        PlanError: too many rows, a row with several queries, or one that reads the reserved block.
    """
    missing = num_rows - rows.num_rows
    if missing < 0 or rows.max_count > 1:
        raise PlanError(
            f"{rows.num_rows} rows of up to {rows.max_count} tokens do not fit {num_rows} rows of one token"
        )
    if bool((rows.kv_indices == padding_block).any()):
        raise PlanError(f"block {padding_block} is reserved for padding, but a row of the step reads it")
    ones = torch.ones(missing, dtype=torch.int32)
    return PagedRows(
        qo_indptr=torch.arange(num_rows + 1, dtype=torch.int32),
        kv_indptr=torch.cat((rows.kv_indptr, rows.kv_indptr[-1:] + ones.cumsum(0, dtype=torch.int32))),
        kv_indices=torch.cat((rows.kv_indices, ones * padding_block)),
        kv_last_page_len=torch.cat((rows.kv_last_page_len, ones)),
        kv_lens=torch.cat((rows.kv_lens, ones)),
        max_count=1,
    )


def _counts(plan: AttentionPlan) -> IntArray:
    return np.diff(plan.qo_indptr.numpy()).astype(np.int64)


def _shared_rows(plan: AttentionPlan, groups: Sequence[tuple[SharedGroup, IntArray]]) -> SharedRows:
    """Both levels of groups, each given with those of its rows that have tokens."""
    counts, kv_lens = _counts(plan), plan.kv_lens.numpy().astype(np.int64)
    shared = np.array([group.num_shared_blocks for group, _ in groups], np.int64)
    rows = np.concatenate([rows for _, rows in groups])
    first_rows = np.array([rows[0] for _, rows in groups])
    group_counts = np.array([counts[rows].sum() for _, rows in groups])
    skipped = np.repeat(shared, [len(rows) for _, rows in groups])
    prefix = _paged_rows(plan, first_rows, group_counts, 0 * shared, shared * plan.block_size)
    suffix = _paged_rows(plan, rows, counts[rows], skipped, kv_lens[rows])
    assert prefix is not None
    assert suffix is not None
    return SharedRows(prefix, suffix)


def _paged_rows(
    plan: AttentionPlan, rows: IntArray, counts: IntArray, first_blocks: IntArray, kv_ends: IntArray
) -> PagedRows | None:
    """Rows with `counts` queries over KV [first_blocks * block_size, kv_ends) of the plan's `rows`; None for no rows."""
    if not len(rows):
        return None
    kv_lens = kv_ends - first_blocks * plan.block_size
    num_blocks = -(-kv_lens // plan.block_size)
    begins = plan.kv_indptr.numpy().astype(np.int64)[rows] + first_blocks
    kv_indptr = _offsets(num_blocks)
    places = np.arange(kv_indptr[-1]) + np.repeat(begins - kv_indptr[:-1], num_blocks)
    return PagedRows(
        qo_indptr=_int32(_offsets(counts)),
        kv_indptr=_int32(kv_indptr),
        kv_indices=torch.from_numpy(plan.kv_indices.numpy()[places]),
        kv_last_page_len=_int32(kv_lens - (num_blocks - 1) * plan.block_size),
        kv_lens=_int32(kv_lens),
        max_count=int(counts.max()),
    )


def _token_order(plan: AttentionPlan, rows: IntArray) -> torch.Tensor | None:
    """The tokens of `rows`, row by row; None if that is every token in order."""
    counts = _counts(plan)[rows]
    begins = plan.qo_indptr.numpy().astype(np.int64)[rows]
    offsets = _offsets(counts)
    order = np.arange(offsets[-1]) + np.repeat(begins - offsets[:-1], counts)
    return None if np.array_equal(order, np.arange(plan.num_tokens)) else torch.from_numpy(order)


def _offsets(counts: IntArray) -> IntArray:
    offsets = np.zeros(len(counts) + 1, np.int64)
    np.cumsum(counts, out=offsets[1:])
    return offsets


def _int32(array: IntArray) -> torch.Tensor:
    return torch.from_numpy(array.astype(np.int32))
