"""AttentionPlan: the arrays say what the rows say, and a broken plan is refused."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from phloem.kernels.plan import AttentionPlan, PlanError, PlanRow
from phloem.kernels.shared_prefix import SharedGroup


@st.composite
def rows_and_block_size(draw: st.DrawFn) -> tuple[list[PlanRow], int]:
    block_size = draw(st.sampled_from([1, 2, 4, 16, 64]))
    lengths = draw(st.lists(st.tuples(st.integers(0, 70), st.integers(0, 40)), max_size=6))
    needed = [-(-(start + count) // block_size) for start, count in lengths]
    ids = list(draw(st.permutations(range(sum(needed) + len(needed)))))
    rows = []
    for (start, count), num_blocks in zip(lengths, needed, strict=True):
        spare = draw(st.integers(0, 1))
        rows.append(PlanRow([ids.pop() for _ in range(num_blocks + spare)], start, count))
    return rows, block_size


@given(rows_and_block_size())
def test_arrays_say_what_the_rows_say(case: tuple[list[PlanRow], int]) -> None:
    rows, block_size = case
    plan = AttentionPlan.from_rows(rows, block_size=block_size)
    plan.check(1000)
    assert plan.num_rows == len(rows)
    assert plan.num_tokens == sum(row.count for row in rows)
    assert plan.kv_lens.tolist() == [row.start + row.count for row in rows]
    positions = [p for row in rows for p in range(row.start, row.start + row.count)]
    assert plan.positions.tolist() == positions
    slots = [
        row.block_table[p // block_size] * block_size + p % block_size
        for row in rows
        for p in range(row.start, row.start + row.count)
    ]
    assert plan.slot_mapping.tolist() == slots
    for index, row in enumerate(rows):
        blocks = plan.kv_indices[plan.kv_indptr[index] : plan.kv_indptr[index + 1]].tolist()
        assert blocks == list(row.block_table[: len(blocks)])
        assert len(blocks) * block_size >= row.start + row.count > (len(blocks) - 1) * block_size


@given(rows_and_block_size())
def test_index_arrays_are_int32_on_the_cpu(case: tuple[list[PlanRow], int]) -> None:
    plan = AttentionPlan.from_rows(case[0], block_size=case[1])
    for array in (plan.qo_indptr, plan.kv_indptr, plan.kv_indices, plan.kv_last_page_len):
        assert array.dtype == torch.int32
        assert array.device.type == "cpu"
    assert plan.positions.dtype == plan.slot_mapping.dtype == torch.int64


def test_an_empty_plan_is_a_plan() -> None:
    plan = AttentionPlan.from_rows((), block_size=16)
    plan.check(0)
    assert (plan.num_rows, plan.num_tokens) == (0, 0)


def test_block_tables_may_be_arrays() -> None:
    plan = AttentionPlan.from_rows([PlanRow(np.array([3, 1]), 0, 5)], block_size=4)  # type: ignore[arg-type]
    assert plan.slot_mapping.tolist() == [12, 13, 14, 15, 4]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (PlanRow([0], 0, 5), "need 2 blocks; its block table has 1"),
        (PlanRow([0], -1, 2), "start -1"),
        (PlanRow([0], 2, -1), "count -1"),
    ],
)
def test_a_row_that_cannot_be_laid_out_is_refused(row: PlanRow, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        AttentionPlan.from_rows([PlanRow([1], 0, 1), row], block_size=4)


def _plan() -> AttentionPlan:
    return AttentionPlan.from_rows([PlanRow([7, 2], 3, 3), PlanRow([5, 9, 1], 8, 1)], block_size=4)


def _int32(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kv_indices": _int32(7, 2, 5, 10, 1)}, "block id 10 is outside"),
        ({"kv_indices": _int32(7, -2, 5, 9, 1)}, "block id -2 is outside"),
        ({"kv_indices": torch.tensor([7, 2, 5, 9, 1])}, "kv_indices is torch.int64"),
        ({"kv_last_page_len": _int32(2, 0)}, "row 1 has 3 blocks and 0 tokens in the last"),
        ({"kv_last_page_len": _int32(5, 1)}, "row 0 has 2 blocks and 5 tokens in the last"),
        ({"kv_indptr": _int32(0, 6, 5)}, "kv_indptr must rise from 0 to 5"),
        ({"qo_indptr": _int32(0, 3, 5)}, "qo_indptr must rise from 0 to 4"),
        (
            {"kv_indptr": _int32(0, 0, 5), "kv_last_page_len": _int32(0, 1)},
            "row 0 computes 3 tokens but its KV covers",
        ),
        ({"positions": torch.tensor([3, 4, 5, 7])}, r"positions\[3\] is 7"),
        ({"slot_mapping": torch.tensor([31, 8, 9, 5])}, r"slot_mapping\[3\] is 5"),
        ({"positions": torch.tensor([3, 4, 5])}, "slot_mapping is torch.int64"),
    ],
)
def test_check_names_the_broken_rule(changes: dict[str, torch.Tensor], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        replace(_plan(), **changes).check(10)


def test_check_refuses_a_slot_that_is_written_twice() -> None:
    plan = AttentionPlan.from_rows([PlanRow([3], 0, 2), PlanRow([3], 1, 1)], block_size=4)
    with pytest.raises(PlanError, match="write to block 3, offset 1"):
        plan.check(10)


def _mirroring() -> AttentionPlan:
    """Two paths with positions 4 and 5 in common, of which the second takes both over."""
    rows = [PlanRow([7, 2], 4, 3), PlanRow([5, 9], 6, 1, [0, 1]), PlanRow([5, 6], 5, 0, [0])]
    return AttentionPlan.from_rows(rows, block_size=4)


def test_mirrored_tokens_are_written_to_the_slots_from_which_their_rows_read_them() -> None:
    plan = _mirroring()
    plan.check(10)
    assert (plan.num_tokens, plan.num_mirrors) == (4, 3)
    assert plan.mirror_indptr.tolist() == [0, 0, 2, 3]
    assert plan.mirror_tokens.tolist() == [0, 1, 0]
    assert plan.mirror_slots.tolist() == [36, 37, 24]
    assert plan.slot_mapping.tolist() == [8, 9, 10, 38]


def test_blocks_that_this_step_mirrors_into_are_no_past_to_share() -> None:
    rows = [PlanRow([7, 1], 3, 2), PlanRow([7, 2], 5, 1, [0, 1])]
    assert AttentionPlan.from_rows(rows, block_size=4).groups == ()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"mirror_tokens": torch.tensor([0, 2, 0])}, "mirror 1 writes the token of position 6 to slot 37"),
        ({"mirror_tokens": torch.tensor([0, 4, 0])}, "there are 4 tokens"),
        ({"mirror_tokens": torch.tensor([-1, 1, 0])}, "mirror_tokens goes from -1"),
        ({"mirror_slots": torch.tensor([36, 38, 24])}, "has position 5 in slot 37"),
        ({"mirror_slots": torch.tensor([36, 37])}, r"mirror_tokens is torch.int64 \[3\]"),
        ({"mirror_indptr": _int32(0, 0, 2, 2)}, "mirror_indptr must rise from 0 to 3"),
        ({"mirror_indptr": _int32(0, 1, 2, 3)}, "mirror 0 writes"),
    ],
)
def test_check_names_a_mirror_that_is_none(changes: dict[str, torch.Tensor], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        replace(_mirroring(), **changes).check(10)


def test_a_row_mirrors_no_more_than_stands_before_it() -> None:
    with pytest.raises(PlanError, match="row 1 mirrors 2 tokens but starts at 1"):
        AttentionPlan.from_rows([PlanRow([1], 0, 2), PlanRow([2], 1, 1, [0, 1])], block_size=4)


def test_check_refuses_a_mirror_that_another_row_writes_to() -> None:
    rows = [PlanRow([3], 0, 2), PlanRow([3], 1, 1, [0])]
    with pytest.raises(PlanError, match="write to block 3, offset 0"):
        AttentionPlan.from_rows(rows, block_size=4).check(10)


def test_rows_may_share_blocks_that_they_only_read() -> None:
    rows = [PlanRow([3, 4], 4, 1), PlanRow([3, 5], 4, 2)]
    AttentionPlan.from_rows(rows, block_size=4).check(10)


@pytest.mark.parametrize(
    ("group", "message"),
    [
        (SharedGroup((0,), 1), "two or more"),
        (SharedGroup((0, 2), 1), "two or more of 2 rows"),
        (SharedGroup((0, 1), 2), "it can't share 2 blocks"),
        (SharedGroup((0, 1), 1), "differ within their 1 shared blocks"),
    ],
)
def test_check_refuses_a_group_that_does_not_share(group: SharedGroup, message: str) -> None:
    rows = [PlanRow([3, 4], 4, 1), PlanRow([6, 5], 4, 2)]
    with pytest.raises(PlanError, match=message):
        replace(AttentionPlan.from_rows(rows, block_size=4), groups=(group,)).check(10)
