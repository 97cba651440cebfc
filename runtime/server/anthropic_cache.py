"""Breakpoints of Anthropic's protocol: where they are among a prompt's tokens, the leases that they take, and the usage that tells of them.

A breakpoint is a lease on the prompt's tokens up to it, in whole blocks, for five minutes or an hour after the last use. Where the
engine's budget for leases does not hold it there is none, and usage says so: these tokens count as plain input. They may be in the
cache all the same, as everything is for as long as there is room.
"""

from __future__ import annotations

import asyncio
from array import array
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import sha256
from itertools import takewhile
from typing import Any

from phloem.radix import Namespace
from phloem.runtime.branch import Branch
from phloem.runtime.engine import Engine
from phloem.runtime.errors import CacheFull, InvalidRequest
from phloem.runtime.outputs import Usage
from phloem.runtime.server.anthropic_content import TTL_S, Breakpoint
from phloem.runtime.server.chat_prompt import ChatMessage, ChatPrompt, Prompter

MAX_KNOWN_TOKENS = 8 << 20
"""Of the prefixes whose leases are known; beyond it, leases of the ones used longest ago are left to end by themselves."""

# Private use: no message's text goes on like that.
_OTHERWISE = "\ue0fe\ue0ff"


@dataclass(frozen=True, slots=True)
class Mark:
    """A breakpoint at its place."""

    num_tokens: int
    ttl_s: float


def marks_of(
    prompt: ChatPrompt,
    breakpoints: Sequence[Breakpoint],
    tools: Sequence[dict[str, Any]],
    *,
    prompter: Prompter,
    namespace: Namespace,
) -> list[Mark]:
    """Return the places of breakpoints among a prompt's tokens, the first one first. Takes as long as encoding as many prompts.

    What counts is the template's text: a breakpoint is where the prompt parts from one that goes on with something else from there.
    """
    found = []
    for each in breakpoints:
        if each.messages is None:
            found.append(Mark(len(prompt.token_ids), each.ttl_s))
            continue
        try:
            other = prompter.encode(_going_on(each), tools, namespace)
        except InvalidRequest:  # a template that takes no conversation of that kind
            continue
        found.append(Mark(num_common(prompt.token_ids, other.token_ids), each.ttl_s))
    return sorted(found, key=lambda mark: mark.num_tokens)


def num_common(one: Sequence[int], other: Sequence[int]) -> int:
    """Return how many first tokens two paths share."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))


def _going_on(breakpoint_: Breakpoint) -> list[ChatMessage]:
    messages = list(breakpoint_.messages or ())
    if breakpoint_.cuts_last:
        last = messages.pop()
        return [
            *messages,
            ChatMessage(last.role, f"{last.content}\n{_OTHERWISE}", last.calls, last.name, last.call_id),
        ]
    role = "assistant" if messages and messages[-1].role == "user" else "user"
    return [*messages, ChatMessage(role, _OTHERWISE)]


class PromptLeases:
    """The leases that breakpoints took. Used by the event loop only."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._known: OrderedDict[bytes, Branch] = OrderedDict()
        self._num_tokens = 0

    async def hold(self, prompt: ChatPrompt, marks: Sequence[Mark], namespace: Namespace) -> list[Mark]:
        """Take or renew the leases of a prompt that has been computed; return the marks that have one."""
        if not self._engine.config.prefix_cache:
            return []
        held = await asyncio.gather(*(self._hold(prompt, mark, namespace) for mark in marks))
        return [mark for mark, is_held in zip(marks, held, strict=True) if is_held]

    async def _hold(self, prompt: ChatPrompt, mark: Mark, namespace: Namespace) -> bool:
        ids = prompt.token_ids[: mark.num_tokens]
        key = sha256(f"{namespace.salt}:{mark.ttl_s}:".encode() + array("i", ids).tobytes()).digest()
        branch = self._known.get(key)
        if branch is not None and branch.is_pinned:
            self._known.move_to_end(key)
            return True  # the request that used it has renewed it
        try:
            if branch is None:
                branch = self._engine.branch(ids, namespace=namespace)
            await branch.apin(ttl=mark.ttl_s, owner="cache_control")
        except (CacheFull, InvalidRequest):
            return False
        self._keep(key, branch)
        return True

    def _keep(self, key: bytes, branch: Branch) -> None:
        if key not in self._known:
            self._known[key] = branch
            self._num_tokens += len(branch)
        self._known.move_to_end(key)
        while self._num_tokens > MAX_KNOWN_TOKENS:
            _, oldest = self._known.popitem(last=False)
            self._num_tokens -= len(oldest)


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
