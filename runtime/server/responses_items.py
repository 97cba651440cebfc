"""The items that `/v1/responses` takes and gives: messages, calls of functions, and their results."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from phloem.runtime.server.chat_prompt import Call, ChatMessage
from phloem.runtime.server.errors import invalid
from phloem.runtime.server.openai_fields import new_id

_ROLES = {"user": "user", "assistant": "assistant", "system": "system", "developer": "system"}
_TEXT_PARTS = ("input_text", "output_text", "text")


def input_items(given: str | Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return a request's input as items: text is one message of the user's."""
    if isinstance(given, str):
        return [{"type": "message", "role": "user", "content": [{"type": "input_text", "text": given}]}]
    return list(given)


def messages_of(items: Sequence[Mapping[str, Any]], before: Sequence[ChatMessage] = ()) -> list[ChatMessage]:
    """Return the conversation of items after one that is known.

    The calls that follow an assistant's message are part of the same turn. Reasoning is left out.

    Raises:
        ApiError: An item is of an unknown kind, or malformed.
    """
    messages = list(before)
    names = {call.id: call.name for message in before for call in message.calls}
    for index, item in enumerate(items):
        field = f"input[{index}]"
        kind = item.get("type", "message")
        if kind == "message":
            messages.append(_message(item, field))
        elif kind == "function_call":
            call = Call.from_json(
                _text(item, "name", field), _text(item, "arguments", field), _text(item, "call_id", field)
            )
            names[call.id] = call.name
            _add_call(messages, call)
        elif kind == "function_call_output":
            call_id = _text(item, "call_id", field)
            content = _content(item.get("output"), f"{field}.output")
            messages.append(ChatMessage("tool", content, name=names.get(call_id), call_id=call_id))
        elif kind != "reasoning":
            raise invalid(
                f"{field}.type is {kind!r}; known are message, function_call, function_call_output and reasoning",
                f"{field}.type",
            )
    return messages


def _message(item: Mapping[str, Any], field: str) -> ChatMessage:
    role = item.get("role")
    if not isinstance(role, str) or role not in _ROLES:
        raise invalid(f"{field}.role must be one of {', '.join(_ROLES)}, not {role!r}", f"{field}.role")
    return ChatMessage(_ROLES[role], _content(item.get("content"), f"{field}.content"))


def _add_call(messages: list[ChatMessage], call: Call) -> None:
    if messages and messages[-1].role == "assistant":
        last = messages.pop()
        messages.append(ChatMessage("assistant", last.content, (*last.calls, call)))
    else:
        messages.append(ChatMessage("assistant", "", (call,)))


def _text(item: Mapping[str, Any], name: str, field: str) -> str:
    value = item.get(name)
    if not isinstance(value, str):
        raise invalid(f"{field}.{name} must be a string", f"{field}.{name}")
    return value


def _content(content: object, field: str) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise invalid(f"{field} must be a string or a list of text parts", field)
    texts = []
    for index, part in enumerate(content):
        kind = part.get("type") if isinstance(part, dict) else None
        text = part.get("text") if isinstance(part, dict) else None
        if kind not in _TEXT_PARTS or not isinstance(text, str):
            raise invalid(
                f"{field}[{index}] must be a part with text; nothing else is supported", f"{field}[{index}]"
            )
        texts.append(text)
    return "".join(texts)


def text_part(text: str, logprobs: list[dict[str, Any]] | None = None) -> dict[str, Any]:
    """Return the content of a message of the model's."""
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs or []}


def message_item(item_id: str, status: str, content: list[dict[str, Any]]) -> dict[str, Any]:
    """Return a message of the model's."""
    return {"id": item_id, "type": "message", "role": "assistant", "status": status, "content": content}


def call_item(call: Call) -> dict[str, Any]:
    """Return a call of the model's."""
    return {
        "id": new_id("fc_"),
        "type": "function_call",
        "status": "completed",
        "call_id": new_id("call_"),
        "name": call.name,
        "arguments": call.arguments_json,
    }
