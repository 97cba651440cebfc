"""Rows of one step that begin alike compute their common tokens once, and hang on each other in nothing else."""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from stepping import Stepper

from phloem.radix import Namespace
from phloem.runtime import Engine, EngineStats, StepFailed
from phloem.runtime.batch import Batch
from phloem.runtime.branch import Branch, Score, _score
from phloem.runtime.generation import QueueSink
from phloem.runtime.path import Path as TokenPath
from phloem.runtime.request import Phase, Request


def ids(count: int, *, start: int = 0) -> list[int]:
    return [(7 * n + start) % 240 for n in range(count)]


def led(batch: Batch) -> list[int]:
    return [row.num_led for row in batch.rows]


def family(stepper: Stepper, length: int, continuations: Sequence[Sequence[int]]) -> list[Request]:
    """Requests that score continuations of a path which is computed up to its end; blocks are of 4 tokens."""
    stepper.add(ids(length), max_tokens=1)
    stepper.run()
    parent = stepper.add_on(TokenPath(Namespace(), packed(length)), [], max_tokens=0)
    stepper.run()
    forks = [stepper.paths.fork(parent.path, length) for _ in continuations]
    return [
        stepper.add_on(fork, list(each), max_tokens=0, scored_from=length - 1, name=f"child {index}")
        for index, (fork, each) in enumerate(zip(forks, continuations, strict=True))
    ]


def packed(length: int) -> array[int]:
    return array("i", ids(length))


@pytest.mark.parametrize("length", [1, 6, 7, 8, 9])
def test_the_end_of_a_path_is_computed_once_for_continuations_of_one_step(length: int) -> None:
    stepper = Stepper(num_blocks=64)
    children = family(stepper, length, [[1, 2], [3, 4], [5], [6, 7]])
    batch = stepper.step()
    assert led(batch) == [0, 1, 1, 1]
    assert batch.num_tokens == 1 + 3, "the end, and of each continuation all but its last token"
    assert [child.cached_tokens for child in children] == [length - 1, length, length, length]
    assert [stepper.scored[child.id] for child in children] == [2, 2, 1, 2]


def test_continuations_that_begin_alike_share_what_they_begin_with_too() -> None:
    stepper = Stepper(num_blocks=64, block_size=16)
    family(stepper, 6, [[1, 2, 3, 4], [1, 2, 9, 9], [1, 7, 8], [1, 2, 9, 5]])
    assert led(stepper.step()) == [0, 3, 2, 4]


def test_what_a_step_has_no_room_for_computes_the_end_again() -> None:
    stepper = Stepper(num_blocks=64, max_running=2)
    family(stepper, 6, [[1, 2], [3, 4], [5, 6], [7, 8]])
    assert [led(stepper.step()), led(stepper.step())] == [[0, 1], [0, 1]]


def test_a_cut_row_leads_no_further_than_it_goes() -> None:
    stepper = Stepper(num_blocks=64, block_size=16, max_step_tokens=5)
    family(stepper, 6, [[1, 2, 3, 4], [1, 2, 3, 9]])
    assert led(stepper.step()) == [0, 1]
    stepper.run()


def test_rows_that_sample_are_led_by_none_and_lead_none() -> None:
    stepper = Stepper(num_blocks=64)
    family(stepper, 6, [[1, 2]])
    stepper.add(ids(6))
    stepper.add(ids(6))
    assert led(stepper.step()) == [0, 0, 0]


def test_equal_tokens_of_other_namespaces_are_no_twins() -> None:
    stepper = Stepper(num_blocks=64, block_size=16)
    for salt in ("a", "b", "a"):
        path = TokenPath(Namespace(salt=salt), packed(9))
        stepper.add_on(path, [], max_tokens=0, name=salt)
    assert led(stepper.step()) == [0, 0, 8]


def test_the_same_tokens_after_another_block_are_no_twins() -> None:
    stepper = Stepper(num_blocks=64)
    paths = [TokenPath(Namespace(), packed(1)) for _ in range(2)]
    for first, path in enumerate(paths):
        stepper.add_on(path, [first, 5, 6], max_tokens=0)
        stepper.run()
    for path in paths:
        stepper.add_on(path, [7, 8, 9], max_tokens=0, scored_from=4)
    assert led(stepper.step()) == [0, 0]


@dataclass
class Scoring:
    """A score of a branch whose path is computed, and what it cost."""

    scores: list[Score]
    before: EngineStats
    after: EngineStats


def score(engine: Engine, root: Branch, continuations: list[list[int]]) -> Scoring:
    root.next_token_logprobs(top=1)
    before = engine.stats()
    return Scoring(root.score(continuations), before, engine.stats())


CONTINUATIONS = [[1, 2, 3, 4], [5, 6, 7, 8], [1, 2, 9, 9], [10], [11, 12]]


@pytest.mark.parametrize("length", [1, 15, 16, 17, 31, 32, 47])
def test_a_score_is_one_step_and_has_the_bits_of_each_continuation_alone_without_a_cache(
    tiny_path: Path, tiny_engine: Engine, length: int
) -> None:
    with tiny_engine.branch(ids(length)) as root:
        found = score(tiny_engine, root, CONTINUATIONS)
        again = root.score(CONTINUATIONS)
        followed = root.append(CONTINUATIONS[0]).next_token_logprobs(top=3)
    assert found.after.steps - found.before.steps == 1
    # The end; three of the first, three, one more after [1, 2], none, one.
    assert found.after.computed_tokens - found.before.computed_tokens == 1 + 3 + 3 + 1 + 0 + 1
    assert again == found.scores
    with Engine(tiny_path, dtype="float32", num_blocks=64, prefix_cache=False) as cold:
        for continuation, mine in zip(CONTINUATIONS, found.scores, strict=True):
            with cold.branch(ids(length)) as root:
                assert root.score([continuation])[0].token_logprobs == mine.token_logprobs
        with cold.branch(ids(length) + CONTINUATIONS[0]) as root:
            assert root.next_token_logprobs(top=3) == followed


def poison(engine: Engine, monkeypatch: pytest.MonkeyPatch, token_id: int) -> None:
    """Let the numbers of a token go wrong from now on."""
    decoder = type(engine._core.loop.runner.decoder)
    forward = decoder.forward

    def poisoned(self: object, token_ids: torch.Tensor, *args: object) -> torch.Tensor:
        return torch.where((token_ids == token_id)[:, None], math.nan, forward(self, token_ids, *args))

    monkeypatch.setattr(decoder, "forward", poisoned)


@pytest.mark.parametrize("sick", [0, 1, 3])
def test_a_continuation_whose_numbers_go_wrong_fails_alone_also_when_it_leads(
    tiny_engine: Engine, monkeypatch: pytest.MonkeyPatch, sick: int
) -> None:
    continuations = [[n, n + 20, n + 40] for n in range(1, 5)]
    with tiny_engine.branch(ids(20)) as root:
        right = root.score(continuations)
        tiny_engine.clear_cache()
        continuations[sick][1] = 249
        poison(tiny_engine, monkeypatch, 249)
        with pytest.raises(StepFailed, match="NaN"):
            root.score(continuations)
        ended = wait_for_children(root, continuations)
        monkeypatch.undo()
        assert [index for index, each in enumerate(ended) if isinstance(each, StepFailed)] == [sick]
        for index, each in enumerate(ended):
            assert index == sick or each == right[index]
        del continuations[sick], right[sick]
        assert root.score(continuations) == right


def wait_for_children(root: Branch, continuations: list[list[int]]) -> list[Score | StepFailed]:
    """Score all together, and tell how each came out."""
    children = root._score_children(continuations, QueueSink)
    root.fan_out(children)
    ended: list[Score | StepFailed] = []
    for child in children:
        try:
            ended.append(_score(root._result(child)))
        except StepFailed as error:
            ended.append(error)
    return ended


def test_an_end_whose_numbers_go_wrong_fails_all_that_read_it_and_nobody_else(
    tiny_engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    with tiny_engine.branch([*ids(20), 249]) as root, tiny_engine.branch(ids(21)) as other:
        right = root.score([[1, 2], [3, 4]]), other.score([[1, 2]])
        poison(tiny_engine, monkeypatch, 249)
        assert all(isinstance(each, StepFailed) for each in wait_for_children(root, [[1, 2], [3, 4]]))
        assert other.score([[1, 2]]) == right[1]
        monkeypatch.undo()
        assert root.score([[1, 2], [3, 4]]) == right[0], "nothing of it was kept"


def test_a_row_goes_on_when_the_one_that_led_it_has_ended_and_its_blocks_are_others() -> None:
    stepper = Stepper(num_blocks=24, max_step_tokens=24)
    children = family(stepper, 7, [ids(9, start=n) for n in (100, 120, 140)])
    assert led(stepper.step()) == [0, 1, 1]
    assert [child.phase for child in children] == [Phase.FINISHED, Phase.FINISHED, Phase.RUNNING]
    for child in children[:2]:
        stepper.paths.release(child.path)
    stepper.paths.clear()
    stepper.add(ids(48, start=200))
    stepper.run()  # reads nothing that is not there, or not its own
    assert stepper.scored[children[2].id] == 9


def test_preempted_leaders_and_followers_come_to_their_scores(tiny_path: Path) -> None:
    continuations = [ids(30, start=n) for n in range(0, 60, 10)]
    with Engine(tiny_path, dtype="float32", num_blocks=64) as engine, engine.branch(ids(20)) as root:
        right = root.score(continuations)
    with (
        Engine(tiny_path, dtype="float32", num_blocks=9, max_step_tokens=24) as engine,
        engine.branch(ids(20)) as root,
    ):
        assert root.score(continuations) == right
        engine.check()
