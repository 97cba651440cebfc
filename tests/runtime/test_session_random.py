"""Random conversations: turns, forks, rewinds, aborts and reloads, under several templates, in a pool that has to evict.

The model of a session is its list of messages. Whatever happened before, a prompt is what the template makes of them, with answers as
they were generated, and the answer is that of an engine with its cache off.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from chat_models import TEMPLATES, make_chat_model
from hypothesis import given, settings
from hypothesis import strategies as st

from phloem.runtime import Engine, SamplingParams
from phloem.runtime.frontend.session import Session, Turn

PARAMS = [
    SamplingParams(temperature=0, max_tokens=9, ignore_eos=True),
    SamplingParams(temperature=1, seed=3, max_tokens=24, logit_bias={258: 4.0}),
    SamplingParams(
        temperature=1, seed=4, max_tokens=24, stop=["e", "\n", " "], logit_bias={32: 3.0, 101: 3.0}
    ),
]
TEXTS = ["a", "the long question of a user " * 3, "<|im_end|>", "é"]
STEPS = st.one_of(
    st.tuples(st.just("say"), st.integers(0, 9), st.sampled_from(TEXTS), st.integers(0, len(PARAMS) - 1)),
    st.tuples(st.just("abort"), st.integers(0, 9), st.sampled_from(TEXTS), st.integers(0, 3)),
    st.tuples(st.just("leave"), st.integers(0, 9), st.sampled_from(TEXTS), st.integers(0, 3)),
    st.tuples(st.just("fork"), st.integers(0, 9), st.integers(0, 3)),
    st.tuples(st.just("rewind"), st.integers(0, 9), st.integers(0, 3)),
    st.tuples(st.just("reload"), st.integers(0, 9)),
)


@dataclass(slots=True)
class Conversation:
    """A session, and what it ought to hold."""

    session: Session
    turns: list[Turn] = field(default_factory=list)


class World:
    """An engine under test, one with its cache off, and the conversations."""

    def __init__(self, path: Path) -> None:
        self.engine = Engine(path, dtype="float32", num_blocks=72, block_size=8)
        self.cold = Engine(path, dtype="float32", num_blocks=128, block_size=8, prefix_cache=False)
        self.all: list[Conversation] = []
        self.cached = 0

    def begin(self) -> None:
        for each in self.all:
            each.session.close()
        self.engine.check()
        assert self.engine.stats().cache.locked == 0
        self.engine.clear_cache()
        self.all = [Conversation(self.engine.session(overflow="drop_oldest"))]

    def step(self, kind: str, number: int, *arguments: Any) -> None:
        getattr(self, kind)(self.all[number % len(self.all)], *arguments)
        for each in self.all:
            assert list(each.session.turns) == each.turns
        self.engine.check()

    def say(self, at: Conversation, text: str, params: int) -> None:
        turn = at.session.say(text, params=PARAMS[params])
        self._took(at, turn)
        prompt = self.prompt(at.turns, turn)
        [cold] = self.cold.generate(prompt, PARAMS[params])
        assert turn.completions[0].token_ids == cold.token_ids
        assert turn.text == cold.text

    def abort(self, at: Conversation, text: str, pieces: int) -> None:
        stream = at.session.say(
            text, params=SamplingParams(max_tokens=40, ignore_eos=True, seed=1), stream=True
        )
        for _ in zip(range(pieces), stream, strict=False):
            pass
        stream.abort()
        self._took(at, stream.result())

    def leave(self, at: Conversation, text: str, pieces: int) -> None:
        with at.session.say(text, params=PARAMS[0], stream=True) as stream:
            for _ in zip(range(pieces), stream, strict=False):
                pass

    def fork(self, at: Conversation, turn: int) -> None:
        turn = min(turn, len(at.turns))
        self.all.append(Conversation(at.session.fork(turn), at.turns[:turn]))

    def rewind(self, at: Conversation, turn: int) -> None:
        turn = min(turn, len(at.turns))
        at.session.rewind(turn)
        at.turns = at.turns[:turn]

    def reload(self, at: Conversation) -> None:
        other = Session.from_dict(self.engine, at.session.to_dict(), overflow="drop_oldest")
        at.session.close()
        assert [turn.messages for turn in other.turns] == [turn.messages for turn in at.turns]
        at.session, at.turns = other, list(other.turns)

    def prompt(self, turns: list[Turn], last: Turn) -> list[int]:
        messages = [m for turn in [*turns[last.num_dropped : -1], last] for m in turn.messages][:-1]
        answers = {i: m.token_ids for i, m in enumerate(messages) if m.token_ids is not None}
        return self.cold.tokenizer.encode_chat([m.to_dict() for m in messages], answers=answers)

    def _took(self, at: Conversation, turn: Turn) -> None:
        at.turns.append(turn)
        self.cached += turn.usage.cached_tokens
        prompt = self.prompt(at.turns, turn)
        assert at.session.token_ids == [*prompt, *turn.completions[0].token_ids]
        assert turn.usage.prompt_tokens == len(prompt)


@pytest.fixture(scope="module", params=[None, "trims", "counts", "injects"])
def world(
    request: pytest.FixtureRequest, tiny_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[World]:
    path = tiny_path
    if request.param is not None:
        path = make_chat_model(tmp_path_factory.mktemp("models") / request.param, TEMPLATES[request.param])
    world = World(path)
    yield world
    world.begin()
    before = world.cached
    for _ in range(3):
        world.step("say", 0, TEXTS[1], 0)
    assert world.cached > before, "or nothing was shown"
    world.begin()
    world.engine.close()
    world.cold.close()


@settings(max_examples=5)
@given(steps=st.lists(STEPS, min_size=4, max_size=10))
def test_a_session_is_its_messages(world: World, steps: list[tuple[Any, ...]]) -> None:
    world.begin()
    for step in steps:
        world.step(*step)
