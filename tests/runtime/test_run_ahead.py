"""Decode steps that are launched before the results of those before are known: the same answers, and nothing lost.

Over the emulated GPU, whose steps are done at once; what is tested is that what the host does too early is put right.
"""

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from emulated_gpu import EmulatedEngine, emulated_gpu

from phloem.runtime import Cancelled, SamplingParams, StepFailed
from phloem.runtime.in_flight import InFlight

PROMPTS = [list(range(first, first + 20 + 3 * first)) for first in range(10)]


@pytest.fixture
def engine(gpu_model: Path) -> Iterator[EmulatedEngine]:
    with emulated_gpu(gpu_model) as engine:
        yield engine


def tokens(gpu_model: Path, params: SamplingParams, *, runs_ahead: bool) -> list[list[int]]:
    with emulated_gpu(gpu_model, runs_ahead=runs_ahead, max_running=7, num_blocks=64) as engine:
        done = engine.generate(PROMPTS, params)
        again = engine.generate(PROMPTS[:3], params)
    return [each.token_ids for each in [*done, *again]]


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(max_tokens=20, temperature=0, ignore_eos=True),
        SamplingParams(max_tokens=20, temperature=1.0, seed=3, min_tokens=4),
        SamplingParams(max_tokens=20, temperature=1.0, seed=4, stop_token_ids=tuple(range(0, 256, 9))),
        SamplingParams(max_tokens=20, temperature=1.0, seed=4, stop=("a", "Z", "\\"), top_k=100),
        SamplingParams(max_tokens=9, temperature=0.7, seed=1, n=3, logit_bias={5: 30.0, 9: 30.0}),
        SamplingParams(max_tokens=9, temperature=0, repetition_penalty=1.5, ignore_eos=True),
        SamplingParams(max_tokens=9, temperature=0, logprobs=1, ignore_eos=True),
        SamplingParams(max_tokens=1, temperature=0),
    ],
    ids=["length", "seeded", "stop ids", "stop strings", "children", "penalties", "logprobs", "one token"],
)
def test_running_ahead_changes_no_token(gpu_model: Path, params: SamplingParams) -> None:
    assert tokens(gpu_model, params, runs_ahead=True) == tokens(gpu_model, params, runs_ahead=False)


def test_most_decode_steps_are_launched_ahead(
    engine: EmulatedEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    ahead = []
    launch_after = engine._core.loop._launcher.launch_after
    monkeypatch.setattr(
        engine._core.loop._launcher, "launch_after", lambda *a: ahead.append(1) or launch_after(*a)
    )
    before = engine.stats().steps
    engine.generate(PROMPTS[0], SamplingParams(max_tokens=40, temperature=0, ignore_eos=True))
    # A prefill, a first decode, and then one after the other: no step for nothing at the end, whose length is known.
    assert engine.stats().steps - before == 40
    assert len(ahead) == 38


def test_b24_an_abort_while_a_step_is_in_flight_loses_no_block(engine: EmulatedEngine) -> None:
    params = SamplingParams(max_tokens=200, temperature=0, ignore_eos=True)
    for take in (1, 2, 3, 7):
        generations = [engine.stream(prompt, params) for prompt in PROMPTS[:4]]
        chunks = iter(generations[0])
        for _ in range(take):
            next(chunks)
        for generation in generations:
            generation.abort()
        done = [generation.result() for generation in generations]
        assert {each.finish_reason for each in done} == {"abort"}
        engine.check()


def test_what_an_ended_row_computed_in_vain_is_not_found_by_anybody(gpu_model: Path) -> None:
    """The next turn goes on from exactly the answer, and gets what it gets without running ahead."""
    params = SamplingParams(max_tokens=20, temperature=1.0, seed=4, stop_token_ids=tuple(range(0, 256, 9)))
    found = []
    for runs_ahead in (True, False):
        with emulated_gpu(gpu_model, runs_ahead=runs_ahead) as engine:
            turns = []
            with engine.branch(PROMPTS[5]) as branch:
                for turn in range(6):
                    done = branch.generate(params)
                    [fork] = branch.fork()
                    branch.append([turn + 1])
                    turns.append((done.token_ids, branch.token_ids, fork.token_ids, done.usage))
                    fork.release()
            found.append(turns)
    assert found[0] == found[1]


def test_others_join_and_fork_while_a_step_is_in_flight(engine: EmulatedEngine) -> None:
    long = SamplingParams(max_tokens=150, temperature=0, ignore_eos=True)
    short = SamplingParams(max_tokens=5, temperature=0, ignore_eos=True)
    [alone] = engine.generate(PROMPTS[1], short)
    with engine.branch(PROMPTS[0]) as branch:
        generation = branch.stream(long)
        chunks = iter(generation)
        next(chunks)
        results = []
        threads = [
            threading.Thread(target=lambda: results.extend(engine.generate(PROMPTS[1], short)))
            for _ in range(4)
        ]
        for thread in threads:
            thread.start()
        forks = branch.fork(3)
        for thread in threads:
            thread.join()
        done = generation.result()
        assert len(done.token_ids) == 150
        assert [each.token_ids for each in results] == [alone.token_ids] * 4
        whole = branch.token_ids
        for fork in forks:
            assert whole[: len(fork)] == fork.token_ids, "a fork holds known tokens only"
            fork.release()


def test_a_deadline_passes_while_a_step_is_in_flight(engine: EmulatedEngine) -> None:
    params = SamplingParams(max_tokens=3000, temperature=0, ignore_eos=True)
    with pytest.raises(Cancelled) as caught:
        engine.generate(PROMPTS[0], params, timeout_s=0.3)
    assert len(caught.value.partial.token_ids) > 0
    engine.check()


def test_b29_a_step_that_fails_in_flight_ends_its_requests_alone(
    engine: EmulatedEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    params = SamplingParams(max_tokens=30, temperature=0, ignore_eos=True)
    [good] = engine.generate(PROMPTS[2], params)
    engine.clear_cache()
    for broken in ("results", "launch_after"):
        calls = []

        def fail(*_: object, calls: list[int] = calls) -> object:
            calls.append(1)
            raise RuntimeError("the device is gone")

        with monkeypatch.context() as patch:
            if broken == "results":
                patch.setattr(InFlight, "results", fail)
            else:
                patch.setattr(engine._core.loop._launcher, "launch_after", fail)
            with pytest.raises(StepFailed, match="the device is gone"):
                engine.generate(PROMPTS[2], params)
        assert calls
        engine.check()
        [again] = engine.generate(PROMPTS[2], params)
        assert again.token_ids == good.token_ids
    engine._core.loop._failed_steps = 0


def test_b29_numbers_that_become_nan_in_flight_are_not_reused(engine: EmulatedEngine) -> None:
    decoder = engine._core.loop.runner.decoder
    params = SamplingParams(max_tokens=30, temperature=0, ignore_eos=True)
    [good] = engine.generate(PROMPTS[2], params)
    engine.clear_cache()
    logits, seen = decoder.logits, []

    def sometimes_nan(hidden: torch.Tensor) -> torch.Tensor:
        seen.append(1)
        return logits(hidden) if len(seen) != 5 else torch.full_like(logits(hidden), torch.nan)

    decoder.logits = sometimes_nan
    with pytest.raises(StepFailed, match="NaN"):
        engine.generate(PROMPTS[2], params)
    decoder.logits = logits
    engine.check()
    assert engine.generate(PROMPTS[2], params)[0].token_ids == good.token_ids


def test_a_pool_that_runs_full_in_flight_goes_back_to_the_scheduler(gpu_model: Path) -> None:
    """Deterministic, for a path that resumes is computed in other chunks and company than alone.

    Without it, the fourth prompt's 33rd token parts on a CPU with AVX-512 but no bfloat16, whether or not steps run ahead:
    alone its two best logits are the same bfloat16 number, in the crowd they are one step (0.0625) apart.
    """
    params = SamplingParams(max_tokens=60, temperature=0, ignore_eos=True)
    with emulated_gpu(gpu_model, num_blocks=16, deterministic=True) as engine:
        generations = [engine.stream(prompt, params) for prompt in PROMPTS[:5]]
        done = [generation.result() for generation in generations]
        assert engine.stats().preemptions > 0
    with emulated_gpu(gpu_model, runs_ahead=False, deterministic=True) as engine:
        alone = [engine.generate(prompt, params)[0] for prompt in PROMPTS[:5]]
    assert [each.token_ids for each in done] == [each.token_ids for each in alone]
