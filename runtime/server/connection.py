"""The client at the other end: work that ends when it goes, and answers as server-sent events."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, TypeVar

import anyio
from starlette.requests import Request
from starlette.responses import StreamingResponse
from starlette.types import Message, Receive, Scope, Send

from phloem.runtime.server.errors import ClientGone, printable

logger = logging.getLogger(__name__)

Value = TypeVar("Value")

DONE = "data: [DONE]\n\n"
"""The end of a stream in OpenAI's and SGLang's protocols."""


async def while_connected(request: Request, work: Awaitable[Value]) -> Value:
    """Await some work; cancel it when the client closes the connection.

    Raises:
        ClientGone: It did.
    """
    task = asyncio.ensure_future(work)
    watcher = asyncio.ensure_future(_gone(request))
    try:
        await asyncio.wait((task, watcher), return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientGone
    finally:
        for each in (task, watcher):
            if not each.done():
                each.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await each


async def _gone(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


class EventStream(StreamingResponse):
    """An answer as server-sent events. However it ends, `on_end` is called: at the last event, or when the client goes."""

    media_type = "text/event-stream"

    def __init__(
        self, events: AsyncIterator[str], *, on_end: Callable[[], None], send_timeout_s: float
    ) -> None:
        """Prepare the answer; a client that takes nothing for `send_timeout_s` is taken for gone."""
        super().__init__(events, headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        self._on_end = on_end
        self._send_timeout_s = send_timeout_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See ASGI."""

        async def send_in_time(message: Message) -> None:
            with anyio.fail_after(self._send_timeout_s):
                await send(message)

        try:
            await super().__call__(scope, receive, send_in_time)
        except TimeoutError:
            # The answer is not complete, so the server closes the connection.
            logger.info("a client took nothing of its stream for %g s", self._send_timeout_s)
        finally:
            self._on_end()


def event(data: Any, *, name: str | None = None) -> str:
    """Return one server-sent event with JSON data."""
    head = "" if name is None else f"event: {name}\n"
    text = json.dumps(data, ensure_ascii=False, separators=(",", ":"))
    return f"{head}data: {printable(text)}\n\n"
