"""From Anthropic's messages to a conversation in no protocol's form, and where in it the client set its breakpoints.

Each result of a tool is a message of its own; neighbouring messages of one role become one, as templates want them. Tools stand in the system
message, so that a breakpoint at one of them is one at that message's end. A last message of the assistant's is the beginning of the
answer, and no part of the conversation.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from phloem.runtime.server.anthropic_fields import (
    Block,
    CacheControl,
    PromptFields,
    TextBlock,
    ToolResultBlock,
    ToolUseBlock,
)
from phloem.runtime.server.chat_prompt import Call, ChatMessage, ordered
from phloem.runtime.server.errors import ApiError, invalid

MAX_BREAKPOINTS = 4

TTL_S = {"5m": 300.0, "1h": 3600.0}

# Claude Code begins its system text with such a line, another one in each request, and nothing after it would ever be found again.
_BILLING = re.compile(r"\A(?:x-anthropic-billing-header:[^\n]*(?:\n+|\Z))+", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Breakpoint:
    """The end of what is to be kept in the cache."""

    ttl_s: float
    messages: tuple[ChatMessage, ...] | None
    """The conversation up to it, tools included; None is the whole prompt."""

    cuts_last: bool = False
    """Whether the last message of these goes on behind it."""


@dataclass(frozen=True, slots=True)
class Conversation:
    """What a request asks to be answered."""

    messages: tuple[ChatMessage, ...]
    begun: str
    """What the answer begins with."""

    breakpoints: tuple[Breakpoint, ...]
    """In the order of their places."""


def conversation_of(body: PromptFields) -> Conversation:
    """Return the conversation of a request.

    Raises:
        ApiError: There are no messages, one has a block that its role can't have, or the breakpoints are too many or out of order.
    """
    if not body.messages:
        raise invalid("messages is empty; it needs at least one message", "messages")
    builder = _Builder()
    builder.add_system(body.system or ())
    in_system, builder.marks = builder.marks, []
    for tool in body.tools or ():
        builder.mark(tool.cache_control)
    builder.marks += in_system
    for index, message in enumerate(body.messages):
        builder.add(message.role, message.content, f"messages[{index}]")
    found = builder.finish()
    if body.cache_control is not None:
        found = replace(found, breakpoints=(*found.breakpoints, Breakpoint(_ttl_s(body.cache_control), None)))
    _check(found.breakpoints)
    return found


@dataclass(slots=True)
class _Builder:
    """Owner of a conversation until it is complete."""

    messages: list[ChatMessage] = field(default_factory=list)
    marks: list[Breakpoint] = field(default_factory=list)
    tool_names: dict[str, str] = field(default_factory=dict)
    """By the id of a call."""

    def add_system(self, blocks: Sequence[TextBlock]) -> None:
        for block in blocks:
            text = _BILLING.sub("", block.text)
            if text or not block.text:
                self._add_text("system", text)
                self.mark(block.cache_control)

    def add(self, role: str, blocks: Sequence[Block], name: str) -> None:
        if not blocks and role != "assistant":
            raise invalid(f"{name}.content is empty; it needs at least one block", f"{name}.content")
        if not blocks:
            self._add_text(role, "")
        for index, block in enumerate(blocks):
            if isinstance(block, TextBlock):
                self._add_text(role, block.text)
            elif isinstance(block, ToolUseBlock) and role == "assistant":
                self._add_call(block)
            elif isinstance(block, ToolResultBlock) and role == "user":
                self._add_result(block)
            else:
                raise _misplaced(block, role, f"{name}.content[{index}]")
            self.mark(block.cache_control)

    def mark(self, control: CacheControl | None) -> None:
        if control is not None:
            self.marks.append(Breakpoint(_ttl_s(control), tuple(self.messages)))

    def finish(self) -> Conversation:
        begun = self._pop_begun()
        if not any(message.role != "system" for message in self.messages):
            raise invalid("messages needs a message of the user's", "messages")
        whole = tuple(self.messages)
        return Conversation(whole, begun, tuple(_placed(mark, whole) for mark in self.marks))

    def _pop_begun(self) -> str:
        if self.messages[-1].role != "assistant":
            return ""
        last = self.messages.pop()
        if last.calls:
            raise invalid("the last message calls tools; their results must follow it", "messages")
        if last.content != last.content.rstrip():
            raise invalid(
                "the last message, which the answer goes on from, ends with white space", "messages"
            )
        return last.content

    def _add_text(self, role: str, text: str) -> None:
        if not self.messages or self.messages[-1].role != role:
            self.messages.append(ChatMessage(role, text))
            return
        last = self.messages[-1]
        self.messages[-1] = replace(last, content=f"{last.content}\n{text}" if last.content else text)

    def _add_call(self, block: ToolUseBlock) -> None:
        self.tool_names[block.id] = block.name
        call = Call(block.name, ordered(block.input), block.id)
        if self.messages and self.messages[-1].role == "assistant":
            last = self.messages[-1]
            self.messages[-1] = replace(last, calls=(*last.calls, call))
        else:
            self.messages.append(ChatMessage("assistant", "", (call,)))

    def _add_result(self, block: ToolResultBlock) -> None:
        text = "\n".join(part.text for part in block.content)
        content = f"Error: {text}" if block.is_error else text
        name = self.tool_names.get(block.tool_use_id)
        self.messages.append(ChatMessage("tool", content, name=name, call_id=block.tool_use_id))


def _ttl_s(control: CacheControl) -> float:
    return TTL_S[control.ttl or "5m"]


def _placed(mark: Breakpoint, whole: tuple[ChatMessage, ...]) -> Breakpoint:
    """Return a breakpoint as what it is in the complete conversation."""
    messages = mark.messages
    assert messages is not None
    if len(messages) > len(whole) or messages == whole:
        return Breakpoint(mark.ttl_s, None)
    return replace(mark, cuts_last=bool(messages) and messages[-1] != whole[len(messages) - 1])


def _check(breakpoints: Sequence[Breakpoint]) -> None:
    if len(breakpoints) > MAX_BREAKPOINTS:
        raise invalid(
            f"the request has {len(breakpoints)} blocks with cache_control; at most {MAX_BREAKPOINTS} may have it",
            "cache_control",
        )
    ttls = [each.ttl_s for each in breakpoints]
    if ttls != sorted(ttls, reverse=True):
        raise invalid(
            "a cache_control with ttl 1h comes after one with 5m, in the order of tools, system and messages; longer ones must come first",
            "cache_control",
        )


def _misplaced(block: Block, role: str, name: str) -> ApiError:
    home = "assistant" if isinstance(block, ToolUseBlock) else "user"
    return invalid(
        f"{name} is a {block.type}; messages of role {role} can't have it, only those of {home}", name
    )
