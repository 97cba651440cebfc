"""Breakpoints of Anthropic's protocol: where they are among a prompt's tokens, and the usage that tells of them."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile
from typing import Any

from phloem.radix import Namespace
from phloem.runtime.errors import InvalidRequest
from phloem.runtime.outputs import Usage
from phloem.runtime.server.answers import AnswerMemory, digest_after
from phloem.runtime.server.anthropic_content import TTL_S, Breakpoint
from phloem.runtime.server.chat_prompt import ChatMessage, ChatPrompt, Prompter
from phloem.runtime.server.prompt_leases import Mark

MAX_BYTES = 8 << 20
"""For tokens of prompts up to a breakpoint."""

# Private use: no message's text goes on like that.
_OTHERWISE = "\ue0fe\ue0ff"


class MarkFinder:
    """Finds the places of breakpoints among a prompt's tokens. Threads may share it.

    What counts is the template's text: a breakpoint is where the prompt parts from one that goes on with something else from there.
    """

    def __init__(self, prompter: Prompter, max_bytes: int = MAX_BYTES) -> None:
        self._prompter = prompter
        self._known = AnswerMemory(max_bytes)

    def marks(
        self,
        prompt: ChatPrompt,
        breakpoints: Sequence[Breakpoint],
        tools: Sequence[dict[str, Any]],
        namespace: Namespace,
    ) -> list[Mark]:
        """Return the places of breakpoints, the first one first. Takes as long as encoding as many prompts, but for those known."""
        found = []
        for each in breakpoints:
            if each.messages is None:
                found.append(Mark(len(prompt.token_ids), each.ttl_s))
                continue
            try:
                other = self._other_ids(each, tools, namespace)
            except InvalidRequest:  # a template that takes no conversation of that kind
                continue
            found.append(Mark(num_common(prompt.token_ids, other), each.ttl_s))
        return sorted(found, key=lambda mark: mark.num_tokens)

    def _other_ids(
        self, each: Breakpoint, tools: Sequence[dict[str, Any]], namespace: Namespace
    ) -> Sequence[int]:
        """Return the tokens of a prompt that is the same up to a breakpoint.

        Those of system texts and tools come again with every request, and are remembered. Answers are not: their tokens may
        become known, or no more.
        """
        messages = _other_messages(each)
        if any(message.role == "assistant" for message in each.messages or ()):
            return self._prompter.encode(messages, tools, namespace).token_ids
        parts = [[message.role, message.content, message.name] for message in messages]
        digest = digest_after((namespace.salt or "").encode(), parts, list(tools))
        known = self._known.find(digest)
        if known is not None:
            return known.token_ids
        token_ids = self._prompter.encode(messages, tools, namespace).token_ids
        self._known.keep(digest, "", token_ids)
        return token_ids


def num_common(one: Sequence[int], other: Sequence[int]) -> int:
    """Return how many first tokens two paths share."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))


def _other_messages(each: Breakpoint) -> list[ChatMessage]:
    messages = list(each.messages or ())
    if each.cuts_last:
        last = messages.pop()
        return [
            *messages,
            ChatMessage(last.role, f"{last.content}\n{_OTHERWISE}", last.calls, last.name, last.call_id),
        ]
    role = "assistant" if messages and messages[-1].role == "user" else "user"
    return [*messages, ChatMessage(role, _OTHERWISE)]


def usage_dict(usage: Usage, held: Sequence[Mark]) -> dict[str, Any]:
    """Return Anthropic's usage, whose three kinds of input tokens together are the prompt's.

    Args:
        usage: Of the request.
        held: The breakpoints that have a lease, the first one first.
    """
    created = dict.fromkeys(TTL_S.values(), 0)
    done = usage.cached_tokens
    for mark in held:
        created[mark.ttl_s] += max(0, mark.num_tokens - done)
        done = max(done, mark.num_tokens)
    return {
        "input_tokens": usage.prompt_tokens - done,
        "cache_creation_input_tokens": sum(created.values()),
        "cache_read_input_tokens": usage.cached_tokens,
        "cache_creation": {f"ephemeral_{name}_input_tokens": created[ttl_s] for name, ttl_s in TTL_S.items()},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"thinking_tokens": 0},
        "server_tool_use": None,
        "service_tier": "standard",
        "inference_geo": None,
    }
