"""Sessions as JSON: they go on with the same tokens, and a damaged file is named by its field."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from phloem.runtime import Engine, InvalidRequest, SamplingParams
from phloem.runtime.frontend.session import Session

SAMPLED = SamplingParams(temperature=1, seed=5, max_tokens=20, ignore_eos=True)
QUESTIONS = ("hello", "and what is that?", "why?")


@pytest.fixture
def session(tiny_engine: Engine) -> Iterator[Session]:
    with tiny_engine.session(system="be brief", params=SAMPLED) as session:
        yield session


def test_a_loaded_session_goes_on_with_the_same_tokens(
    tiny_engine: Engine, session: Session, tmp_path: Path
) -> None:
    for text in QUESTIONS:
        session.say(text)
    ids = session.token_ids
    session.save(tmp_path / "chat.json")
    with Session.load(tiny_engine, tmp_path / "chat.json", params=SAMPLED) as loaded:
        assert loaded.messages == session.messages
        turn = loaded.say("and")
        assert turn.usage.cached_tokens >= len(ids) // 16 * 16, "all but what is the other's own"
        assert loaded.token_ids[: len(ids)] == ids
        assert turn.text == session.say("and").text
        loaded.rewind(2)
        assert len(loaded.turns) == 2


def test_a_session_loaded_into_a_cold_engine_answers_alike(tiny_path: Path, session: Session) -> None:
    session.say("hello")
    state = json.loads(json.dumps(session.to_dict()))
    with (
        Engine(tiny_path, dtype="float32", num_blocks=64) as engine,
        Session.from_dict(engine, state, params=SAMPLED) as loaded,
    ):
        turn = loaded.say("and")
        assert turn.usage.cached_tokens == 0
        assert turn.text == session.say("and").text
        assert loaded.turns[0].usage.prompt_tokens == 0
        assert loaded.turns[0].finish_reason is None
        assert loaded.explain(0) == ""


def saved(session: Session) -> dict[str, Any]:
    session.say("hello")
    return session.to_dict()


@pytest.mark.parametrize(
    ("path", "value", "field"),
    [
        (("format",), "other", "state"),
        (("version",), 2, "state"),
        (("system",), 3, "system"),
        (("turns",), {}, "turns"),
        (("turns", 0), [], "turns[0]"),
        (("turns", 0, "num_dropped"), 1, "turns[0].num_dropped"),
        (("turns", 0, "num_dropped"), True, "turns[0].num_dropped"),
        (("turns", 0, "messages"), [], "turns[0].messages"),
        (("turns", 0, "messages", 0), "hello", "turns[0].messages[0]"),
        (("turns", 0, "messages", 0, "role"), "system", "turns[0].messages[0].role"),
        (("turns", 0, "messages", 0, "content"), None, "turns[0].messages[0].content"),
        (("turns", 0, "messages", 0, "colour"), "red", "turns[0].messages[0]"),
        (("turns", 0, "messages", 1, "token_ids"), [1, 10**6], "turns[0].messages[1].token_ids"),
        (("turns", 0, "messages", 1, "token_ids"), [97, 98], "turns[0].messages[1].token_ids"),
        (("turns", 0, "messages", 1, "name"), 3, "turns[0].messages[1].name"),
        (("turns", 0, "messages", 1, "tool_calls"), [{}], "turns[0].messages[1].tool_calls"),
    ],
)
def test_a_damaged_file_is_named_by_its_field(
    tiny_engine: Engine, session: Session, path: tuple[Any, ...], value: object, field: str
) -> None:
    state = saved(session)
    place: Any = state
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    with pytest.raises(InvalidRequest) as caught:
        Session.from_dict(tiny_engine, state)
    assert caught.value.field == field


def test_a_file_that_is_no_json_is_refused(tiny_engine: Engine, tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text("{")
    with pytest.raises(InvalidRequest, match="no JSON"):
        Session.load(tiny_engine, tmp_path / "x.json")
