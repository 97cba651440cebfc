"""The engine as it runs on a GPU, over an emulated FlashInfer: graphs, cascades, determinism. No GPU needed."""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from emulated_gpu import EmulatedEngine, emulated_gpu, emulated_rig
from gpu_engine_checks import (
    FAMILY,
    GREEDY,
    STRANGERS,
    assert_same_up_to_ties,
    check_branches,
    check_crowd,
    check_greedy_tokens_are_the_cpus,
    check_switches_change_no_token,
    check_warm_equals_cold,
    on_cpu,
    run_programs,
)
from programs import Limits
from stepped_engine import Lab

from phloem.runtime import Engine, SamplingParams
from phloem.runtime.step_forward import bucket_sizes


@contextmanager
def like_a_gpu(path: Path, *, cuda_graphs: bool = True, **options: Any) -> Iterator[Engine]:
    """Takes the settings of an engine. Deterministic ones cope with arithmetic that depends on tiles, splits and company."""
    noise = options.get("deterministic") is True
    with emulated_gpu(path, graphs=cuda_graphs, noise=noise, **options) as engine:
        yield engine


@pytest.mark.parametrize("graphs", [True, False], ids=["graphs", "eager"])
def test_the_tokens_are_those_of_the_cpu_backend(gpu_model: Path, graphs: bool) -> None:
    with emulated_gpu(gpu_model, graphs=graphs, fused=False) as engine:
        done = engine.generate(STRANGERS, GREEDY)
        runs = Counter(engine.emulation.runs)
    assert_same_up_to_ties(done, on_cpu(gpu_model, STRANGERS))
    assert runs["graph decode" if graphs else "decode"] > 20
    assert runs["prefill"] > 0


@pytest.mark.parametrize(("name", "prompts"), [("cuda_graphs", STRANGERS), ("cascades", FAMILY)])
def test_switches_change_no_token(gpu_model: Path, name: str, prompts: list[list[int]]) -> None:
    check_switches_change_no_token(like_a_gpu, gpu_model, prompts, name)


def test_without_cascades_nothing_is_merged(gpu_model: Path) -> None:
    with emulated_gpu(gpu_model, cascades=False) as engine:
        engine.generate(FAMILY, GREEDY)
        assert "merge" not in engine.emulation.runs


def test_a_family_decodes_over_its_prefix_once(gpu_model: Path) -> None:
    with emulated_gpu(gpu_model, fused=False) as engine:
        done = engine.generate(FAMILY, GREEDY)
        assert engine.emulation.runs.count("merge") >= 2 * (GREEDY.max_tokens - 1)
        assert sum(each.usage.cached_tokens for each in done) >= 11 * 288
    assert_same_up_to_ties(done, on_cpu(gpu_model, FAMILY))


def test_greedy_tokens_are_the_cpus(gpu_model: Path) -> None:
    check_greedy_tokens_are_the_cpus(like_a_gpu, gpu_model)


def test_b31_warm_equals_cold_in_deterministic_mode_bit_for_bit(gpu_model: Path) -> None:
    check_warm_equals_cold(like_a_gpu, gpu_model)


def test_b31_random_programs_in_deterministic_mode(gpu_model: Path) -> None:
    lab = Lab(gpu_model, dtype=torch.bfloat16, num_threads=1, rig=emulated_rig())
    report = run_programs(lab, Limits(longest=60, num_actions=20), seconds=0, at_least=4)
    assert report.cached_tokens > 200
    assert report.compared > 20
    assert min(report.scores, report.shared_tails, report.rows_copied, report.aborts) > 0


def test_a_crowd_on_a_small_pool_gets_what_each_gets_alone(gpu_model: Path) -> None:
    assert check_crowd(like_a_gpu, gpu_model, seconds=4, num_threads=3) > 3


def test_branches_score_fork_and_expand(gpu_model: Path) -> None:
    check_branches(like_a_gpu, gpu_model)


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
    # so hot that children meet by no chance, whatever the rounding
    params = SamplingParams(max_tokens=16, temperature=3.0, top_k=40, top_p=0.9, seed=5, n=4, ignore_eos=True)
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
