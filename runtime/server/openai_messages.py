"""The messages and tools of OpenAI's chats.

In messages, unknown fields are ignored, unlike elsewhere: clients send back what they were given, with whatever their SDK adds to it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from phloem.runtime.chat_messages import content_text
from phloem.runtime.server.chat_prompt import Call, ChatMessage
from phloem.runtime.server.errors import invalid

_ROLES = {"developer": "system", "function": "tool"}


class CalledFunction(BaseModel):
    """What a message's tool call calls."""

    model_config = ConfigDict(strict=True)

    name: str
    arguments: str = ""


class MessageCall(BaseModel):
    """A tool call in a message."""

    model_config = ConfigDict(strict=True)

    id: str = ""
    type: Literal["function"] = "function"
    function: CalledFunction


class Message(BaseModel):
    """A message of a conversation; its content is text, or parts that are text."""

    model_config = ConfigDict(strict=True)

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: str | list[dict[str, Any]] | None = None
    name: str | None = None
    tool_calls: list[MessageCall] | None = None
    tool_call_id: str | None = None


class Function(BaseModel):
    """A function that the model may call."""

    model_config = ConfigDict(extra="forbid", strict=True)

    name: str = Field(pattern=r"^[a-zA-Z0-9_.\-]{1,64}$")
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(BaseModel):
    """A tool; only functions are known."""

    model_config = ConfigDict(extra="forbid", strict=True)

    type: Literal["function"]
    function: Function


def tool_dict(function: Function) -> dict[str, Any]:
    """Return a tool as templates want it."""
    found: dict[str, Any] = {"name": function.name}
    if function.description:
        found["description"] = function.description
    found["parameters"] = function.parameters or {"type": "object", "properties": {}}
    return {"type": "function", "function": found}


def chat_messages(messages: Sequence[Message]) -> list[ChatMessage]:
    """Return the messages in no protocol's form.

    Raises:
        ApiError: There are none.
        InvalidRequest: A message has no content, or one that is not text.
    """
    if not messages:
        raise invalid("messages is empty; it needs at least one message", "messages")
    names: dict[str, str] = {}
    found = []
    for index, message in enumerate(messages):
        calls = tuple(
            Call.from_json(call.function.name, call.function.arguments, call.id)
            for call in message.tool_calls or ()
        )
        names |= {call.id: call.name for call in calls}
        content = message.content
        if content is None and (calls or message.role == "assistant"):
            content = ""
        role = _ROLES.get(message.role, message.role)
        found.append(
            ChatMessage(
                role,
                content_text(content, f"messages[{index}].content"),
                calls if role == "assistant" else (),
                name=(message.name or names.get(message.tool_call_id or "")) if role == "tool" else None,
                call_id=message.tool_call_id if role == "tool" else None,
            )
        )
    return found
