"""The engine as it runs on a GPU, over an emulated FlashInfer: graphs, cascades, determinism. No GPU needed."""

from collections import Counter
from pathlib import Path

import pytest
import torch
from emulated_gpu import EmulatedEngine, emulated_gpu
from tiny_model import make_tiny_model

from phloem.runtime import Completion, Engine, SamplingParams
from phloem.runtime.step_forward import bucket_sizes

GREEDY = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True, logprobs=2)
NEAR_TIE = 0.4
"""In the logarithm: two steps of bfloat16 at the size of these logits."""
PREFIX = [(7 * i) % 256 for i in range(300)]
FAMILY = [[*PREFIX, child, 3 * child, 5] for child in range(1, 13)]
STRANGERS = [list(range(first, first + 20 + 3 * first)) for first in range(12)]


@pytest.fixture(scope="module")
def gpu_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model with heads that FlashInfer has code for."""
    return make_tiny_model(
        tmp_path_factory.mktemp("models") / "gpu", hidden=192, num_q_heads=6, num_kv_heads=2, head_dim=64
    )


def on_cpu(path: Path, prompts: list[list[int]]) -> list[Completion]:
    with Engine(path, device="cpu", dtype="bfloat16", num_blocks=256) as engine:
        return engine.generate(prompts, GREEDY)


def assert_same_up_to_ties(given: list[Completion], wanted: list[Completion]) -> None:
    """Every token equal, or the first that is not a close call."""
    for ours, theirs in zip(given, wanted, strict=True):
        for index, (a, b) in enumerate(zip(ours.token_ids, theirs.token_ids, strict=True)):
            if a != b:
                (_, best), (_, second) = theirs.logprobs[index].top
                assert best - second < NEAR_TIE, f"token {index} is {a}, not {b}"
                break


@pytest.mark.parametrize("graphs", [True, False], ids=["graphs", "eager"])
def test_the_tokens_are_those_of_the_cpu_backend(gpu_model: Path, graphs: bool) -> None:
    with emulated_gpu(gpu_model, graphs=graphs, fused=False) as engine:
        done = engine.generate(STRANGERS, GREEDY)
        runs = Counter(engine.emulation.runs)
    assert_same_up_to_ties(done, on_cpu(gpu_model, STRANGERS))
    assert runs["graph decode" if graphs else "decode"] > 20
    assert runs["prefill"] > 0


def test_graphs_change_no_token(gpu_model: Path) -> None:
    found = []
    for graphs in (True, False):
        with emulated_gpu(gpu_model, graphs=graphs, max_running=7) as engine:
            found.append([done.token_ids for done in engine.generate(STRANGERS, GREEDY)])
    assert found[0] == found[1]


def test_a_family_decodes_over_its_prefix_once(gpu_model: Path) -> None:
    with emulated_gpu(gpu_model, fused=False) as engine:
        done = engine.generate(FAMILY, GREEDY)
        assert engine.emulation.runs.count("merge") >= 2 * (GREEDY.max_tokens - 1)
        assert sum(each.usage.cached_tokens for each in done) >= 11 * 288
    assert_same_up_to_ties(done, on_cpu(gpu_model, FAMILY))


def test_b31_warm_equals_cold_in_deterministic_mode_bit_for_bit(gpu_model: Path) -> None:
    """Although the emulated arithmetic depends on tiles, splits and company, as FlashInfer's does."""
    params = SamplingParams(max_tokens=6, temperature=0, ignore_eos=True, logprobs=3)
    prompts = [*FAMILY[:4], *STRANGERS[:4]]
    with emulated_gpu(gpu_model, deterministic=True, noise=True, max_step_tokens=50) as engine:
        engine.generate(FAMILY[0][:123], params)
        warm = engine.generate(prompts, params)
        assert sum(each.usage.cached_tokens for each in warm) > 900
    for prompt, together in zip(prompts, warm, strict=True):
        with emulated_gpu(
            gpu_model, deterministic=True, noise=True, graphs=False, prefix_cache=False
        ) as engine:
            [alone] = engine.generate(prompt, params)
        assert (together.token_ids, together.logprobs) == (alone.token_ids, alone.logprobs)


def test_branches_score_fork_and_expand(gpu_model: Path) -> None:
    with (
        emulated_gpu(gpu_model) as engine,
        Engine(gpu_model, device="cpu", dtype="bfloat16", num_blocks=256) as cpu,
        engine.branch(PREFIX) as root,
        cpu.branch(PREFIX) as expected,
    ):
        continuations = [[1, 2, 3], [4], [200, 7]]
        for ours, theirs in zip(root.score(continuations), expected.score(continuations), strict=True):
            assert ours.total == pytest.approx(theirs.total, rel=0.02)
        kids = root.expand(3, SamplingParams(max_tokens=5, seed=1, ignore_eos=True))
        assert [kid.completion.usage.cached_tokens for kid in kids[1:]] == [299, 299]
        again = root.expand(3, SamplingParams(max_tokens=5, seed=1, ignore_eos=True))
        assert [kid.token_ids for kid in kids] == [kid.token_ids for kid in again]
        [fork] = kids[0].fork()
        assert fork.generate(GREEDY).usage.cached_tokens >= 303
        for branch in (*kids, *again, fork):
            branch.release()


def test_a_pool_that_is_too_small_for_all_preempts_and_loses_nothing(gpu_model: Path) -> None:
    params = SamplingParams(max_tokens=40, temperature=0, ignore_eos=True)
    with emulated_gpu(gpu_model, num_blocks=12) as engine:
        started = [engine.stream(prompt, params) for prompt in STRANGERS[:6]]
        done = [generation.result() for generation in started]
        assert engine.stats().preemptions > 0
    assert [len(each.token_ids) for each in done] == [40] * 6


def test_no_path_ever_gets_the_block_that_padding_writes_to(gpu_model: Path) -> None:
    with emulated_gpu(gpu_model, num_blocks=24) as engine:
        engine.generate(STRANGERS, GREEDY)
        assert engine.stats().cache.evictions > 0
        for plan in engine.plans:
            plan.check(24)
            assert engine.padding_block == 24
            assert engine.padding_block not in plan.kv_indices.tolist()


def test_sampled_tokens_are_those_of_the_same_draws(gpu_model: Path) -> None:
    """A child re-run alone gives the same, in any batch and bucket."""
    params = SamplingParams(max_tokens=8, temperature=1.0, top_k=40, top_p=0.9, seed=5, n=4, ignore_eos=True)
    with emulated_gpu(gpu_model) as engine:
        first = [done.token_ids for done in engine.generate(STRANGERS[3], params)]
        crowd = engine.generate([STRANGERS[3], *STRANGERS[5:9]], params)
    assert first == [done.token_ids for done in crowd[:4]]
    assert len({tuple(ids) for ids in first}) == 4


def test_a_failed_step_does_not_end_the_engine(gpu_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> torch.Tensor:
        raise RuntimeError("out of memory, say")

    with emulated_gpu(gpu_model) as engine:
        with monkeypatch.context() as patch:
            patch.setattr(engine._core.loop.runner.forward.forward, "run", broken)
            with pytest.raises(Exception, match="out of memory, say"):
                engine.generate(STRANGERS[0], GREEDY)
        assert len(engine.generate(STRANGERS[0], GREEDY)[0].token_ids) == 12
        engine._core.loop._failed_steps = 0


@pytest.mark.parametrize(
    ("max_rows", "sizes"),
    [
        (1, [1]),
        (3, [1, 2, 3]),
        (8, [1, 2, 4, 8]),
        (20, [1, 2, 4, 8, 16, 20]),
        (64, [1, 2, 4, *range(8, 65, 8)]),
    ],
)
def test_buckets_end_at_the_largest_batch(max_rows: int, sizes: list[int]) -> None:
    assert bucket_sizes(max_rows) == sizes


def test_the_emulated_engine_is_an_engine(gpu_model: Path) -> None:
    with emulated_gpu(gpu_model) as engine:
        assert isinstance(engine, EmulatedEngine)
        assert len(list(engine.stream("hello", SamplingParams(max_tokens=3, ignore_eos=True)))) > 0
