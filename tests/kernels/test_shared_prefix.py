"""Groups of rows that share their first blocks: found all, nested as the tree is, and never a block that is written."""

from itertools import combinations

from hypothesis import given
from hypothesis import strategies as st

from phloem.kernels.plan import AttentionPlan, PlanRow
from phloem.kernels.shared_prefix import SharedGroup


@st.composite
def tables(draw: st.DrawFn) -> list[list[int]]:
    """Block tables of random paths through one random tree: a child's id is never used twice."""
    paths: list[list[int]] = [[]]
    for block in range(draw(st.integers(0, 24))):
        paths.append([*draw(st.sampled_from(paths)), block])
    return draw(st.lists(st.sampled_from(paths), max_size=8))


def common(a: list[int], b: list[int]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def plan_of(past: list[list[int]]) -> AttentionPlan:
    """A decode step of paths whose past is exactly these blocks; each writes to a block of its own."""
    rows = [PlanRow([*blocks, 100 + i], 2 * len(blocks), 1) for i, blocks in enumerate(past)]
    return AttentionPlan.from_rows(rows, block_size=2)


@given(tables())
def test_any_two_rows_are_in_a_group_of_what_they_share(past: list[list[int]]) -> None:
    plan = plan_of(past)
    plan.check(200)
    for a, b in combinations(range(len(past)), 2):
        both = [group.num_shared_blocks for group in plan.groups if {a, b} <= set(group.rows)]
        assert max(both, default=0) == common(past[a], past[b])


@given(tables())
def test_groups_are_nested_outer_ones_first(past: list[list[int]]) -> None:
    groups = plan_of(past).groups
    assert len(set(groups)) == len(groups)
    for outer, inner in combinations(groups, 2):
        inside = set(inner.rows) <= set(outer.rows) and inner.num_shared_blocks > outer.num_shared_blocks
        assert inside or not set(inner.rows) & set(outer.rows)


def test_the_picture_in_the_docstring() -> None:
    groups = plan_of([[1, 2, 3, 7], [1, 2, 3, 9], [1, 2, 4], [1, 5]]).groups
    assert groups == (SharedGroup((0, 1, 2, 3), 1), SharedGroup((0, 1, 2), 2), SharedGroup((0, 1), 3))


def test_rows_that_compute_nothing_or_write_to_the_block_share_nothing() -> None:
    rows = [PlanRow([1, 2], 2, 1), PlanRow([1, 3], 2, 1), PlanRow([1], 2, 0), PlanRow([1], 1, 1)]
    assert AttentionPlan.from_rows(rows[:3], block_size=2).groups == (SharedGroup((0, 1), 1),)
    assert AttentionPlan.from_rows([rows[0], rows[3]], block_size=2).groups == ()
