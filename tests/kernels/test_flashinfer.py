"""The FlashInfer backend, through the emulator, against the oracle: fast, cascaded, exact, and as CUDA graphs."""

from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError

import pytest
import torch
from attention_paths import Chunk, Paths, Twins, at_once, chunked, error
from flashinfer_emulator import Emulation, RuleBroken
from flashinfer_steps import SMALL, WINDOWED, family, family_steps, make, with_graphs
from hypothesis import given, settings
from hypothesis import strategies as st

from phloem.kernels import flashinfer_library
from phloem.kernels.attention import AttentionSpec, make_backend
from phloem.kernels.flashinfer_graph import GraphBucket, GraphDecodeBackend
from phloem.kernels.flashinfer_library import FlashInferUnavailable
from phloem.kernels.flashinfer_options import FlashInferOptions, can_merge
from phloem.kernels.flashinfer_rows import CascadeGate
from phloem.kernels.plan import AttentionPlan, PlanError, PlanRow

TOLERANCE = {torch.float16: 2e-3, torch.bfloat16: 1e-2}
EXACT = FlashInferOptions(deterministic=True, workspace_bytes=1 << 20)


def assert_close(paths: Paths, outs: Sequence[torch.Tensor], steps: Sequence[Sequence[Chunk]]) -> None:
    wanted = paths.run(paths.backend("reference"), steps)
    for out, right in zip(outs, wanted, strict=True):
        assert torch.equal(out.isnan(), right.isnan())
    given, right = ([out[~out.isnan()] for out in each] for each in (outs, wanted))
    assert error(given, right) < TOLERANCE[paths.dtype]


@st.composite
def specs(draw: st.DrawFn) -> AttentionSpec:
    num_kv_heads = draw(st.sampled_from([1, 2, 3]))
    windows = draw(st.sampled_from([None, (None, 5), (7, 40), (100, 1)]))
    return AttentionSpec(
        num_q_heads=num_kv_heads * draw(st.sampled_from([1, 2, 3, 5, 8, 17])),
        num_kv_heads=num_kv_heads,
        head_dim=draw(st.sampled_from([64, 128])),
        num_layers=2,
        scale=draw(st.sampled_from([None, 0.3])),
        logits_soft_cap=draw(st.sampled_from([None, 3.0])),
        windows=windows,
    )


@st.composite
def cases(draw: st.DrawFn) -> tuple[Paths, list[list[Chunk]]]:
    """Paths that share prefixes of one another: the prefixes first, then prefill, decode and empty rows side by side."""
    block_size = draw(st.sampled_from([1, 2, 4, 16, 64]))
    lengths = [70]
    prefixes: dict[int, tuple[int, int]] = {}
    for path in range(1, draw(st.integers(1, 6))):
        other = draw(st.integers(0, path - 1))
        shared = draw(st.integers(0, (lengths[other] - 1) // block_size))
        if shared:
            prefixes[path] = (other, shared)
        lengths.append(shared * block_size + draw(st.sampled_from([1, 2, 15, 16, 17, 33])))
    dtype = draw(st.sampled_from([torch.float16, torch.bfloat16]))
    kv_dtype = (
        draw(st.sampled_from([None, torch.float8_e4m3fn, torch.float8_e5m2])) if block_size == 16 else None
    )
    paths = Paths(draw(specs()), lengths, block_size, dtype, draw(st.integers(0, 99)), prefixes, kv_dtype)
    steps: list[list[Chunk]] = []
    last: list[Chunk] = []
    for path, length in enumerate(lengths):
        own = prefixes[path][1] * block_size if path in prefixes else 0
        # what another path builds on is computed before it
        is_shared = any(path == other for other, _ in prefixes.values())
        split = draw(st.sampled_from([length - 1, length] if is_shared else [own, length - 1]))
        steps.append([(path, own, split - own)])
        last.append((path, split, length - split))
    return paths, [*steps, draw(st.permutations(last))]


@settings(max_examples=25, deadline=None)
@given(cases(), st.sampled_from([None, CascadeGate(2, 1), CascadeGate(3, 16)]))
def test_fast_mode_equals_the_reference_on_any_plan(
    case: tuple[Paths, list[list[Chunk]]], gate: CascadeGate | None
) -> None:
    paths, steps = case
    options = FlashInferOptions(q_dtype=paths.dtype, cascade=gate, workspace_bytes=1 << 20)
    assert_close(paths, paths.run(make(paths, Emulation(), options), steps), steps)


@settings(max_examples=20, deadline=None)
@given(cases(), st.sampled_from([None, 64, 128]))
def test_exact_mode_equals_the_reference_on_any_plan(
    case: tuple[Paths, list[list[Chunk]]], split_tokens: int | None
) -> None:
    paths, steps = case
    options = FlashInferOptions(q_dtype=paths.dtype, deterministic=True, split_tokens=split_tokens)
    assert_close(paths, paths.run(make(paths, Emulation(), options), steps), steps)


@settings(max_examples=20, deadline=None)
@given(cases(), st.sampled_from([1, 2, 8]), st.booleans())
def test_graphs_equal_the_reference_on_any_plan(
    case: tuple[Paths, list[list[Chunk]]], num_rows: int, is_exact: bool
) -> None:
    paths, steps = case
    options = FlashInferOptions(q_dtype=paths.dtype, deterministic=is_exact, workspace_bytes=1 << 20)
    backend = with_graphs(paths, Emulation(), num_rows, options)
    assert_close(paths, paths.run(backend, steps), steps)


@pytest.mark.parametrize("is_exact", [False, True])
@pytest.mark.parametrize("kv_dtype", [None, torch.float8_e4m3fn])
@pytest.mark.parametrize("start", [0, 13, 16, 70])
def test_mirrored_tokens_give_what_tokens_computed_apart_give(
    is_exact: bool, kv_dtype: torch.dtype | None, start: int
) -> None:
    twins = Twins.of(SMALL, start=start, dtype=torch.bfloat16, kv_dtype=kv_dtype)
    options = FlashInferOptions(q_dtype=torch.bfloat16, deterministic=is_exact, workspace_bytes=1 << 20)
    given = twins.results(make(twins.paths, Emulation(), options))
    wanted = twins.wanted(make(twins.paths, Emulation(), options))
    if is_exact:
        assert all(map(torch.equal, given, wanted))
    assert error(given, wanted) < TOLERANCE[torch.bfloat16]


def test_a_step_with_mirrors_runs_in_no_graph() -> None:
    paths = Paths(SMALL, [17, 17], dtype=torch.bfloat16)
    backend = with_graphs(paths, Emulation(), 2, FlashInferOptions(q_dtype=torch.bfloat16))
    rows = [PlanRow(paths.tables[0], 16, 1), PlanRow(paths.tables[1], 17, 0, [0])]
    plan = AttentionPlan.from_rows(rows, block_size=16)
    assert "1 more slots" in str(backend.graph.why_not(plan))
    backend.plan(plan)
    assert backend.steps_in_graph == 0
    with pytest.raises(PlanError, match="more slots"):
        backend.graph.plan(plan)


def test_eight_rows_over_256_shared_tokens_run_as_a_cascade_and_seven_do_not() -> None:
    for rows, merges in ((8, 2), (7, 0)):
        paths, emulation = family(rows=rows), Emulation()
        steps = family_steps(paths)
        assert_close(paths, paths.run(make(paths, emulation), steps), steps)
        assert emulation.runs.count("merge") == merges


def test_layers_with_a_window_run_without_a_cascade() -> None:
    paths, emulation = family(WINDOWED), Emulation()
    steps = family_steps(paths)
    assert_close(paths, paths.run(make(paths, emulation), steps), steps)
    assert emulation.runs.count("merge") == 2


def test_more_heads_than_the_merge_has_threads_for_run_without_a_cascade() -> None:
    wide = AttentionSpec(num_q_heads=72, num_kv_heads=8, head_dim=128, num_layers=1)
    assert not can_merge(wide)
    assert can_merge(SMALL)
    paths, emulation = family(wide), Emulation()
    steps = family_steps(paths)
    assert_close(paths, paths.run(make(paths, emulation), steps), steps)
    assert "merge" not in emulation.runs


EXACT_SPECS = {
    "small model": SMALL,
    "windows and cap": AttentionSpec(
        num_q_heads=4, num_kv_heads=2, head_dim=64, num_layers=3, logits_soft_cap=5.0, windows=(None, 40, 7)
    ),
    "groups of 20": AttentionSpec(num_q_heads=20, num_kv_heads=1, head_dim=64, num_layers=1),
    "no groups": AttentionSpec(num_q_heads=2, num_kv_heads=2, head_dim=64, num_layers=1),
}


@pytest.mark.parametrize("split_tokens", [None, 64])
@pytest.mark.parametrize("shape", EXACT_SPECS)
def test_in_exact_mode_chunking_company_and_graphs_change_no_bit(
    shape: str, split_tokens: int | None
) -> None:
    """The emulator's noise follows what FlashInfer's bits follow: tile, splits, and the row under a window."""
    paths = Paths(EXACT_SPECS[shape], [100, 40, 5], dtype=torch.float16)
    options = FlashInferOptions(deterministic=True, split_tokens=split_tokens)
    whole = paths.run(make(paths, Emulation(noise=True), options), at_once(paths.lengths))
    cuts = {
        "alone": chunked(100, 100),
        "1": chunked(100, 1),
        "7": chunked(100, 7),
        "33": chunked(100, 33),
        "beside others": [[(1, 0, 40), (0, 0, 99)], [(2, 0, 5), (0, 99, 1)]],
    }
    for name, steps in cuts.items():
        cut = paths.run(make(paths, Emulation(noise=True), options), steps)
        assert torch.equal(cut[0], whole[0]), name
    backend = with_graphs(paths, Emulation(noise=True), 4, options)
    assert torch.equal(paths.run(backend, chunked(100, 1))[0], whole[0])
    assert backend.steps_in_graph == (100 if split_tokens is None else 64)


def test_in_fast_mode_company_does_change_bits() -> None:
    """Guards the test above: the noise is there, and fast mode does not hide it."""
    paths = Paths(SMALL, [150, 40], dtype=torch.float16)
    whole = paths.run(make(paths, Emulation(noise=True)), at_once(paths.lengths))
    assert not torch.equal(paths.run(make(paths, Emulation(noise=True)), chunked(150, 7))[0], whole[0])


def test_decode_rows_run_in_the_graph_and_padding_touches_only_the_reserved_block() -> None:
    paths, emulation = Paths(WINDOWED, [20, 33, 5], dtype=torch.bfloat16), Emulation()
    backend = with_graphs(paths, emulation, 4, FlashInferOptions(workspace_bytes=1 << 20))
    steps = [[(path, 0, length - 2) for path, length in enumerate(paths.lengths)]]
    steps += [[(path, length - k, 1) for path, length in enumerate(paths.lengths)] for k in (2, 1)]
    assert_close(paths, paths.run(backend, steps), steps)
    assert backend.steps_in_graph == 2
    assert emulation.runs.count("graph decode") == 2 * 3
    store = backend.graph.base.store
    owned = {block for table in paths.tables for block in table}
    reserved = backend.graph.bucket.padding_block
    written = {block for block in range(store.num_blocks) if not store.data[:, block].isnan().all()}
    assert written <= owned | {reserved}
    assert store.data[:, reserved, :, 1:].isnan().all()


def test_a_replay_without_a_plan_is_caught_by_the_emulator() -> None:
    paths, emulation = Paths(SMALL, [5], dtype=torch.bfloat16), Emulation()
    graph = with_graphs(paths, emulation, 2, FlashInferOptions(workspace_bytes=1 << 20)).graph
    graph.plan(AttentionPlan.from_rows([PlanRow(paths.tables[0], 0, 1)], block_size=16))
    emulation.next_step()
    with pytest.raises(RuleBroken, match="plan before every replay"):
        graph.attend(0, torch.zeros(2, 9, 64, dtype=torch.bfloat16))


def test_the_graph_says_why_a_step_must_run_without_it() -> None:
    paths = Paths(SMALL, [200, 40], dtype=torch.bfloat16)
    options = FlashInferOptions(deterministic=True, split_tokens=64)
    base = make(paths, Emulation(), options)
    graph = GraphDecodeBackend(
        base, GraphBucket(num_rows=1, padding_block=paths.spare_block, max_blocks_per_row=6)
    )

    def why_not(*rows: PlanRow) -> str:
        plan = AttentionPlan.from_rows(rows, block_size=16)
        reason = graph.why_not(plan)
        with pytest.raises(PlanError, match=r"graph"):
            graph.plan(plan)
        return str(reason)

    long, short = paths.tables
    assert "computes 2 tokens" in why_not(PlanRow(short, 0, 2))
    assert "has 2 rows" in why_not(PlanRow(short, 0, 1), PlanRow(long, 0, 1))
    assert "has 0 rows" in why_not(PlanRow(short, 0, 0))
    assert "reads 7 blocks" in why_not(PlanRow(long, 100, 1))
    assert "split at 64" in why_not(PlanRow(long, 64, 1))
    assert graph.why_not(AttentionPlan.from_rows([PlanRow(long, 63, 1)], block_size=16)) is None


def test_a_row_may_not_read_the_reserved_block() -> None:
    paths = Paths(SMALL, [20], dtype=torch.bfloat16)
    bucket = GraphBucket(num_rows=2, padding_block=paths.tables[0][0], max_blocks_per_row=9)
    graph = GraphDecodeBackend(make(paths, Emulation()), bucket)
    with pytest.raises(PlanError, match="reserved for padding"):
        graph.plan(AttentionPlan.from_rows([PlanRow(paths.tables[0], 0, 1)], block_size=16))
    with pytest.raises(ValueError, match="the store has blocks 0 to"):
        GraphDecodeBackend(make(paths, Emulation()), GraphBucket(2, 99, 9))
    with pytest.raises(ValueError, match="num_rows is 0"):
        GraphBucket(0, 0, 1)


def test_a_plan_that_needs_more_workspace_is_refused_and_leaves_nothing_planned() -> None:
    paths = Paths(SMALL, [300], dtype=torch.bfloat16)
    options = FlashInferOptions(deterministic=True, split_tokens=64, workspace_bytes=1 << 20)
    backend = make(paths, Emulation(), options)
    backend.plan(AttentionPlan.from_rows([PlanRow(paths.tables[0], 0, 30)], block_size=16))
    with pytest.raises(PlanError, match="raise workspace_bytes, split less often"):
        backend.plan(AttentionPlan.from_rows([PlanRow(paths.tables[0], 0, 300)], block_size=16))
    with pytest.raises(ValueError, match=r"the plan needs \[0, 9, 64\]"):
        backend.attend(0, torch.zeros(30, 9, 64, dtype=torch.bfloat16))


def test_a_step_without_tokens_runs_nothing() -> None:
    paths, emulation = Paths(SMALL, [5], dtype=torch.bfloat16), Emulation()
    for options in (None, EXACT):
        backend = make(paths, emulation, options)
        backend.plan(AttentionPlan.from_rows([PlanRow(paths.tables[0], 2, 0)], block_size=16))
        backend.append(0, *torch.zeros(2, 0, 3, 64, dtype=torch.bfloat16))
        assert backend.attend(0, torch.zeros(0, 9, 64, dtype=torch.bfloat16)).shape == (0, 9, 64)
    assert emulation.runs == []


def test_scaled_8_bit_kv_comes_back_in_scale() -> None:
    paths = Paths(SMALL, [60], dtype=torch.bfloat16, kv_dtype=torch.float8_e4m3fn)
    # beyond what 8 bits hold without a scale
    paths.kv[0] *= 300
    options = FlashInferOptions(q_dtype=paths.dtype, k_scale=4.0, v_scale=8.0, workspace_bytes=1 << 20)
    out = paths.run(make(paths, Emulation(), options), at_once([60]))
    paths.kv_dtype = None
    # 8 bits keep 4 of a value's; attention over scores of hundreds follows the largest
    right = paths.run(paths.backend("reference"), at_once([60]))
    assert error([out[0][0, :1]], [right[0][0, :1]]) < 0.05
    assert not out[0].isnan().any()


@pytest.mark.parametrize("kv_dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_values_too_large_for_8_bits_are_the_largest_not_infinite(kv_dtype: torch.dtype) -> None:
    paths = Paths(SMALL, [20], dtype=torch.bfloat16, kv_dtype=kv_dtype)
    paths.kv[0] *= 1e6
    options = FlashInferOptions(q_dtype=paths.dtype, workspace_bytes=1 << 20)
    backend = make(paths, Emulation(), options)
    out = paths.run(backend, at_once([20]))
    assert out[0].isfinite().all()
    first = backend.store.data[0, paths.tables[0][0]].float()
    assert first.abs().max() == torch.finfo(kv_dtype).max


def test_queries_that_do_not_fit_are_refused() -> None:
    paths = Paths(SMALL, [20], dtype=torch.bfloat16)
    backend = make(paths, Emulation())
    backend.plan(AttentionPlan.from_rows([PlanRow(paths.tables[0], 0, 2)], block_size=16))
    with pytest.raises(ValueError, match=r"the plan needs \[2, 9, 64\]"):
        backend.attend(0, torch.zeros(3, 9, 64, dtype=torch.bfloat16))
    with pytest.raises(TypeError, match="float32"):
        backend.attend(0, torch.zeros(2, 9, 64))
    with pytest.raises(PlanError, match="outside of the store"):
        backend.plan(AttentionPlan.from_rows([PlanRow([1000], 0, 1)], block_size=16))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"split_tokens": 100}, "multiple of 64"),
        ({"workspace_bytes": 5}, "needs a MiB"),
        ({"v_scale": 0.0}, "v_scale is 0.0"),
    ],
)
def test_options_that_cannot_work_are_refused(changes: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        FlashInferOptions(**changes)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("head_dim", "dtype", "kv_dtype", "block_size", "message"),
    [
        (72, torch.bfloat16, None, 16, "head_dim 64, 128, 256; the model has 72"),
        (64, torch.float32, None, 16, "the model's dtype is torch.float32"),
        (64, torch.bfloat16, torch.float16, 16, "the KV dtype is torch.float16"),
        (64, torch.bfloat16, torch.float8_e4m3fn, 32, "blocks of 16 tokens; the store has 32"),
    ],
)
def test_a_model_that_flashinfer_has_no_code_for_is_refused_at_the_start(
    head_dim: int, dtype: torch.dtype, kv_dtype: torch.dtype | None, block_size: int, message: str
) -> None:
    spec = AttentionSpec(num_q_heads=2, num_kv_heads=1, head_dim=head_dim, num_layers=1)
    paths = Paths(spec, [5], block_size, dtype, kv_dtype=kv_dtype)
    with pytest.raises(FlashInferUnavailable, match=message):
        make(paths, Emulation())


@pytest.mark.parametrize(
    ("installed", "message"),
    [(None, "is not installed"), ("0.7.1", "0.7.1 is installed"), ("0.6.9", "0.6.9")],
)
def test_a_package_that_is_missing_or_of_another_version_is_named(
    monkeypatch: pytest.MonkeyPatch, installed: str | None, message: str
) -> None:
    def version(name: str) -> str:
        if installed is None:
            raise PackageNotFoundError(name)
        return installed

    monkeypatch.setattr(flashinfer_library, "version", version)
    assert message in str(flashinfer_library.why_unavailable())
    with pytest.raises(FlashInferUnavailable, match=message):
        flashinfer_library.load_flashinfer()


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what is missing on machines without a GPU")
def test_without_a_gpu_the_backend_says_why_and_names_the_way_out() -> None:
    paths = Paths(SMALL, [5], dtype=torch.bfloat16)
    with pytest.raises(FlashInferUnavailable, match='use the "cpu" backend'):
        make_backend("flashinfer", SMALL, paths.store())
