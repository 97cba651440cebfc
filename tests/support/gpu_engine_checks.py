"""What must hold of an engine on a GPU. Run over the emulated one everywhere, and over the real one where there is a GPU."""

from __future__ import annotations

import gc
import itertools
import math
import random
import statistics
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path

import pytest
from comparison import Report
from programs import Limits, run_program
from stepped_engine import Lab

from phloem.runtime import Completion, Engine, SamplingParams

MakeEngine = Callable[..., AbstractContextManager[Engine]]
"""Of a model's path and settings of `EngineConfig`."""

GREEDY = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True, logprobs=2)
NEAR_TIE = 0.4
"""In the logarithm, where operations are the same ones: two steps of bfloat16 at the size of these logits."""
FUSED_TIE = 1.0
"""Where FlashInfer's norms and activation, which round once, compute beside torch's: a tiny random model amplifies that."""
MEDIAN_ERROR = 0.1
"""Of log-probabilities. Emulated fused operations give 0.05; attention that is wrong by a tenth gives 0.2 and more."""
PREFIX = [(7 * i) % 256 for i in range(300)]
FAMILY = [[*PREFIX, child, 3 * child, 5] for child in range(1, 13)]
STRANGERS = [list(range(first, first + 20 + 3 * first)) for first in range(12)]


def on_cpu(path: Path, prompts: list[list[int]]) -> list[Completion]:
    with Engine(path, device="cpu", dtype="bfloat16", num_blocks=256) as engine:
        return engine.generate(prompts, GREEDY)


def assert_same_up_to_ties(
    given: Sequence[Completion], wanted: Sequence[Completion], tie: float = NEAR_TIE
) -> None:
    """Every token equal, or the first that is not a close call; log-probabilities close until there."""
    errors = []
    for ours, theirs in zip(given, wanted, strict=True):
        for index, (a, b) in enumerate(zip(ours.token_ids, theirs.token_ids, strict=True)):
            (_, best), (_, second) = theirs.logprobs[index].top
            assert a == b or best - second < tie, f"token {index} is {a}, not {b}"
            found = dict(ours.logprobs[index].top)
            errors += [abs(found[id_] - value) for id_, value in theirs.logprobs[index].top if id_ in found]
            if a != b:
                break
    assert statistics.median(errors) < MEDIAN_ERROR


def check_greedy_tokens_are_the_cpus(make: MakeEngine, path: Path) -> None:
    for prompts in (STRANGERS, FAMILY):
        with make(path) as engine:
            done = engine.generate(prompts, GREEDY)
        assert_same_up_to_ties(done, on_cpu(path, prompts), FUSED_TIE)


def check_switches_change_no_token(make: MakeEngine, path: Path, prompts: list[list[int]], name: str) -> None:
    """A setting on and off: the same tokens up to ties."""
    found = []
    for value in (True, False):
        with make(path, **{name: value}) as engine:
            found.append(engine.generate(prompts, GREEDY))
    assert_same_up_to_ties(*found, FUSED_TIE)


def check_warm_equals_cold(make: MakeEngine, path: Path) -> None:
    """In deterministic mode, bit for bit: chunked, batched, cached and in graphs against alone, at once and eager."""
    params = SamplingParams(max_tokens=6, temperature=0, ignore_eos=True, logprobs=3)
    prompts = [*FAMILY[:4], *STRANGERS[:4]]
    with make(path, deterministic=True, max_step_tokens=50) as engine:
        engine.generate(FAMILY[0][:123], params)
        warm = engine.generate(prompts, params)
        assert sum(each.usage.cached_tokens for each in warm) > 900
    with make(path, deterministic=True, cuda_graphs=False, prefix_cache=False) as engine:
        for prompt, together in zip(prompts, warm, strict=True):
            [alone] = engine.generate(prompt, params)
            assert (together.token_ids, together.logprobs) == (alone.token_ids, alone.logprobs)


def check_branches(make: MakeEngine, path: Path) -> None:
    """Scores are the CPU's within tolerance; children draw the same again; a fork hits to the token."""
    draws = SamplingParams(max_tokens=5, seed=1, ignore_eos=True)
    with (
        make(path) as engine,
        Engine(path, device="cpu", dtype="bfloat16", num_blocks=256) as cpu,
        engine.branch(PREFIX) as root,
        cpu.branch(PREFIX) as expected,
    ):
        continuations = [[1, 2, 3], [4], [200, 7]]
        for ours, theirs in zip(root.score(continuations), expected.score(continuations), strict=True):
            assert ours.total == pytest.approx(theirs.total, rel=0.02)
        kids = root.expand(3, draws)
        assert [kid.completion.usage.cached_tokens for kid in kids[1:]] == [299, 299]
        [fork] = kids[0].fork()
        assert fork.generate(GREEDY).usage.cached_tokens >= 303
        for branch in (*kids, fork):
            branch.release()


def run_programs(lab: Lab, limits: Limits, *, seconds: float, at_least: int) -> Report:
    """Run random programs until the time is up; each checks every invariant after every step, and every bit."""
    total, ends_at = Report(), time.monotonic() + seconds
    for seed in itertools.count(1):
        if seed > at_least and time.monotonic() > ends_at:
            return total
        print(f"program {seed}")  # what pytest shows of a failure
        total.add(run_program(lab, seed, limits))
        gc.collect()  # engines' memory on a device, which is in cycles of references
    raise AssertionError("endless")


def check_crowd(make: MakeEngine, path: Path, *, seconds: float, num_threads: int = 4) -> int:
    """Threads generate, abort, fork and release at random on a small pool; what ends has the tokens that it has alone.

    Returns:
        How many answers were compared.
    """
    prompts = [*FAMILY[:6], *STRANGERS[:6]]
    params = SamplingParams(max_tokens=20, temperature=0, ignore_eos=True)
    with make(path, deterministic=True, prefix_cache=False) as engine:
        alone = [done.token_ids for done in engine.generate(prompts, params)]
    errors: list[BaseException] = []
    counts = [0] * num_threads
    with make(path, deterministic=True, num_blocks=64) as engine:

        def work(number: int) -> None:
            draw, ends_at = random.Random(number), time.monotonic() + seconds
            try:
                while time.monotonic() < ends_at and not errors:
                    which = draw.randrange(len(prompts))
                    counts[number] += _one_of_a_crowd(engine, draw, prompts[which], alone[which], params)
                    engine.check()
            except BaseException as error:
                errors.append(error)

        threads = [threading.Thread(target=work, args=(number,)) for number in range(num_threads)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if errors:
            raise errors[0]
        stats = engine.stats()
        assert stats.cache.locked == stats.cache.private - stats.kept_tails == 0
        assert stats.running == stats.waiting == stats.failed_steps == 0
    return sum(counts)


def _one_of_a_crowd(
    engine: Engine, draw: random.Random, prompt: list[int], alone: list[int], params: SamplingParams
) -> int:
    """Do one random thing; return how many answers were compared."""
    kind = draw.choice(["generate", "abort", "branch", "clear"])
    if kind == "generate":
        [done] = engine.generate(prompt, params)
        assert done.token_ids == alone
        return 1
    if kind == "abort":
        generation = engine.stream(prompt, params)
        for _ in zip(range(draw.randrange(4)), generation, strict=False):
            pass
        generation.abort()
        done = generation.result()
        assert done.token_ids == alone[: len(done.token_ids)]
        return 1
    if kind == "branch":
        with engine.branch(prompt) as root:
            first = root.fork()[0]
            done = first.generate(params)
            middle = first.at(len(prompt) + draw.randrange(1, 10))
            [total] = (score.total for score in middle.score([[1, 2]]))
            middle.release()
            first.release()
            assert done.token_ids == alone
            assert math.isfinite(total)
        return 1
    if draw.random() < 0.2:
        engine.clear_cache()
    return 0
