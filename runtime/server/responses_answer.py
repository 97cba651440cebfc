"""From a finished generation to a response: its items, its state, its usage, and what is stored of it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from phloem.runtime.outputs import Completion, TokenLogprob, Usage
from phloem.runtime.sampling_params import SamplingParams
from phloem.runtime.server.auth import Tenant
from phloem.runtime.server.chat_prompt import Call, ChatMessage, ChatPrompt
from phloem.runtime.server.openai_fields import new_id
from phloem.runtime.server.openai_logprobs import chat_logprobs
from phloem.runtime.server.responses_items import call_item, message_item, text_part
from phloem.runtime.server.service import Service
from phloem.runtime.server.tool_calls import read_answer


@dataclass(frozen=True, slots=True)
class ResponseAnswer:
    """What is known of a response before it is generated, and how it is made after."""

    service: Service
    tenant: Tenant
    prompt: ChatPrompt
    params: SamplingParams
    echo: dict[str, Any]
    """The fields that repeat the request."""

    input_items: list[dict[str, Any]]
    messages: tuple[ChatMessage, ...]
    """The conversation that is answered, without instructions."""

    tool_names: tuple[str, ...]
    """Of the tools whose calls are looked for."""

    is_stored: bool
    id: str = field(default_factory=lambda: new_id("resp_"))
    created_at: int = field(default_factory=lambda: int(time.time()))

    def whole(self, done: Completion) -> dict[str, Any]:
        """Return the response of a finished generation, and store it."""
        read = read_answer(done.text, self.tool_names)
        output = []
        if read.content or not read.calls:
            part = text_part(read.content, self.logprobs_of(done.logprobs))
            output.append(message_item(new_id("msg_"), self.status_of(done), [part]))
        output += self.call_items(read.calls)
        return self.finish(done, read.content, read.calls, output)

    def finish(
        self, done: Completion, content: str, calls: Sequence[Call], output: list[dict[str, Any]]
    ) -> dict[str, Any]:
        """Return the response with its output; remember and store the answer."""
        self.service.prompter.remember(self.prompt, done, self.params, content=content, calls=calls)
        response = self.response(self.status_of(done), output, done.usage)
        if response["status"] == "incomplete":
            reason = "max_output_tokens" if done.finish_reason == "length" else "server_shutdown"
            response["incomplete_details"] = {"reason": reason}
        if self.is_stored:
            ids = [item["call_id"] for item in output if item["type"] == "function_call"]
            named = tuple(
                Call(call.name, call.arguments, call_id) for call, call_id in zip(calls, ids, strict=True)
            )
            messages = (*self.messages, ChatMessage("assistant", content, named))
            self.service.responses.keep(self.tenant, response, self.input_items, messages)
        return response

    def response(self, status: str, output: list[dict[str, Any]], usage: Usage | None) -> dict[str, Any]:
        """Return a response in some state."""
        return {
            "id": self.id,
            "object": "response",
            "created_at": self.created_at,
            "completed_at": int(time.time()) if status == "completed" else None,
            "status": status,
            "error": None,
            "incomplete_details": None,
            **self.echo,
            "output": output,
            "usage": None if usage is None else _usage(usage),
        }

    def status_of(self, done: Completion) -> str:
        """Return the state of a response after a generation."""
        return "completed" if done.finish_reason == "stop" else "incomplete"

    def logprobs_of(self, entries: Sequence[TokenLogprob] | None) -> list[dict[str, Any]]:
        """Return log-probabilities as a list; empty if they were not asked for."""
        found: list[dict[str, Any]] = chat_logprobs(entries or (), self.service.token_texts)["content"]
        return found

    def call_items(self, calls: Sequence[Call]) -> list[dict[str, Any]]:
        """Return an item for each call."""
        return [call_item(call) for call in calls]


def _usage(usage: Usage) -> dict[str, Any]:
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {
            "cached_tokens": usage.cached_tokens,
            "cache_write_tokens": usage.computed_tokens,
        },
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }
