"""Where a prompt parts from that of an earlier message, for clients that wonder why it was not found in the cache.

Prompts of requests that ask for diagnostics are remembered by the id of their message, in memory and within a limit, for their key alone.
The answer compares the requests; what the cache had of the prompt, and why it lacked the rest, is told beside it (`misses`, which is not
Anthropic's).
"""

from __future__ import annotations

import json
from array import array
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import Any

from phloem.radix import Explanation
from phloem.runtime.server.anthropic_cache import num_common
from phloem.runtime.server.auth import Tenant
from phloem.runtime.server.chat_prompt import ChatMessage, ChatPrompt, ordered

MAX_BYTES = 16 << 20

BYTES_PER_MESSAGE = 100
"""About what a digest takes."""


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """What a request's prompt was made of."""

    system: bytes
    tools: bytes
    messages: tuple[bytes, ...]
    """A digest of each."""

    token_ids: array[int]

    @property
    def num_bytes(self) -> int:
        """About the memory that it takes."""
        return BYTES_PER_MESSAGE * (len(self.messages) + 3) + self.token_ids.itemsize * len(self.token_ids)


def fingerprint(
    prompt: ChatPrompt, messages: Sequence[ChatMessage], tools: Sequence[dict[str, Any]]
) -> Fingerprint:
    """Return the fingerprint of a request."""
    is_told = bool(messages) and messages[0].role == "system"
    return Fingerprint(
        system=_digest(messages[0].content if is_told else ""),
        tools=_digest([ordered(tool) for tool in tools]),
        messages=tuple(
            _digest([each.role, each.content, [[call.name, call.arguments] for call in each.calls]])
            for each in messages[is_told:]
        ),
        token_ids=array("i", prompt.token_ids),
    )


def _digest(value: Any) -> bytes:
    return sha256(json.dumps(value, sort_keys=True).encode()).digest()


class FingerprintStore:
    """Fingerprints by key and message; the ones used longest ago make room. Used by the event loop only."""

    def __init__(self, max_bytes: int = MAX_BYTES) -> None:
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._found: OrderedDict[tuple[bytes, str], Fingerprint] = OrderedDict()

    def __len__(self) -> int:
        return len(self._found)

    def keep(self, tenant: Tenant, message_id: str, found: Fingerprint) -> None:
        """Remember the fingerprint of a new message."""
        self._found[tenant.root, message_id] = found
        self._num_bytes += found.num_bytes
        while self._num_bytes > self._max_bytes:
            self._num_bytes -= self._found.popitem(last=False)[1].num_bytes

    def get(self, tenant: Tenant, message_id: str) -> Fingerprint | None:
        """Return a message's fingerprint; None if it is not known, or no more."""
        found = self._found.get((tenant.root, message_id))
        if found is not None:
            self._found.move_to_end((tenant.root, message_id))
        return found


def diagnose(before: Fingerprint | None, now: Fingerprint, explanation: Explanation) -> dict[str, Any] | None:
    """Return what has changed since an earlier message, in Anthropic's form; None: nothing before this prompt's new end.

    Args:
        before: The earlier message's; None if it is not known.
        now: The request's.
        explanation: What the cache has of the request's prompt.
    """
    if before is None:
        return _answer({"type": "previous_message_not_found"}, explanation)
    num_same = num_common(before.token_ids, now.token_ids)
    changed = _changed(before, now)
    if changed is None and num_same == len(before.token_ids):
        return None
    if changed is None:
        # The same request but for new messages, and yet other tokens: the template rewrites the past.
        return _answer({"type": "unavailable"}, explanation)
    missed = len(before.token_ids) - num_same
    return _answer({"type": f"{changed}_changed", "cache_missed_input_tokens": missed}, explanation)


def _changed(before: Fingerprint, now: Fingerprint) -> str | None:
    if before.system != now.system:
        return "system"
    if before.tools != now.tools:
        return "tools"
    return None if now.messages[: len(before.messages)] == before.messages else "messages"


def _answer(reason: dict[str, Any], explanation: Explanation) -> dict[str, Any]:
    misses = [
        {"start": miss.start, "end": miss.end, "reason": miss.reason.value} for miss in explanation.misses
    ]
    return {"cache_miss_reason": reason, "misses": misses}
