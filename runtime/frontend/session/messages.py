"""What a session is made of: messages, tool calls and their results, turns. Frozen: they are shared between forks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from phloem.radix import Explanation
from phloem.runtime.outputs import Completion, FinishReason, Usage


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A function that the model asks for."""

    name: str
    arguments: Mapping[str, Any] = field(default_factory=dict)
    problem: str | None = None
    """Why it can't be made: what the model wrote is no sound call. None when it can."""


@dataclass(frozen=True, slots=True)
class ToolResult:
    """What a call gave."""

    call: ToolCall
    content: str
    """What the model is told: a string as it is, anything else as JSON."""

    is_error: bool = False


@dataclass(frozen=True, slots=True)
class Message:
    """One message of a conversation."""

    role: str
    content: str
    token_ids: tuple[int, ...] | None = None
    """What the model generated, without the token that ended it; `content` is a view of it. None for all other messages."""

    tool_calls: tuple[ToolCall, ...] = ()
    """Found in `content`, where they stand as the model wrote them."""

    name: str | None = None
    """The tool whose result this is."""

    def to_dict(self) -> dict[str, Any]:
        """Return it in the form that chat APIs use, without token ids."""
        plain: dict[str, Any] = {"role": self.role, "content": self.content}
        if self.tool_calls:
            plain["tool_calls"] = [
                {"type": "function", "function": {"name": call.name, "arguments": dict(call.arguments)}}
                for call in self.tool_calls
            ]
        if self.name is not None:
            plain["name"] = self.name
        return plain


@dataclass(frozen=True, slots=True)
class Turn:
    """What the user said, and all that came of it until the model's last answer."""

    messages: tuple[Message, ...]
    completions: tuple[Completion, ...] = ()
    """One for each time that the model answered: more than one when it called tools. Empty in a session that was loaded."""

    tool_results: tuple[ToolResult, ...] = ()
    num_dropped: int = 0
    """How many of the session's oldest turns had been left out of the prompt by then."""

    rewritten_tokens: int = 0
    """Tokens of earlier turns that had to be computed again, because the template or an overflow put others before them."""

    pinned_tokens: int = 0
    """How many of the first tokens a lease keeps in the cache."""

    @property
    def text(self) -> str:
        """The model's last answer."""
        return self.messages[-1].content

    @property
    def finish_reason(self) -> FinishReason | None:
        """Why the last answer ended; None in a session that was loaded."""
        return self.completions[-1].finish_reason if self.completions else None

    @property
    def pending_calls(self) -> tuple[ToolCall, ...]:
        """Calls of the last answer, which were not made: the turn was cut short, or had its number of rounds."""
        return self.messages[-1].tool_calls

    @property
    def usage(self) -> Usage:
        """Of all completions together."""
        each = [completion.usage for completion in self.completions]
        return Usage(
            prompt_tokens=sum(usage.prompt_tokens for usage in each),
            cached_tokens=sum(usage.cached_tokens for usage in each),
            completion_tokens=sum(usage.completion_tokens for usage in each),
        )

    @property
    def explanation(self) -> Explanation | None:
        """Of the first completion: what of the conversation so far was cached, and why the rest was not."""
        return self.completions[0].explanation if self.completions else None


def messages_of(turns: Iterable[Turn]) -> list[Message]:
    """Return the messages of several turns, in order."""
    return [message for turn in turns for message in turn.messages]
