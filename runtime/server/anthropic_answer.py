"""From a finished generation to Anthropic's message: its blocks, why it ended, its usage."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from phloem.runtime.outputs import Completion, Usage
from phloem.runtime.sampling_params import SamplingParams
from phloem.runtime.server.anthropic_cache import usage_dict
from phloem.runtime.server.chat_prompt import Call, ChatPrompt, Prompter
from phloem.runtime.server.openai_fields import new_id
from phloem.runtime.server.prompt_leases import Mark
from phloem.runtime.server.tool_calls import ReadAnswer, read_answer


@dataclass(frozen=True, slots=True)
class MessageAnswer:
    """What is known of a message before it is generated, and how it is made after."""

    model: str
    prompt: ChatPrompt
    params: SamplingParams
    prompter: Prompter
    tool_names: tuple[str, ...]
    """Of the tools whose calls are looked for."""

    takes_one_call: bool
    diagnostics: dict[str, Any] | None
    id: str = field(default_factory=lambda: new_id("msg_"))

    def whole(self, done: Completion, held: Sequence[Mark]) -> dict[str, Any]:
        """Return the message of a finished generation, and remember the answer."""
        read = self.finish(done)
        content = [text_block(read.content)] if read.content else []
        content += [tool_block(call) for call in read.calls]
        return self.message(content, done.usage, held) | self.ending(done, read.calls)

    def message(self, content: list[dict[str, Any]], usage: Usage, held: Sequence[Mark]) -> dict[str, Any]:
        """Return a message that has not ended."""
        return {
            "id": self.id,
            "type": "message",
            "role": "assistant",
            "model": self.model,
            "content": content,
            "stop_reason": None,
            "stop_sequence": None,
            "stop_details": None,
            "container": None,
            "usage": usage_dict(usage, held),
            "diagnostics": self.diagnostics,
        }

    def finish(self, done: Completion) -> ReadAnswer:
        """Take a finished generation apart, and remember the answer."""
        read = read_answer(done.text, self.tool_names)
        given = self.allowed(read.calls)
        if given == read.calls:  # of a text that is not what the client was given, nothing comes back
            self.prompter.remember(self.prompt, done, self.params, content=read.content, calls=given)
        return ReadAnswer(read.content, given)

    def allowed(self, calls: tuple[Call, ...]) -> tuple[Call, ...]:
        """Return the calls that the client is given."""
        return calls[:1] if self.takes_one_call else calls

    def ending(self, done: Completion, calls: Sequence[Call]) -> dict[str, str | None]:
        """Return why a message ended."""
        if calls:
            return {"stop_reason": "tool_use", "stop_sequence": None}
        if isinstance(done.stopped_by, str):
            return {"stop_reason": "stop_sequence", "stop_sequence": done.stopped_by}
        reason = _REASONS[done.finish_reason]
        if done.finish_reason == "length" and done.usage.completion_tokens < (self.params.max_tokens or 0):
            reason = "model_context_window_exceeded"
        return {"stop_reason": reason, "stop_sequence": None}


_REASONS = {
    "stop": "end_turn",
    "length": "max_tokens",
    # The server is shutting down; the client may send the answer back, to be gone on from.
    "abort": "pause_turn",
}


def text_block(text: str) -> dict[str, Any]:
    """Return a block of text."""
    return {"type": "text", "text": text, "citations": None}


def tool_block(call: Call) -> dict[str, Any]:
    """Return the block of a call."""
    return {
        "type": "tool_use",
        "id": new_id("toolu_"),
        "name": call.name,
        "input": call.arguments,
        "caller": {"type": "direct"},
    }
