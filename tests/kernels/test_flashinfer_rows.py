"""How a step becomes FlashInfer's rows: every token once, over exactly its own KV, by FlashInfer's rules."""

import numpy as np
import pytest
import torch
from flashinfer_emulator import _Rows, check_rows, query_tile
from hypothesis import given
from hypothesis import strategies as st

from phloem.kernels.flashinfer_calls import PagedRows
from phloem.kernels.flashinfer_rows import (
    CascadeGate,
    Layout,
    choose_groups,
    exact_layout,
    fast_layout,
    pad_decode,
)
from phloem.kernels.plan import AttentionPlan, PlanError, PlanRow
from phloem.kernels.shared_prefix import SharedGroup

Read = tuple[int, ...]
"""Slots that a token attends to, in order."""


@st.composite
def plans(draw: st.DrawFn, *, decode_only: bool = False) -> AttentionPlan:
    """Rows over random paths through a tree of blocks; what a row writes is its own."""
    block_size = draw(st.sampled_from([1, 2, 4, 16]))
    paths: list[list[int]] = [[]]
    for block in range(draw(st.integers(0, 20))):
        paths.append([*draw(st.sampled_from(paths)), block])
    rows = []
    for own in range(draw(st.integers(1, 8))):
        table = draw(st.sampled_from(paths))
        tail = draw(st.integers(0, block_size - 1))
        count = 1 if decode_only else draw(st.integers(0, 40))
        blocks = [1000 + own * 100 + i for i in range(60)]
        rows.append(PlanRow([*table, *blocks], len(table) * block_size + tail, count))
    return AttentionPlan.from_rows(rows, block_size=block_size)


def slots_of(plan: AttentionPlan, row: int, end: int) -> Read:
    blocks = plan.kv_indices[plan.kv_indptr[row] : plan.kv_indptr[row + 1]].tolist()
    return tuple(blocks[i // plan.block_size] * plan.block_size + i % plan.block_size for i in range(end))


def wanted(plan: AttentionPlan, window: int | None = None) -> list[Read]:
    """What each token of the step attends to."""
    reads = []
    counts = plan.qo_indptr.diff().tolist()
    for row, count in enumerate(counts):
        kv_len = int(plan.kv_lens[row])
        for end in range(kv_len - count + 1, kv_len + 1):
            reads.append(slots_of(plan, row, end)[0 if window is None else max(0, end - window) :])
    return reads


def reads(
    rows: PagedRows | None, block_size: int, *, causal: bool = True, window: int | None = None
) -> list[Read]:
    """What each query of a wrapper attends to, by FlashInfer's rules, which the rows must keep."""
    if rows is None:
        return []
    raw = _Rows(rows.qo_indptr, rows.kv_indptr, rows.kv_indices, rows.kv_last_page_len)
    check_rows(raw, rows.kv_lens, page_size=block_size, causal=causal)
    assert rows.max_count == int(rows.qo_indptr.diff().max())
    found = []
    for row in range(rows.num_rows):
        count, kv_len = int(rows.qo_indptr.diff()[row]), int(rows.kv_lens[row])
        pages = rows.kv_indices[rows.kv_indptr[row] : rows.kv_indptr[row + 1]].tolist()
        slots = [pages[i // block_size] * block_size + i % block_size for i in range(kv_len)]
        for query in range(count):
            end = kv_len - count + query + 1 if causal else kv_len
            found.append(tuple(slots[0 if window is None else max(0, end - window) : end]))
    return found


def in_step_order(plan: AttentionPlan, layout: Layout, found: list[Read]) -> list[Read]:
    order = range(plan.num_tokens) if layout.token_order is None else layout.token_order.tolist()
    assert sorted(order) == list(range(plan.num_tokens))
    placed: dict[int, Read] = dict(zip(order, found, strict=True))
    return [placed[token] for token in range(plan.num_tokens)]


def found_fast(plan: AttentionPlan, layout: Layout) -> list[Read]:
    size = plan.block_size
    found = reads(layout.decode, size) + reads(layout.prefill, size)
    if layout.shared is not None:
        prefix = reads(layout.shared.prefix, size, causal=False)
        suffix = reads(layout.shared.suffix, size)
        assert all(prefix)
        assert all(suffix)
        found += [first + second for first, second in zip(prefix, suffix, strict=True)]
    return in_step_order(plan, layout, found)


@given(plans(), st.integers(2, 4), st.integers(1, 40))
def test_fast_rows_read_each_tokens_own_kv(plan: AttentionPlan, min_rows: int, min_tokens: int) -> None:
    gate = CascadeGate(min_rows, min_tokens)
    groups = choose_groups(plan.groups, block_size=plan.block_size, gate=gate)
    for layout in (fast_layout(plan), fast_layout(plan, groups)):
        assert found_fast(plan, layout) == wanted(plan)
        assert layout.decode is None or layout.decode.max_count == 1
    assert fast_layout(plan).shared is None


@given(
    plans(),
    st.sampled_from([1, 3, 5, 8, 20]),
    st.sampled_from([None, 16, 32]),
    st.sampled_from([None, 1, 5, 33]),
)
def test_exact_rows_read_each_tokens_own_kv_in_pieces_of_one_tile(
    plan: AttentionPlan, group_size: int, split_tokens: int | None, window: int | None
) -> None:
    layout = exact_layout(plan, group_size=group_size, split_tokens=split_tokens, window=window)
    rows = layout.prefill
    assert in_step_order(plan, layout, reads(rows, plan.block_size, window=window)) == wanted(plan, window)
    if rows is None:
        return
    mean = rows.num_tokens * group_size // rows.num_rows
    assert query_tile(mean, 64) == query_tile(group_size, 64)
    for row in range(rows.num_rows):
        first, last = int(rows.kv_lens[row]) - int(rows.qo_indptr.diff()[row]), int(rows.kv_lens[row]) - 1
        assert split_tokens is None or window or first // split_tokens == last // split_tokens
        if window is not None:
            assert first == last
            assert last < window + plan.block_size


@given(plans(), st.sampled_from([None, 4]))
def test_an_exact_row_under_a_window_depends_on_its_token_alone(
    plan: AttentionPlan, window: int | None
) -> None:
    """The same token by itself: same pages, same length."""
    together = exact_layout(plan, group_size=3, split_tokens=None, window=7).prefill
    token = 0
    for row in range(plan.num_rows):
        count, kv_len = int(plan.qo_indptr.diff()[row]), int(plan.kv_lens[row])
        table = plan.kv_indices[plan.kv_indptr[row] : plan.kv_indptr[row + 1]].tolist()
        for start in range(kv_len - count, kv_len):
            one = AttentionPlan.from_rows([PlanRow(table, start, 1)], block_size=plan.block_size)
            alone = exact_layout(one, group_size=3, split_tokens=None, window=7).prefill
            assert alone is not None
            assert together is not None
            begin, end = together.kv_indptr[token : token + 2].tolist()
            assert alone.kv_indices.tolist() == together.kv_indices[begin:end].tolist()
            assert int(alone.kv_lens[0]) == int(together.kv_lens[token])
            token += 1


def saved(groups: tuple[SharedGroup, ...]) -> int:
    return sum((len(group.rows) - 1) * group.num_shared_blocks for group in groups)


@given(plans(), st.integers(2, 4), st.integers(1, 30))
def test_the_chosen_groups_are_disjoint_pass_the_gate_and_save_most(
    plan: AttentionPlan, min_rows: int, min_tokens: int
) -> None:
    gate = CascadeGate(min_rows, min_tokens)
    chosen = choose_groups(plan.groups, block_size=plan.block_size, gate=gate)
    rows = [row for group in chosen for row in group.rows]
    assert len(rows) == len(set(rows))
    fit = [
        group
        for group in plan.groups
        if len(group.rows) >= min_rows and group.num_shared_blocks * plan.block_size >= min_tokens
    ]
    assert set(chosen) <= set(fit)
    best = 0
    for choice in range(1 << min(len(fit), 10)):
        some = tuple(group for bit, group in enumerate(fit) if choice >> bit & 1)
        taken = [row for group in some for row in group.rows]
        if len(taken) == len(set(taken)):
            best = max(best, saved(some))
    assert saved(chosen) == best


def test_a_system_prompt_gives_way_to_the_longer_prefixes_below_it() -> None:
    outer = SharedGroup(tuple(range(16)), 20)
    inner = (SharedGroup(tuple(range(8)), 100), SharedGroup(tuple(range(8, 16)), 100))
    assert choose_groups([outer, *inner], block_size=16, gate=CascadeGate()) == inner
    assert choose_groups([outer], block_size=16, gate=CascadeGate()) == (outer,)
    assert choose_groups([outer, *inner], block_size=16, gate=CascadeGate(min_rows=9)) == (outer,)
    assert choose_groups([SharedGroup(tuple(range(7)), 900)], block_size=16, gate=CascadeGate()) == ()
    assert choose_groups([SharedGroup(tuple(range(99)), 15)], block_size=16, gate=CascadeGate()) == ()


def test_a_gate_without_sharers_is_refused() -> None:
    with pytest.raises(ValueError, match="min_rows 2 or more"):
        CascadeGate(min_rows=1)


@given(plans(decode_only=True), st.integers(0, 5))
def test_padding_touches_only_the_reserved_block(plan: AttentionPlan, missing: int) -> None:
    rows = fast_layout(plan).decode
    assert rows is not None
    reserved = 5000
    padded = pad_decode(rows, rows.num_rows + missing, reserved)
    found = reads(padded, plan.block_size)
    assert found[: rows.num_rows] == reads(rows, plan.block_size)
    assert found[rows.num_rows :] == [(reserved * plan.block_size,)] * missing


def test_rows_that_cannot_be_padded_are_refused() -> None:
    plan = AttentionPlan.from_rows([PlanRow([3], 0, 1), PlanRow([4], 1, 1)], block_size=2)
    rows = fast_layout(plan).decode
    assert rows is not None
    with pytest.raises(PlanError, match="2 rows of up to 1 tokens do not fit 1"):
        pad_decode(rows, 1, 9)
    with pytest.raises(PlanError, match="block 4 is reserved"):
        pad_decode(rows, 3, 4)
    prefill = fast_layout(AttentionPlan.from_rows([PlanRow([3], 0, 2)], block_size=2)).prefill
    assert prefill is not None
    with pytest.raises(PlanError, match="up to 2 tokens"):
        pad_decode(prefill, 3, 9)


def test_rows_without_tokens_are_left_out() -> None:
    plan = AttentionPlan.from_rows([PlanRow([1], 1, 0), PlanRow([2], 0, 0)], block_size=2)
    for layout in (fast_layout(plan), exact_layout(plan, group_size=1, split_tokens=None, window=None)):
        assert (layout.decode, layout.prefill, layout.shared, layout.token_order) == (None,) * 4


def test_indices_are_int32_whatever_the_step() -> None:
    plan = AttentionPlan.from_rows([PlanRow(range(9), 30, 3), PlanRow([40], 0, 1)], block_size=4)
    layout = fast_layout(plan)
    for rows in (layout.decode, layout.prefill):
        assert rows is not None
        assert rows.kv_indices.dtype == rows.kv_lens.dtype == torch.int32
    assert layout.token_order is not None
    assert np.array_equal(layout.token_order.numpy(), [3, 0, 1, 2])
