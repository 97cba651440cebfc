"""The cpu backends against the oracle, and against themselves: a token's bits don't depend on its company."""

import platform
import shutil
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from attention_paths import KERNELS, TOLERANCE, Chunk, Paths, Twins, at_once, chunked, error
from hypothesis import given, settings
from hypothesis import strategies as st

from phloem.kernels.attention import AttentionSpec, make_backend
from phloem.kernels.cpu import make_cpu_backend
from phloem.kernels.cpu_native import NativeBackend
from phloem.kernels.plan import AttentionPlan, PlanError, PlanRow
from phloem.kernels.reference import ReferenceBackend


def assert_close(paths: Paths, kernel: str, steps: Sequence[Sequence[Chunk]]) -> None:
    given = paths.run(paths.backend(kernel), steps)
    wanted = paths.run(paths.backend("reference"), steps)
    assert error(given, wanted) < TOLERANCE[paths.dtype]


@st.composite
def cases(draw: st.DrawFn) -> tuple[Paths, list[list[Chunk]]]:
    num_kv_heads = draw(st.sampled_from([1, 2, 3]))
    num_layers = draw(st.integers(1, 2))
    windows = draw(st.sampled_from([(None,), (1,), (7,), (100,), (300,)]))
    spec = AttentionSpec(
        num_q_heads=num_kv_heads * draw(st.sampled_from([1, 2, 3, 5, 8])),
        num_kv_heads=num_kv_heads,
        head_dim=draw(st.sampled_from([32, 40, 64, 72, 128, 256])),
        num_layers=num_layers,
        scale=draw(st.sampled_from([None, 0.3])),
        logits_soft_cap=draw(st.sampled_from([None, 3.0])),
        windows=(windows * num_layers)[:num_layers] if windows[0] else (None, 5)[:num_layers],
    )
    lengths = draw(st.lists(st.sampled_from([1, 2, 15, 16, 17, 64, 90, 257, 300]), min_size=1, max_size=4))
    dtype = draw(st.sampled_from([torch.float32, torch.bfloat16]))
    paths = Paths(spec, lengths, draw(st.sampled_from([1, 2, 4, 16, 64])), dtype, draw(st.integers(0, 99)))
    # first all paths up to some token, then prefills, decodes and empty rows side by side
    starts = [draw(st.sampled_from([0, length // 2, length - 1])) for length in lengths]
    first = [(path, 0, start) for path, start in enumerate(starts)]
    second = [
        (path, start, length - start)
        for path, (start, length) in enumerate(zip(starts, lengths, strict=True))
    ]
    return paths, [first, second]


@settings(max_examples=60, deadline=None)
@given(cases())
def test_native_equals_the_reference_on_any_plan(case: tuple[Paths, list[list[Chunk]]]) -> None:
    assert_close(case[0], "native", case[1])


@settings(max_examples=20, deadline=None)
@given(cases())
def test_torch_fallback_equals_the_reference_on_any_plan(case: tuple[Paths, list[list[Chunk]]]) -> None:
    assert_close(case[0], "torch", case[1])


@settings(max_examples=40, deadline=None)
@given(cases(), st.integers(1, 3), st.sampled_from([1, 3, 16, 50]))
def test_native_bits_depend_on_nothing_but_the_path(
    case: tuple[Paths, list[list[Chunk]]], num_threads: int, size: int
) -> None:
    paths, steps = case
    together = paths.run(paths.backend("native"), steps)
    for path, length in enumerate(paths.lengths):
        alone = paths.run(paths.backend("native", num_threads), chunked(length, size, path))
        assert torch.equal(alone[path], together[path])


@pytest.mark.parametrize("kernel", [*KERNELS, "reference"])
@pytest.mark.parametrize("start", [0, 13, 15, 16, 300])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_mirrored_tokens_give_the_bits_of_tokens_computed_apart(
    kernel: str, start: int, dtype: torch.dtype
) -> None:
    spec = AttentionSpec(num_q_heads=6, num_kv_heads=2, head_dim=32, num_layers=2, windows=(None, 3))
    twins = Twins.of(spec, start=start, dtype=dtype)
    together = twins.results(twins.paths.backend(kernel))
    assert all(map(torch.equal, together, twins.wanted(twins.paths.backend(kernel))))


SMALL = AttentionSpec(num_q_heads=9, num_kv_heads=3, head_dim=64, num_layers=1)
SHAPES = {
    "small model": SMALL,
    "one KV head for 71": AttentionSpec(num_q_heads=71, num_kv_heads=1, head_dim=64, num_layers=1),
    "no groups": AttentionSpec(num_q_heads=2, num_kv_heads=2, head_dim=96, num_layers=1),
    "window and cap": AttentionSpec(
        num_q_heads=10, num_kv_heads=2, head_dim=40, num_layers=1, logits_soft_cap=5.0, windows=(70,)
    ),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kernel", KERNELS)
def test_chunking_company_and_threads_change_no_bit(kernel: str, shape: str, dtype: torch.dtype) -> None:
    length = 270 if kernel == "torch" else 700
    paths = Paths(SHAPES[shape], [length, 40, 5], dtype=dtype)
    whole = paths.run(paths.backend(kernel, 2), at_once(paths.lengths))
    assert not any(out.isnan().any() for out in whole)
    # pieces of 1 only at the end: what they attend to is what matters, and the fallback is slow
    steps = {
        "alone": chunked(length, length),
        "1": [[(0, 0, length - 20)]] + [[(0, start, 1)] for start in range(length - 20, length)],
        "7": [[(0, 0, length - 70)]] + [[(0, start, 7)] for start in range(length - 70, length, 7)],
        "16": chunked(length, 16),
        "33": chunked(length, 33),
    }
    for name, step in steps.items():
        for num_threads in (1, 2) if kernel == "native" else (None,):
            cut = paths.run(paths.backend(kernel, num_threads), step)
            assert torch.equal(cut[0], whole[0]), f"chunks of {name}, {num_threads} threads"


@pytest.mark.skipif(
    platform.machine() != "x86_64" or shutil.which("g++") is None, reason="builds for older x86 machines"
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("architecture", ["-march=x86-64", "-march=haswell"])
def test_code_for_older_machines_keeps_the_contract(architecture: str, dtype: torch.dtype) -> None:
    for shape in ("small model", "window and cap"):
        paths = Paths(SHAPES[shape], [300, 40], dtype=dtype)
        together = paths.run(paths.backend(architecture), at_once(paths.lengths))
        assert (
            error(together, paths.run(paths.backend("reference"), at_once(paths.lengths))) < TOLERANCE[dtype]
        )
        alone = paths.run(paths.backend(architecture, 1), chunked(300, 11))
        assert torch.equal(alone[0], together[0])


@pytest.mark.parametrize("kernel", KERNELS)
def test_the_place_of_the_blocks_changes_no_bit(kernel: str) -> None:
    outs = []
    for block_size in (1, 16, 64):
        paths = Paths(SMALL, [300], block_size=block_size)
        outs.append(paths.run(paths.backend(kernel), at_once([300]))[0])
    assert torch.equal(outs[0], outs[1])
    assert torch.equal(outs[0], outs[2])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_spans_shared_out_to_many_threads_change_no_bit(dtype: torch.dtype) -> None:
    """One decode over 12 spans: with 1 thread a thread runs them all, with 8 each is an item of its own."""
    paths = Paths(SMALL, [3000], dtype=dtype)
    steps = [[(0, 0, 2999)], [(0, 2999, 1)]]
    outs = [paths.run(paths.backend("native", threads), steps)[0] for threads in (1, 8)]
    assert torch.equal(outs[0], outs[1])


def test_scores_of_any_size_stay_finite() -> None:
    paths = Paths(SMALL, [600])
    paths.q[0] *= 1e4
    out = paths.run(paths.backend("native"), at_once([600]))[0]
    assert not out.isnan().any()
    # a score of 10,000 has an error of 0.001 in float32, and so have the weights of keys that nearly tie
    assert error([out], paths.run(paths.backend("reference"), at_once([600]))) < 1e-3


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_nan_in_a_later_token_does_not_reach_an_earlier_one(value: float, dtype: torch.dtype) -> None:
    paths = Paths(SMALL, [100], dtype=dtype)
    clean = paths.run(paths.backend("native"), at_once([100]))[0]
    paths.kv[0][60:] = value
    dirty = paths.run(paths.backend("native"), at_once([100]))[0]
    assert torch.equal(dirty[:, :60], clean[:, :60])
    assert not dirty[:, 60:].isfinite().any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_nan_before_the_window_does_not_reach_a_token(dtype: torch.dtype) -> None:
    paths = Paths(replace(SMALL, windows=(20,)), [100], dtype=dtype)
    clean = paths.run(paths.backend("native"), at_once([100]))[0]
    paths.kv[0][:30] = torch.nan
    dirty = paths.run(paths.backend("native"), at_once([100]))[0]
    assert torch.equal(dirty[:, 49:], clean[:, 49:])
    assert dirty[:, :49].isnan().all()


@pytest.mark.parametrize("kernel", KERNELS)
def test_a_plan_for_another_store_is_refused(kernel: str) -> None:
    backend = Paths(SMALL, [20]).backend(kernel)
    with pytest.raises(PlanError, match="outside of the store"):
        backend.plan(AttentionPlan.from_rows([PlanRow([1000], 0, 1)], block_size=16))
    with pytest.raises(PlanError, match="blocks of 8 tokens, the store of 16"):
        backend.plan(AttentionPlan.from_rows([PlanRow([0], 0, 1)], block_size=8))


def test_tensors_that_do_not_fit_the_plan_are_refused() -> None:
    backend = Paths(SMALL, [20]).backend("native")
    backend.plan(AttentionPlan.from_rows([PlanRow([0], 0, 2)], block_size=16))
    with pytest.raises(ValueError, match=r"the plan needs \[2, 9, 64\]"):
        backend.attend(0, torch.zeros(3, 9, 64))
    with pytest.raises(ValueError, match=r"the plan needs \[2, 3, 64\]"):
        backend.append(0, torch.zeros(2, 9, 64), torch.zeros(2, 3, 64))
    with pytest.raises(TypeError, match="float16"):
        backend.attend(0, torch.zeros(2, 9, 64, dtype=torch.float16))
    with pytest.raises(IndexError, match="layer 1 of 1"):
        backend.attend(1, torch.zeros(2, 9, 64))


def test_what_the_compiled_kernel_has_no_code_for_runs_on_torch() -> None:
    paths = Paths(AttentionSpec(num_q_heads=2, num_kv_heads=1, head_dim=36, num_layers=1), [20])
    backend = make_cpu_backend(paths.spec, paths.backend("torch").store)  # type: ignore[attr-defined]
    assert "multiples of 8" in str(backend.build_error)  # type: ignore[union-attr]
    assert (
        error(paths.run(backend, at_once([20])), paths.run(paths.backend("reference"), at_once([20]))) < 1e-5
    )


def test_backends_are_made_by_name() -> None:
    paths = Paths(SMALL, [20])
    store = paths.backend("reference").store  # type: ignore[attr-defined]
    assert isinstance(make_backend("reference", SMALL, store), ReferenceBackend)
    assert isinstance(make_backend("cpu", SMALL, store, num_threads=1), NativeBackend)
    with pytest.raises(
        ValueError, match="unknown attention backend 'gpu'; use one of cpu, flashinfer, reference"
    ):
        make_backend("gpu", SMALL, store)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_q_heads": 8}, "no multiple"),
        ({"head_dim": 0}, "head_dim is 0"),
        ({"windows": (None, 3)}, "2 entries for 1 layers"),
        ({"windows": (0,)}, "must be 1 or more"),
        ({"logits_soft_cap": 0.0}, "use None"),
    ],
)
def test_a_spec_that_cannot_run_is_refused(changes: dict[str, object], message: str) -> None:
    fields = {"num_q_heads": 9, "num_kv_heads": 3, "head_dim": 64, "num_layers": 1, **changes}
    with pytest.raises(ValueError, match=message):
        AttentionSpec(**fields)  # type: ignore[arg-type]
