"""Tools of a session: schemas from signatures, calls as models write them, results appended, faults told to whom they belong."""

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import pytest
from chat_models import TEMPLATES, make_chat_model

from phloem.runtime import Engine, Grammar, InvalidRequest, PromptTooLong, SamplingParams, ToolFailed
from phloem.runtime.frontend.session import Session, Toolbox, ToolCall
from phloem.runtime.frontend.session.tools import calls_in

SAMPLED = SamplingParams(temperature=1, seed=5, max_tokens=12, ignore_eos=True)
FORCED = SamplingParams(temperature=1, seed=5, max_tokens=140, ignore_eos=True)


def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: The first.
        b: The second.
    """
    return a + b


def colour(name: Literal["red", "blue"], dark: bool | None = None) -> dict[str, Any]:
    """Look up a colour.

    Args:
        name: Its name.
        dark: Whether it is dark.
    """
    return {"name": name, "dark": dark, "é": "ü"}


def broken(x: bool) -> str:
    """Fail.

    Args:
        x: Nothing.
    """
    raise KeyError(f"no {x}")


async def slow(x: bool) -> str:
    """Wait.

    Args:
        x: Nothing.
    """
    await asyncio.sleep(0)
    return f"waited {x}"


BOX = Toolbox([add, colour, broken, slow])


def written(name: str, arguments: dict[str, Any]) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def always(text: str) -> SamplingParams:
    return SamplingParams(grammar=Grammar.choice([text]), logprobs=0)


@pytest.fixture
def session(tiny_engine: Engine) -> Iterator[Session]:
    with tiny_engine.session(system="be brief", tools=[colour], params=FORCED) as session:
        yield session


# Reading calls


@pytest.mark.parametrize(
    ("text", "calls"),
    [
        ("no call", []),
        (written("add", {"a": 1, "b": 2}), [("add", {"a": 1, "b": 2})]),
        ("I will.\n" + written("add", {"a": 1, "b": 2}) * 2, [("add", {"a": 1, "b": 2})] * 2),
        (
            '<tool_call>[{"name": "add", "arguments": {"a": 1, "b": 2}}]</tool_call>',
            [("add", {"a": 1, "b": 2})],
        ),
        ('<tool_call>{"name": "add", "arguments": {"a": 1, "b": 2}}', [("add", {"a": 1, "b": 2})]),
        ('[TOOL_CALLS] [{"name": "add", "arguments": {"a": 1, "b": 2}}]', [("add", {"a": 1, "b": 2})]),
        ('Sure.[TOOL_CALLS]add[ARGS]{"a": 1, "b": 2}', [("add", {"a": 1, "b": 2})]),
        ('[TOOL_CALLS]add[CALL_ID]x12345678[ARGS] {"a": 1, "b": 2}', [("add", {"a": 1, "b": 2})]),
        (
            '[TOOL_CALLS]add[ARGS]{"a": 1, "b": 2}\n[TOOL_CALLS]colour[ARGS]{"name": "red"}',
            [("add", {"a": 1, "b": 2}), ("colour", {"name": "red"})],
        ),
        ('<|python_tag|>{"name": "add", "parameters": {"a": 1, "b": 2}}', [("add", {"a": 1, "b": 2})]),
        ('{"name": "add", "parameters": {"a": 1, "b": 2}}', [("add", {"a": 1, "b": 2})]),
        ('{"name": "Ann", "age": 3}', []),
        ('{"name": "colour"', []),
        (written("colour", {"name": "red", "dark": None}), [("colour", {"name": "red", "dark": None})]),
        (written("colour", {"name": "red", "dark": True}), [("colour", {"name": "red", "dark": True})]),
    ],
)
def test_calls_are_read_in_every_format(text: str, calls: list[tuple[str, dict[str, Any]]]) -> None:
    assert BOX.parse(text) == tuple(ToolCall(name, arguments) for name, arguments in calls)
    assert Toolbox().parse(text) == ()


def test_a_mark_inside_of_an_argument_is_text() -> None:
    words = {"word": "[TOOL_CALLS]a[ARGS]{"}
    found = calls_in(f"[TOOL_CALLS]spell[ARGS]{json.dumps(words)}[TOOL_CALLS]add[ARGS]{{}}", ["spell", "add"])
    assert found == [ToolCall("spell", words), ToolCall("add", {})]


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("[TOOL_CALLS]", "the call is no name[ARGS]"),
        ("[TOOL_CALLS]add", "the call is no name[ARGS]"),
        ('[TOOL_CALLS]add[ARGS]{"a": 1', "the call is no name[ARGS]"),
        ("[TOOL_CALLS]add[ARGS]" + '{"a":' * 100_000, "the call is no name[ARGS]"),
        ("[TOOL_CALLS]add[ARGS][1, 2]", "a call is"),
        ("[TOOL_CALLS][ARGS]{}", "the call is no JSON"),
        ('[TOOL_CALLS]sub[ARGS]{"a": 1}', "there is no tool 'sub'"),
        ("<tool_call>" + "[" * 100_000, "the call is no JSON"),
    ],
)
def test_a_call_behind_a_mark_that_is_none_says_why(text: str, problem: str) -> None:
    [call] = BOX.parse(text)
    assert call.problem is not None
    assert problem in call.problem


@pytest.mark.parametrize(
    ("body", "problem"),
    [
        ("{", "the call is no JSON"),
        ("3", "a call is"),
        ('{"name": "add", "arguments": [1, 2]}', "a call is"),
        ('{"name": "sub", "arguments": {}}', "there is no tool 'sub'; there are add, colour"),
        ('{"name": "add", "arguments": {"a": 1}}', "add needs the argument 'b'"),
        ('{"name": "add", "arguments": {"a": 1, "b": 2, "c": 3}}', "add has no argument 'c'; it has a, b"),
        ('{"name": "add", "arguments": {"a": 1, "b": "2"}}', "'b' of add must fit"),
        ('{"name": "add", "arguments": {"a": 1, "b": true}}', "'b' of add must fit"),
        ('{"name": "colour", "arguments": {"name": "green"}}', "'name' of colour must fit"),
    ],
)
def test_a_call_that_can_not_be_made_says_why_and_the_model_is_told(body: str, problem: str) -> None:
    [call] = BOX.parse(f"<tool_call>{body}</tool_call>")
    assert call.problem is not None
    assert problem in call.problem
    result = BOX.run(call)
    assert result.is_error
    assert result.content == call.problem


# Making calls


def test_results_are_text_or_json() -> None:
    assert BOX.run(ToolCall("add", {"a": 1, "b": 2})).content == "3"
    assert BOX.run(ToolCall("colour", {"name": "red"})).content == '{"name": "red", "dark": null, "é": "ü"}'


def test_a_tool_that_raises_is_named_with_its_line() -> None:
    with pytest.raises(
        ToolFailed, match=r"broken\(x=True\) raised KeyError: 'no True' \(.*test_session_tools.py:\d+\)"
    ) as caught:
        BOX.run(ToolCall("broken", {"x": True}))
    assert isinstance(caught.value.__cause__, KeyError)
    assert caught.value.call == ToolCall("broken", {"x": True})
    told = Toolbox([broken], errors="tell").run(ToolCall("broken", {"x": True}))
    assert (told.content, told.is_error) == ("KeyError: 'no True'", True)


def test_coroutine_functions_run_in_an_event_loop_only() -> None:
    call = ToolCall("slow", {"x": True})
    assert asyncio.run(BOX.arun(call)).content == "waited True"
    assert asyncio.run(BOX.arun(ToolCall("add", {"a": 1, "b": 2}))).content == "3"
    with pytest.raises(InvalidRequest, match="use asay"):
        BOX.run(call)


def undescribed(x: int) -> int:
    return x


def untyped(x) -> int:  # type: ignore[no-untyped-def]
    """Do it.

    Args:
        x: Something.
    """
    return int(x)


@pytest.mark.parametrize(
    ("functions", "options", "field"),
    [
        ([undescribed], {}, "tools[0]"),
        ([add, untyped], {}, "tools[1]"),
        ([add, 3], {}, "tools[1]"),
        (add, {}, "tools"),
        ([add, add], {}, "tools"),
        ([add], {"max_rounds": 0}, "max_rounds"),
        ([add], {"errors": "hide"}, "errors"),
    ],
)
def test_what_can_not_be_a_tool_is_named(functions: Any, options: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        Toolbox(functions, **options)
    assert caught.value.field == field


# In a session


def test_a_required_call_is_made_and_its_result_appended(session: Session) -> None:
    turn = session.say("what is 1 + 2?", tool_choice="required")
    [result] = turn.tool_results
    [call] = turn.messages[1].tool_calls
    assert call == result.call
    assert call.problem is None
    assert not result.is_error
    assert [message.role for message in turn.messages] == ["user", "assistant", "tool", "assistant"]
    assert len(turn.completions) == 2
    assert [m["role"] for m in session.messages] == ["system", "user", "assistant", "tool", "assistant"]
    assert session.messages[2]["tool_calls"][0]["function"]["name"] == call.name
    assert session.messages[3] == {"role": "tool", "content": result.content, "name": call.name}
    assert turn.messages[2].content.encode() in bytes(min(each, 255) for each in session.token_ids)


def test_every_round_reuses_all_of_the_one_before(session: Session) -> None:
    turn = session.say("what is 1 + 2?", tool_choice="required")
    first, second = (completion.usage for completion in turn.completions)
    never_computed = len("}\n</tool_call>") + 1  # the grammar forced the end, so no step ran for it
    assert second.cached_tokens == first.prompt_tokens + first.completion_tokens - never_computed
    before = session.token_ids
    assert session.say("and", tool_choice="none").usage.cached_tokens == len(before) - 1
    assert turn.usage.prompt_tokens == first.prompt_tokens + second.prompt_tokens


def test_the_model_is_told_of_its_tools(session: Session, tmp_path: Path) -> None:
    assert not session.template.shows_tools
    session.say("hello", tool_choice="none")
    text = bytes(min(each, 255) for each in session.token_ids)
    assert text.count(b'"name": "colour", "description": "Look up a colour."') == 1
    assert text.index(b"be brief") < text.index(b"<tools>")
    with (
        Engine(make_chat_model(tmp_path / "m", TEMPLATES["tools"]), num_blocks=64) as engine,
        engine.session(tools=[add], params=SAMPLED) as other,
    ):
        assert other.template.shows_tools
        other.say("hello", tool_choice="none")
        text = bytes(min(each, 255) for each in other.token_ids)
        assert b"<tools>" not in text
        assert text.count(b"Add two numbers.") == 1
        other.say("hello", tool_choice="required", params=FORCED)
        before = other.token_ids
        assert other.say("and", tool_choice="none").usage.cached_tokens == len(before) - 1
        text = bytes(min(each, 255) for each in other.token_ids)
        assert text.count(b'{"name": "add", "arg') == 1, (
            "as the model wrote it, and not once more by the template"
        )


def test_a_template_without_a_tool_role_hears_results_from_the_user(tmp_path: Path) -> None:
    two = written("add", {"a": 1, "b": 2}) + written("add", {"a": 3, "b": 4})
    with (
        Engine(
            make_chat_model(
                tmp_path / "m", TEMPLATES["refuses"].replace("not in ('user', 'assistant')", "== 'tool'")
            ),
            num_blocks=128,
        ) as engine,
        engine.session(tools=Toolbox([add], max_rounds=1), params=always(two)) as session,
    ):
        assert not session.template.takes_tool_results
        turn = session.say("hello")
        assert [result.content for result in turn.tool_results] == ["3", "7"]
        text = bytes(min(each, 255) for each in session.token_ids)
        assert b"user\n<tool_response>\n3\n</tool_response>\n<tool_response>\n7\n</tool_response>" in text


def test_rounds_end(tiny_engine: Engine) -> None:
    call = written("add", {"a": 1, "b": 2})
    with tiny_engine.session(tools=Toolbox([add], max_rounds=2), params=always(call)) as session:
        turn = session.say("hello")
        assert len(turn.completions) == 3
        assert [result.content for result in turn.tool_results] == ["3", "3"]
        assert turn.pending_calls == (ToolCall("add", {"a": 1, "b": 2}),)
        assert session.say("stop", params=SAMPLED).pending_calls == ()


def read(x: bool) -> str:
    """Read a page.

    Args:
        x: Which.
    """
    return "page " * 60


def test_a_result_that_does_not_fit_undoes_the_turn(tiny_path: Path) -> None:
    call = written("read", {"x": True})
    with (
        Engine(tiny_path, num_blocks=64, max_model_len=620) as engine,
        engine.session(tools=[read], params=SAMPLED) as session,
    ):
        session.say("a", tool_choice="none")
        locked = engine.stats().cache.locked
        with pytest.raises(PromptTooLong, match="the context is 620") as caught:
            session.say("read", params=always(call))
        assert engine.stats().cache.locked == locked, "freed at once, though the traceback lives"
        assert caught.value.field == "text"
        assert len(session.turns) == 1


def test_a_result_that_fills_the_context_drops_the_oldest_turns(tiny_path: Path) -> None:
    call = written("read", {"x": True})
    with (
        Engine(tiny_path, num_blocks=128, max_model_len=1200) as engine,
        engine.session(
            tools=Toolbox([read], max_rounds=1), params=SAMPLED, overflow="drop_oldest"
        ) as session,
    ):
        for letter in "ab":
            session.say(letter * 200, tool_choice="none")
        turn = session.say("read", params=always(call))
        assert turn.num_dropped == 2
        assert [m["role"] for m in session.messages] == ["user", "assistant", "tool", "assistant"]
        assert len(session.token_ids) <= 1200
        assert b"bbb" not in bytes(min(each, 255) for each in session.token_ids)


def test_a_call_that_is_wrong_is_told_to_the_model(tiny_engine: Engine) -> None:
    call = written("sub", {"a": 1})
    with tiny_engine.session(tools=Toolbox([add], max_rounds=1), params=always(call)) as session:
        [result] = session.say("hello").tool_results
        assert result.is_error
        assert "there is no tool 'sub'; there are add" in session.messages[2]["content"]


@pytest.mark.parametrize("is_async", [False, True])
def test_a_turn_whose_tool_raises_has_not_been(tiny_engine: Engine, is_async: bool) -> None:
    with tiny_engine.session(tools=[broken], params=SAMPLED) as session:
        session.say("hello", tool_choice="none")
        ids = session.token_ids
        params = always(written("broken", {"x": True}))
        say = (
            (lambda: asyncio.run(session.asay("go", params=params).result()))
            if is_async
            else (lambda: session.say("go", params=params))
        )
        with pytest.raises(ToolFailed, match="raised KeyError"):
            say()
        assert session.token_ids == ids
        assert len(session.turns) == 1
        assert session.say("on", tool_choice="none").usage.cached_tokens >= len(ids) - 1


def test_async_tools_in_a_turn(tiny_engine: Engine) -> None:
    with tiny_engine.session(tools=[slow], params=FORCED) as session:
        turn = asyncio.run(session.asay("hello", tool_choice="required").result())
        assert turn.tool_results[0].content.startswith("waited")
        with pytest.raises(InvalidRequest, match="use asay"):
            session.say("hello", tool_choice="required")
        assert session.turns == (turn,)


def test_required_and_a_grammar_exclude_each_other(session: Session) -> None:
    with pytest.raises(InvalidRequest, match="grammar of its own"):
        session.say("hello", params=always("x"), tool_choice="required")


def test_an_aborted_turn_calls_nothing(tiny_engine: Engine) -> None:
    call = written("add", {"a": 1, "b": 2})
    with tiny_engine.session(tools=[add], params=always(call)) as session:
        stream = session.say("hello", stream=True)
        pieces = []
        for piece in stream:
            pieces.append(piece)
            if len(pieces) == len(call) // 2:
                stream.abort()
        assert stream.turn.tool_results == ()
        assert len(stream.turn.completions) == 1
        assert "".join(pieces) == stream.turn.text


def test_a_tool_that_is_interrupted_is_not_called_again(tiny_engine: Engine) -> None:
    called = []

    def wait(x: bool) -> str:
        """Wait for the user.

        Args:
            x: Nothing.
        """
        called.append(x)
        raise KeyboardInterrupt

    with tiny_engine.session(tools=[wait], params=always(written("wait", {"x": True}))) as session:
        stream = session.say("hello", stream=True)
        with pytest.raises(KeyboardInterrupt):
            list(stream)
        stream.abort()
        list(stream)
        assert called == [True]
        assert [result.content for result in stream.turn.tool_results] == ["not called: the turn was aborted"]
        assert session.turns == (stream.turn,)


def test_an_async_turn_that_a_tool_aborts_calls_no_other(tiny_engine: Engine) -> None:
    called = []

    async def leave(x: int) -> str:
        """End the turn.

        Args:
            x: A number.
        """
        called.append(x)
        stream.abort()
        return "bye"

    calls = always("".join(written("leave", {"x": x}) for x in range(3)))
    with tiny_engine.session(tools=[leave], params=calls) as session:
        stream = session.asay("hello")
        turn = asyncio.run(stream.result())
        assert called == [0]
        assert [each.content for each in turn.tool_results] == [
            "bye",
            *["not called: the turn was aborted"] * 2,
        ]
        assert session.turns == (turn,)


def test_tool_calls_survive_saving(tiny_engine: Engine, session: Session) -> None:
    session.say("what is 1 + 2?", tool_choice="required")
    with Session.from_dict(tiny_engine, session.to_dict(), tools=[colour], params=FORCED) as loaded:
        assert loaded.messages == session.messages
        ids = session.token_ids
        assert loaded.say("and", tool_choice="none").usage.cached_tokens >= len(ids) // 16 * 16
