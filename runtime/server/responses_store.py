"""Responses that can be read again, and gone on from: in memory, the ones used longest ago make room."""

from __future__ import annotations

import json
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

from phloem.runtime.server.auth import Tenant
from phloem.runtime.server.chat_prompt import ChatMessage
from phloem.runtime.server.errors import not_found


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """A response with the conversation that it ends."""

    response: dict[str, Any]
    input_items: list[dict[str, Any]]
    """Of the request alone, not of those before."""

    messages: tuple[ChatMessage, ...]
    """The whole conversation, without instructions: these are each request's own."""

    num_bytes: int
    """About the memory that it takes."""


class ResponseStore:
    """Stored responses by tenant and id. Used by the event loop only."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._stored: OrderedDict[tuple[bytes, str], StoredResponse] = OrderedDict()

    def __len__(self) -> int:
        return len(self._stored)

    def keep(
        self,
        tenant: Tenant,
        response: dict[str, Any],
        input_items: list[dict[str, Any]],
        messages: tuple[ChatMessage, ...],
    ) -> None:
        """Store a response under its id."""
        # Each turn holds the whole conversation, whose strings it shares with the turns before; they count once.
        num_bytes = 4 * len(json.dumps([response, input_items])) + 200 * len(messages)
        self._stored[tenant.root, response["id"]] = StoredResponse(response, input_items, messages, num_bytes)
        self._num_bytes += num_bytes
        while self._num_bytes > self._max_bytes:
            self._num_bytes -= self._stored.popitem(last=False)[1].num_bytes

    def get(self, tenant: Tenant, response_id: str, *, field: str) -> StoredResponse:
        """Return a response of the tenant's.

        Raises:
            ApiError: 404, there is none, or no more.
        """
        found = self._stored.get((tenant.root, response_id))
        if found is None:
            raise not_found(f"there is no stored response {response_id!r}", field)
        self._stored.move_to_end((tenant.root, response_id))
        return found

    def drop(self, tenant: Tenant, response_id: str) -> None:
        """Forget a response.

        Raises:
            ApiError: 404, there is none.
        """
        self._num_bytes -= self.get(tenant, response_id, field="response_id").num_bytes
        del self._stored[tenant.root, response_id]
