"""Branches that are used, left or lent out at awkward moments: a typed error, no block lost, nobody else hurt."""

import asyncio
import gc
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from phloem.runtime import (
    Branch,
    Cancelled,
    Completion,
    Engine,
    EngineClosed,
    InvalidRequest,
    PromptTooLong,
    SamplingParams,
    StepFailed,
)
from phloem.runtime.generation import Generation, Item, QueueSink

S = SamplingParams
ENDLESS = S(max_tokens=None, ignore_eos=True, temperature=0)
SHORT = S(max_tokens=3, ignore_eos=True, temperature=0)


@contextmanager
def halted(engine: Engine) -> Iterator[threading.Event]:
    """Hold the engine between two steps, until the event that this gives is set, or to the end."""
    go = threading.Event()
    engine._core.loop._post(go.wait)
    try:
        yield go
    finally:
        go.set()


@pytest.fixture
def narrow_engine(tiny_path: Path) -> Iterator[Engine]:
    with Engine(tiny_path, dtype="float32", num_blocks=64, max_model_len=100) as engine:
        yield engine
        engine.check()
        stats = engine.stats()
        assert stats.failed_steps == 0
        assert stats.cache.locked == stats.cache.private - stats.kept_tails == 0


def grown_before(monkeypatch: pytest.MonkeyPatch, branch: Branch, generation: Generation) -> None:
    """Let a generation on the branch end after an expansion or a score looked at its length, and before it starts."""
    fan_out = Branch.fan_out

    def late(self: Branch, children: object) -> None:
        generation.result()
        fan_out(self, children)

    monkeypatch.setattr(Branch, "fan_out", late)
    assert len(branch) < 100


@pytest.mark.parametrize("tokens", [9, 10, None])
def test_children_of_a_branch_that_grew_meanwhile_stay_within_the_context(
    narrow_engine: Engine, monkeypatch: pytest.MonkeyPatch, tokens: int | None
) -> None:
    with narrow_engine.branch([1] * 80) as branch:
        generation = branch.stream(S(max_tokens=11, ignore_eos=True))
        grown_before(monkeypatch, branch, generation)
        [kid] = branch.expand(1, S(max_tokens=tokens, ignore_eos=True))
        assert len(kid) == min(100, 91 + (tokens or 100))
        kid.release()


def test_a_branch_that_grew_full_meanwhile_is_refused(
    narrow_engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    for use in (
        lambda branch: branch.expand(2, ENDLESS),
        lambda branch: branch.score([[1, 2]]),
        lambda branch: branch.next_token_logprobs(),
        lambda branch: list(narrow_engine.expand_many([branch], 2, ENDLESS)),
    ):
        with narrow_engine.branch([1] * 80) as branch, monkeypatch.context() as patch:
            generation = branch.stream(ENDLESS)
            grown_before(patch, branch, generation)
            with pytest.raises(PromptTooLong, match="100 tokens"):
                use(branch)


def test_children_that_start_while_they_are_dropped_lose_no_block(tiny_engine: Engine) -> None:
    runner = tiny_engine._core.loop.runner
    run, entered, go = runner.run, threading.Event(), threading.Event()

    def slow(batch: object) -> object:
        entered.set()
        go.wait()
        return run(batch)

    async def cancel_while_the_path_is_computed() -> None:
        task = asyncio.create_task(branch.aexpand(2, SHORT))
        await asyncio.to_thread(entered.wait)
        task.cancel()
        await asyncio.wait([task])
        go.set()

    with tiny_engine.branch([1] * 40) as branch:
        runner.run = slow
        asyncio.run(cancel_while_the_path_is_computed())
        runner.run = run


def test_a_child_that_fails_in_an_expansion_loses_no_block(
    tiny_engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = tiny_engine._core.loop.runner
    steps, run = [], runner.run

    def failing(batch: object) -> object:
        steps.append(batch)
        if len(steps) == 3:
            raise RuntimeError("the third step fails")
        return run(batch)

    monkeypatch.setattr(runner, "run", failing)
    with tiny_engine.branch([1] * 40) as branch, tiny_engine.expansion() as expansion:
        expansion.add(branch, 2, SHORT)
        with pytest.raises(StepFailed):
            next(iter(expansion))


def test_who_has_seen_the_end_of_a_generation_may_go_on_at_once(
    tiny_engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    still_running = []
    put = QueueSink.put

    def watched(sink: QueueSink, item: Item) -> None:
        if not isinstance(item, Exception) and item.completion is not None:
            still_running.append(len(tiny_engine._core.loop.scheduler.running))
        put(sink, item)

    monkeypatch.setattr(QueueSink, "put", watched)
    with tiny_engine.branch("abc") as branch:
        for _ in range(3):
            branch.generate(SHORT)
        tiny_engine.generate("abc", SHORT)
    assert still_running == [0] * 4


def test_a_branch_can_be_gone_on_from_right_after_an_abort(tiny_engine: Engine) -> None:
    async def leave_and_go_on(branch: Branch) -> Completion:
        async with await branch.asubmit(ENDLESS) as generation:
            await anext(aiter(generation))
        return await branch.agenerate(SHORT)

    with tiny_engine.branch("abc") as branch:
        for _ in range(5):
            with branch.stream(ENDLESS) as generation:
                next(iter(generation))
            assert branch.generate(SHORT).finish_reason == "length"
            assert asyncio.run(leave_and_go_on(branch)).finish_reason == "length"


def test_branches_of_another_engine_are_refused(tiny_engine: Engine, tiny_path: Path) -> None:
    with (
        Engine(tiny_path, dtype="float32", num_blocks=64) as other,
        other.branch([1] * 40) as branch,
        tiny_engine.branch([1] * 40) as own,
    ):
        with pytest.raises(InvalidRequest, match=r"branches\[1\].*another engine"):
            tiny_engine.expand_many([own, branch], 2, SHORT)
        with pytest.raises(InvalidRequest, match="another engine"), tiny_engine.expansion() as expansion:
            expansion.add(branch, 2, SHORT)

        async def expand() -> None:
            async for _ in tiny_engine.aexpand_many([own, branch], 2, SHORT):
                pass

        with pytest.raises(InvalidRequest, match=r"branches\[1\].*another engine"):
            asyncio.run(expand())
        other.check()


def test_what_is_no_list_of_branches_or_continuations_is_refused(tiny_engine: Engine) -> None:
    with tiny_engine.branch([1] * 4) as branch:
        for bad in (None, 5, branch, [branch, None], ["text"], (each for each in [branch])):
            with pytest.raises(InvalidRequest, match="branches"):
                tiny_engine.expand_many(bad, 2, SHORT)
        for bad in (None, 5, "text", b"text", {"a"}, {"a": 1}, [], (each for each in [[1]])):
            with pytest.raises(InvalidRequest, match="continuations"):
                branch.score(bad)
        with pytest.raises(InvalidRequest, match="index"):
            branch.at(None)


def test_after_the_engine_closed_every_use_says_so(tiny_path: Path) -> None:
    engine = Engine(tiny_path, dtype="float32", num_blocks=64)
    idle, busy = engine.branch([1] * 4), engine.branch([2] * 4)
    generation = busy.stream(ENDLESS)
    engine.close()
    with pytest.raises(EngineClosed):
        generation.result()
    for branch in (idle, busy, idle, busy):
        with pytest.raises(EngineClosed):
            branch.generate(SHORT)


@pytest.mark.parametrize("is_async", [False, True])
def test_a_generation_that_failed_keeps_nothing_of_its_caller_alive(
    tiny_engine: Engine, is_async: bool
) -> None:
    """The error's traceback refers to the caller's frame, and so to the branch, which is to be released when that ends."""

    def call() -> "weakref.ref[Branch]":
        branch = tiny_engine.branch([1] * 40)
        branch.generate(SHORT)
        with pytest.raises(Cancelled):
            tiny_engine.generate([1] * 40, SHORT, timeout_s=1e-9)
        return weakref.ref(branch)

    async def acall() -> "weakref.ref[Branch]":
        branch = tiny_engine.branch([1] * 40)
        await branch.agenerate(SHORT)
        with pytest.raises(Cancelled):
            await tiny_engine.agenerate([1] * 40, SHORT, timeout_s=1e-9)
        return weakref.ref(branch)

    branch = asyncio.run(acall()) if is_async else call()
    for _ in range(2):  # an asynchronous generator in a cycle takes two
        gc.collect()
    assert branch() is None


def test_a_lease_that_is_over_is_not_counted_by_an_idle_engine(tiny_engine: Engine) -> None:
    with tiny_engine.branch([1] * 40) as branch:
        assert branch.pin(ttl=0.001) == 32
    with halted(tiny_engine) as go:
        threading.Timer(0.01, go.set).start()
        assert tiny_engine.stats().cache.pinned == 0
