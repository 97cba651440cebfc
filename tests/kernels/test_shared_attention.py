"""Rows that share a prefix attend to it together, and no bit of a result tells so."""

import os

import pytest
import torch
from attention_paths import KERNELS, TOLERANCE, Chunk, Paths, error
from hypothesis import given, settings
from hypothesis import strategies as st

from phloem.kernels.attention import AttentionSpec
from phloem.kernels.cpu_native import NativeBackend
from phloem.kernels.cpu_work import Limits, cut
from phloem.kernels.native_build import load_library
from phloem.kernels.plan import AttentionPlan, PlanRow

SPEC = AttentionSpec(num_q_heads=6, num_kv_heads=2, head_dim=64, num_layers=1)
LIMITS = Limits(tile_rows=64, span_keys=256, max_kept=10**6)
Forest = tuple[Paths, list[int], list[int]]
"""Paths, the parent of each (itself: none), and how many tokens they share."""


def fork(paths: Paths, parent: int, child: int, num_tokens: int) -> None:
    """Let a path begin with the first tokens of another one, whole blocks of which it shares."""
    whole = num_tokens // paths.block_size
    paths.kv[child][:num_tokens] = paths.kv[parent][:num_tokens]
    paths.q[child][:num_tokens] = paths.q[parent][:num_tokens]
    paths.tables[child][:whole] = paths.tables[parent][:whole]


@st.composite
def forests(draw: st.DrawFn) -> Forest:
    num_layers = draw(st.integers(1, 2))
    window = draw(st.sampled_from([None, None, 3, 100, 300, 700]))
    spec = AttentionSpec(
        num_q_heads=2 * draw(st.sampled_from([1, 3, 8])), num_kv_heads=2,
        head_dim=draw(st.sampled_from([40, 64])), num_layers=num_layers,
        logits_soft_cap=draw(st.sampled_from([None, 3.0])),
        windows=None if window is None else (window, None)[:num_layers],
    )  # fmt: skip
    num_paths = draw(st.integers(2, 6))
    parents = [draw(st.integers(0, child)) for child in range(num_paths)]
    lengths, common = [], []
    for child, parent in enumerate(parents):
        shared = 0 if parent == child else draw(st.integers(1, lengths[parent]))
        common.append(shared)
        lengths.append(shared + draw(st.sampled_from([1, 2, 20, 250, 520])))
    dtype = draw(st.sampled_from([torch.float32, torch.bfloat16]))
    paths = Paths(spec, lengths, draw(st.sampled_from([4, 16, 64])), dtype, draw(st.integers(0, 99)))
    for child, parent in enumerate(parents):
        if parent != child:
            fork(paths, parent, child, common[child])
    return paths, parents, common


def run_together(forest: Forest, sizes: list[int], num_threads: int) -> list[torch.Tensor]:
    """The path that all others hang on first, then the last tokens of every path in one step."""
    paths, parents, common = forest
    starts = [max(length - size, 0) for length, size in zip(paths.lengths, sizes, strict=True)]
    steps: list[list[Chunk]] = []
    for path, (parent, shared) in enumerate(zip(parents, common, strict=True)):
        # what a path shares in whole blocks is there; the rest is its own, its copy of a tail too
        begin = 0 if parent == path else shared // paths.block_size * paths.block_size
        # what others read must be there before they are computed, whatever the last step brings
        needed = [common[child] for child, of in enumerate(parents) if of == path and child != path]
        starts[path] = max(starts[path], begin, *needed) if needed else max(starts[path], begin)
        steps.append([(path, begin, starts[path] - begin)])
    last = [
        (path, start, length - start)
        for path, (start, length) in enumerate(zip(starts, paths.lengths, strict=True))
    ]
    outs = paths.run(paths.backend("native", num_threads), [*steps, last])
    return [out[:, start:] for out, start in zip(outs, starts, strict=True)]


@settings(max_examples=80, deadline=None)
@given(forests(), st.lists(st.sampled_from([1, 1, 2, 7, 40]), min_size=6, max_size=6), st.integers(1, 3))
def test_company_in_a_prefix_changes_no_bit(forest: Forest, sizes: list[int], num_threads: int) -> None:
    paths = forest[0]
    together = run_together(forest, sizes[: len(paths.lengths)], num_threads)
    for path, length in enumerate(paths.lengths):
        alone = paths.run(paths.backend("native", num_threads), [[(path, 0, length)]])[path]
        assert torch.equal(together[path], alone[:, length - together[path].shape[1] :])


@pytest.mark.parametrize("num_threads", [1, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_forty_rows_over_one_prefix_change_no_bit(dtype: torch.dtype, num_threads: int) -> None:
    """More query rows than a tile holds, with two tokens each."""
    paths = Paths(SPEC, [600, *[602] * 40], dtype=dtype)
    for child in range(1, 41):
        fork(paths, 0, child, 600)
    first = [(path, 592, 8) for path in range(1, 41)]
    steps = [[(0, 0, 600)], first, [(path, 600, 2) for path in range(1, 41)]]
    together = paths.run(paths.backend("native", num_threads), steps)
    for path in (1, 20, 40):
        alone = paths.run(paths.backend("native"), [[(path, 0, 602)]])[path]
        assert torch.equal(together[path][:, 600:], alone[:, 600:])


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_forks_of_forks_equal_the_reference(kernel: str, dtype: torch.dtype) -> None:
    paths = Paths(SPEC, [600, 1100, 1101, 700, 610], dtype=dtype)
    for parent, child, shared in ((0, 1, 595), (1, 2, 1030), (0, 3, 590), (0, 4, 300)):
        fork(paths, parent, child, shared)
    steps = [[(path, 0, length - 1)] for path, length in enumerate(paths.lengths)]
    steps.append([(path, length - 1, 1) for path, length in enumerate(paths.lengths)])
    given_, wanted = (paths.run(paths.backend(name), steps) for name in (kernel, "reference"))
    assert error(given_, wanted) < TOLERANCE[dtype]


def test_every_shared_span_is_computed_once_for_all_rows() -> None:
    """64 rows over 4 whole spans, half of them over 4 more: 2 KV heads x 192 query rows = 3 tiles, then 2."""
    root = list(range(128))
    rows = [PlanRow([*root, 1000 + row], 128 * 16, 1) for row in range(32)]
    rows += [PlanRow([*root[:64], 2000 + row], 64 * 16, 1) for row in range(32)]
    plan = AttentionPlan.from_rows(rows, block_size=16)
    work = cut(plan, LIMITS, group_size=3, num_kv_heads=2, num_threads=2)
    assert work.item_span.tolist() == [
        *[s for s in range(4) for _ in range(3)],
        *[s for s in range(4, 8) for _ in range(2)],
    ]
    assert work.tile_kept.tolist() == [8] * 32 + [4] * 32
    assert work.tile_count.tolist()[64:] == [64, 64, 64, 64, 32]


def test_rows_that_fill_tiles_alone_are_left_alone() -> None:
    root = list(range(16))
    rows = [
        PlanRow([*root, *range(100 * row, 100 * row + 4)], 256, count)
        for row, count in ((1, 60), (2, 60), (3, 1))
    ]
    plan = AttentionPlan.from_rows(rows, block_size=16)
    work = cut(plan, LIMITS, group_size=3, num_kv_heads=4, num_threads=1)
    assert work.item_span.tolist() == []
    assert work.num_partials == 0


@pytest.mark.parametrize("num_threads", [1, 64])
@pytest.mark.parametrize("count", [1, 15])
@pytest.mark.parametrize("max_kept", [0, 500, 3000, 30_000])
def test_what_is_kept_fits_the_memory_for_it(max_kept: int, count: int, num_threads: int) -> None:
    """Two nested groups over a long prefix: without a limit, thirty scores over 32k tokens of an 8B model took a gigabyte."""
    root = list(range(2048))
    rows = [PlanRow([*root, 3000 + row], 2048 * 16, count) for row in range(20)]
    rows += [PlanRow([*root[:1024], 4000 + row], 1024 * 16, count) for row in range(10)]
    plan = AttentionPlan.from_rows(rows, block_size=16)
    limits = Limits(tile_rows=64, span_keys=256, max_kept=max_kept)
    work = cut(plan, limits, group_size=4, num_kv_heads=2, num_threads=num_threads)
    assert work.num_partials * 4 <= max_kept
    if max_kept > 30 * 4 * count:
        assert work.tile_kept.min() > 0, "what there is memory for is shared"


@pytest.mark.parametrize("num_threads", [1, 2])
@pytest.mark.parametrize("max_partial_bytes", [0, 200_000, 400_000, 600_000])
def test_little_memory_for_results_changes_no_bit(max_partial_bytes: int, num_threads: int) -> None:
    paths = Paths(SPEC, [1100, *[1102] * 20, *[602] * 5])
    for child in range(1, 21):
        fork(paths, 0, child, 1100)
    for child in range(21, 26):
        fork(paths, 0, child, 600)
    steps = [[(0, 0, 1100)], [(path, 1088, 12) for path in range(1, 21)]]
    steps += [[(path, 592, 8) for path in range(21, 26)]]
    steps += [[(path, paths.lengths[path] - 2, 2) for path in range(1, 26)]]
    given_, wanted = (
        paths.run(
            NativeBackend(
                SPEC,
                paths.store(),
                library=load_library(os.environ),
                num_threads=num_threads,
                max_partial_bytes=limit,
            ),
            steps,
        )
        for limit in (max_partial_bytes, 1 << 29)
    )
    for path in range(1, 26):
        assert torch.equal(given_[path][:, -2:], wanted[path][:, -2:])


def test_memory_beyond_the_shared_blocks_is_never_read() -> None:
    """The store is NaN but for what was written; a shared span that read one key too many would show."""
    paths = Paths(SPEC, [300, 300])
    fork(paths, 0, 1, 290)
    backend = paths.backend("native")
    assert isinstance(backend, NativeBackend)
    outs = paths.run(backend, [[(0, 0, 299)], [(1, 288, 11)], [(0, 299, 1), (1, 299, 1)]])
    assert not outs[0][:, 299].isnan().any()
    assert not outs[1][:, 299].isnan().any()
