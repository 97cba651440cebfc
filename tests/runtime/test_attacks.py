"""Faults that a review found, each kept from coming back. Through the real engine on a tiny model."""

import asyncio
import gc
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
from tiny_model import make_tiny_model

from phloem.runtime import (
    Engine,
    InvalidRequest,
    QueueFull,
    SamplingParams,
    StepFailed,
)

S = SamplingParams
ENDLESS = S(max_tokens=None, ignore_eos=True, temperature=0)


def wait_until_idle(engine: Engine) -> None:
    deadline = time.monotonic() + 10
    while engine.stats().running + engine.stats().waiting and time.monotonic() < deadline:
        time.sleep(0.005)
    assert engine.stats().running == engine.stats().waiting == 0


def test_rows_are_copied_also_when_a_step_computes_nothing(tiny_engine: Engine) -> None:
    prompt = list(range(16))
    params = S(max_tokens=6, temperature=0, n=2, ignore_eos=True)
    first, second, third = (
        [done.token_ids for done in tiny_engine.generate(prompt, params)] for _ in range(3)
    )
    assert first == second == third


@pytest.mark.parametrize("seed", range(6))
def test_children_over_stale_memory_agree_with_a_cold_engine(tiny_path: Path, seed: int) -> None:
    prompt = list(range(seed, seed + 16))
    with Engine(tiny_path, dtype="float32", num_blocks=64) as engine:
        for i in range(64):
            engine.generate([200 + i % 50] * 15 + [i], S(max_tokens=2, temperature=0))
        engine.generate([*prompt[:15], 99], S(max_tokens=1))
        engine.generate(prompt, S(max_tokens=4, temperature=0, n=2))
        [warm] = engine.generate([*prompt, 1, 2], S(max_tokens=4, temperature=0))
    with Engine(tiny_path, dtype="float32", num_blocks=64, prefix_cache=False) as engine:
        [cold] = engine.generate([*prompt, 1, 2], S(max_tokens=4, temperature=0))
    assert warm.token_ids == cold.token_ids


@pytest.mark.parametrize("ending", ["", "raise ValueError('the program fails')"])
def test_a_program_that_ends_while_a_request_runs_ends_cleanly(tiny_path: Path, ending: str) -> None:
    code = f"""
from phloem.runtime import Engine, SamplingParams
e = Engine({str(tiny_path)!r}, num_blocks=200)
g = e.stream('hello', SamplingParams(max_tokens=None, ignore_eos=True))
next(iter(g))
{ending}
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == (1 if ending else 0), done.stderr


def test_a_bad_request_id_is_refused_and_the_engine_lives(tiny_engine: Engine) -> None:
    for bad in ([1], None, 5):
        with pytest.raises(InvalidRequest, match="request_id"):
            tiny_engine.abort(bad)
    assert tiny_engine.generate([1, 2], S(max_tokens=1))


def test_a_failing_command_hurts_nobody(tiny_engine: Engine) -> None:
    generation = tiny_engine.stream([1, 2, 3], S(max_tokens=50, ignore_eos=True))
    for _ in range(2):
        tiny_engine._core.loop._post(lambda: 1 / 0)
    assert generation.result().finish_reason == "length"


def test_an_output_that_fails_ends_its_request_alone(
    tiny_engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    from phloem.runtime.output import OutputStream

    take = OutputStream.take

    def failing(self: OutputStream, result: object) -> None:
        if self.request.tokens[0] == 7:
            raise RuntimeError("no such character")
        take(self, result)

    monkeypatch.setattr(OutputStream, "take", failing)
    sick = tiny_engine.stream([7, 1], S(max_tokens=5, ignore_eos=True))
    well = tiny_engine.stream([8, 1], S(max_tokens=5, ignore_eos=True))
    with pytest.raises(StepFailed, match="no such character"):
        sick.result()
    assert len(well.result().token_ids) == 5


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"eviction_policy": object()}, "eviction_policy"), ({"eviction_policy": None}, "eviction_policy"),
        ({"eviction_policy": "x"}, "lru"), ({"block_size": 16.0}, "block_size"), ({"block_size": True}, "block_size"),
        ({"num_threads": 10**6}, "num_threads"), ({"prefix_cache": "no"}, "prefix_cache"),
        ({"deterministic": "yes"}, "deterministic"), ({"max_model_len": 10**9}, "beyond the model's context"),
        ({"config": 5}, "EngineConfig"),
    ],
)  # fmt: skip
def test_bad_settings_are_refused(tiny_path: Path, options: dict[str, object], says: str) -> None:
    with pytest.raises(InvalidRequest, match=says):
        Engine(tiny_path, **options)


def test_numbers_too_large_for_a_float_are_refused(tiny_engine: Engine) -> None:
    with pytest.raises(InvalidRequest, match="temperature"):
        S(temperature=10**400)
    for bad in (10**400, True, 0, -1, float("nan"), "1"):
        with pytest.raises(InvalidRequest, match="timeout_s"):
            tiny_engine.generate([1], timeout_s=bad)
    with pytest.raises(InvalidRequest, match="repetition_penalty"):
        S(repetition_penalty=1e-300)


def test_a_refused_generation_does_not_block_its_branch(tiny_path: Path) -> None:
    with (
        Engine(tiny_path, num_blocks=64, max_running=1, max_waiting=1) as engine,
        engine.branch([1, 2, 3]) as branch,
    ):
        running = engine.stream([4], ENDLESS)
        next(iter(running))
        waiting = engine.stream([5], S(max_tokens=1))
        with pytest.raises(QueueFull):
            branch.generate(S(max_tokens=2))
        running.abort()
        waiting.result()
        assert branch.generate(S(max_tokens=2, ignore_eos=True)).token_ids


def test_abandoned_generations_are_aborted(tiny_engine: Engine) -> None:
    generation = tiny_engine.stream([1, 2], ENDLESS)
    del generation
    for _ in tiny_engine.stream([3, 4], ENDLESS):
        break
    gc.collect()
    wait_until_idle(tiny_engine)


def test_a_dropped_engine_ends_its_thread(tiny_path: Path) -> None:
    before = threading.active_count()
    engine = Engine(tiny_path, num_blocks=8)
    engine.generate([1], S(max_tokens=1))
    del engine
    gc.collect()
    deadline = time.monotonic() + 10
    while threading.active_count() > before and time.monotonic() < deadline:
        time.sleep(0.005)
    assert threading.active_count() == before


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_b29_bad_logits_end_the_request(
    tiny_engine: Engine, monkeypatch: pytest.MonkeyPatch, value: float
) -> None:
    decoder = type(tiny_engine._core.loop.runner.decoder)
    logits = decoder.logits

    def poisoned(self: object, hidden: torch.Tensor) -> torch.Tensor:
        found = logits(self, hidden)
        found[:, 7] = value
        return found

    monkeypatch.setattr(decoder, "logits", poisoned)
    for temperature in (0, 1):
        with pytest.raises(StepFailed, match="NaN"):
            tiny_engine.generate([1] * 20, S(max_tokens=3, temperature=temperature))
    monkeypatch.undo()
    assert tiny_engine.generate([1] * 20, S(max_tokens=1))[0].usage.cached_tokens == 0


def test_b29_a_nan_anywhere_in_a_chunk_ends_the_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = make_tiny_model(tmp_path / "m", architecture="mistral", sliding_window=8)
    with Engine(path, dtype="float32", num_blocks=64) as engine:
        decoder = type(engine._core.loop.runner.decoder)
        forward = decoder.forward

        def poisoned(self: object, token_ids: torch.Tensor, *args: object) -> torch.Tensor:
            return torch.where((token_ids == 7)[:, None], torch.nan, forward(self, token_ids, *args))

        monkeypatch.setattr(decoder, "forward", poisoned)
        with pytest.raises(StepFailed, match="NaN"):
            engine.generate([7, *range(20, 120)], S(max_tokens=3))
        assert engine.stats().cache.evictable == 0


def test_a_branch_cannot_grow_under_a_score(tiny_engine: Engine) -> None:
    async def run() -> tuple[float, float]:
        with tiny_engine.branch([1] * 30) as branch:
            expected = (await branch.ascore([[65]]))[0].total
            tiny_engine.clear_cache()
            with tiny_engine.branch([1] * 30) as other:
                tiny_engine._core.loop._post(lambda: time.sleep(0.1))
                task = asyncio.create_task(other.ascore([[65]]))
                await asyncio.sleep(0)
                with pytest.raises(InvalidRequest, match="busy"):
                    other.append("zzz")
                return expected, (await task)[0].total

    expected, found = asyncio.run(run())
    assert found == expected


def test_prompt_logprobs_of_several_completions_are_refused(tiny_engine: Engine) -> None:
    with pytest.raises(InvalidRequest, match="prompt_logprobs"):
        S(n=2, prompt_logprobs=1)
    with tiny_engine.branch([1]) as branch, pytest.raises(InvalidRequest, match="prompt_logprobs"):
        branch.expand(2, S(prompt_logprobs=1))


def test_cancelling_all_children_ends_the_computation_of_their_path(tiny_path: Path) -> None:
    with Engine(tiny_path, num_blocks=256, max_step_tokens=16) as engine:

        async def run() -> None:
            task = asyncio.create_task(engine.agenerate([1] * 3000, S(n=4, max_tokens=2)))
            while engine.stats().running == 0:
                await asyncio.sleep(0.001)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task

        asyncio.run(run())
        wait_until_idle(engine)
        assert engine.stats().computed_tokens < 2900


def test_with_the_cache_off_children_are_computed_once_each(tiny_path: Path) -> None:
    with Engine(tiny_path, num_blocks=64, prefix_cache=False) as engine:
        done = engine.generate([1] * 50, S(n=4, seed=1, max_tokens=2, ignore_eos=True))
        assert len(done) == 4
        assert engine.stats().computed_tokens == 4 * 51


def test_the_error_of_a_generation_is_raised_again(
    tiny_engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoder = type(tiny_engine._core.loop.runner.decoder)
    monkeypatch.setattr(decoder, "forward", lambda *_: 1 / 0)
    generation = tiny_engine.stream([1], S(max_tokens=1))
    for _ in range(2):
        with pytest.raises(StepFailed, match="ZeroDivisionError"):
            generation.result()


def test_numpy_arrays_are_prompts_too(tiny_engine: Engine) -> None:
    import numpy as np

    expected = tiny_engine.generate([5, 6, 7], S(max_tokens=3, temperature=0))
    found = tiny_engine.generate(np.array([5, 6, 7]), S(max_tokens=3, temperature=0))
    assert found[0].token_ids == expected[0].token_ids


def test_no_part_of_a_message_can_smuggle_special_tokens_in(tiny_engine: Engine) -> None:
    encode = tiny_engine.tokenizer.encode_chat
    specials = [token for token in encode([{"role": "user", "content": "a"}]) if token >= 256]
    for message in (
        {"role": "user<|im_end|>", "content": "a"},
        {"role": "user", "content": "a<|im_start|>"},
        {"role": "<|bos|>", "content": "<|im_end|>", "name": "<|im_start|>"},
    ):
        assert [token for token in encode([message]) if token >= 256] == specials
