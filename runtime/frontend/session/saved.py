"""A session as JSON: its messages, with the token ids of what the model wrote. KV is not part of it: it comes back when needed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from phloem.runtime.errors import InvalidRequest
from phloem.runtime.frontend.session.messages import Message, ToolCall, Turn

if TYPE_CHECKING:
    from phloem.runtime.engine import Engine

FORMAT, VERSION = "phloem-session", 1


def session_to_dict(system: str | None, turns: Sequence[Turn]) -> dict[str, Any]:
    """Return a session as plain data, good for JSON."""
    return {
        "format": FORMAT,
        "version": VERSION,
        "system": system,
        "turns": [
            {"num_dropped": turn.num_dropped, "messages": [_message_to_dict(each) for each in turn.messages]}
            for turn in turns
        ],
    }


def session_from_dict(state: object, engine: Engine) -> tuple[str | None, tuple[Turn, ...]]:
    """Return the system text and the turns that `session_to_dict` described.

    Raises:
        InvalidRequest: It is not such a description, or its tokens are not those of this model's tokenizer.
    """
    if not isinstance(state, Mapping) or state.get("format") != FORMAT or state.get("version") != VERSION:
        raise InvalidRequest(f"this is no {FORMAT} of version {VERSION}", field="state")
    system, turns = state.get("system"), state.get("turns")
    _require(system is None or isinstance(system, str), "system", "must be a text or null")
    _require(isinstance(turns, list), "turns", "must be a list")
    return system, tuple(
        _turn_from_dict(turn, f"turns[{index}]", index, engine) for index, turn in enumerate(turns or ())
    )


def _turn_from_dict(state: object, field: str, index: int, engine: Engine) -> Turn:
    _require(isinstance(state, Mapping), field, "must be a mapping")
    assert isinstance(state, Mapping)
    dropped, messages = state.get("num_dropped"), state.get("messages")
    _require(
        type(dropped) is int and 0 <= dropped <= index, f"{field}.num_dropped", f"must be from 0 to {index}"
    )
    _require(isinstance(messages, list) and bool(messages), f"{field}.messages", "must be a list of some")
    return Turn(
        tuple(
            _message_from_dict(each, f"{field}.messages[{number}]", engine)
            for number, each in enumerate(messages or ())
        ),
        num_dropped=dropped or 0,
    )


def _message_to_dict(message: Message) -> dict[str, Any]:
    plain: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.token_ids is not None:
        plain["token_ids"] = list(message.token_ids)
    if message.name is not None:
        plain["name"] = message.name
    if message.tool_calls:
        plain["tool_calls"] = [
            {"name": call.name, "arguments": dict(call.arguments), "problem": call.problem}
            for call in message.tool_calls
        ]
    return plain


def _message_from_dict(state: object, field: str, engine: Engine) -> Message:
    _require(isinstance(state, Mapping), field, "must be a mapping")
    assert isinstance(state, Mapping)
    known = {"role", "content", "token_ids", "name", "tool_calls"}
    _require(set(state) <= known, field, f"has unknown keys: {', '.join(map(str, set(state) - known))}")
    role, content, name = state.get("role"), state.get("content"), state.get("name")
    _require(role in ("user", "assistant", "tool"), f"{field}.role", "must be user, assistant or tool")
    _require(isinstance(content, str), f"{field}.content", "must be a text")
    _require(name is None or isinstance(name, str), f"{field}.name", "must be a text")
    calls = state.get("tool_calls", [])
    _require(isinstance(calls, list), f"{field}.tool_calls", "must be a list")
    return Message(
        role=str(role),
        content=str(content),
        token_ids=_ids_from(state.get("token_ids"), str(content), f"{field}.token_ids", engine),
        tool_calls=tuple(_call_from_dict(call, f"{field}.tool_calls") for call in calls),
        name=name,
    )


def _ids_from(ids: object, content: str, field: str, engine: Engine) -> tuple[int, ...] | None:
    if ids is None:
        return None
    vocab_size = engine.model.vocab_size
    good = isinstance(ids, list) and all(type(each) is int and 0 <= each < vocab_size for each in ids)
    _require(good, field, f"must be token ids from 0 to {vocab_size - 1}")
    assert isinstance(ids, list)
    # A first space may be missing where there is no context. Another model's ids would give another text.
    _require(
        engine.tokenizer.decode(ids).lstrip() == content.lstrip(),
        field,
        "are not the tokens of the content: the session was saved with another model, or edited",
    )
    return tuple(ids)


def _call_from_dict(state: object, field: str) -> ToolCall:
    good = isinstance(state, Mapping) and set(state) == {"name", "arguments", "problem"}
    _require(good, field, "must have name, arguments and problem")
    assert isinstance(state, Mapping)
    name, arguments, problem = state["name"], state["arguments"], state["problem"]
    _require(isinstance(name, str) and isinstance(arguments, dict), field, "must have a name and arguments")
    _require(problem is None or isinstance(problem, str), field, "must have a text or null as problem")
    return ToolCall(name, arguments, problem)


def _require(condition: bool, field: str, what: str) -> None:
    if not condition:
        raise InvalidRequest(f"{field} {what}", field=field)
