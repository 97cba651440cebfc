"""OpenAI's event streams: what chats and completions write into them is their own, the frame is this."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any, Protocol

from starlette.requests import Request

from phloem.runtime.errors import PhloemError
from phloem.runtime.outputs import Chunk
from phloem.runtime.server.connection import DONE, event, while_connected
from phloem.runtime.server.errors import failure_of, openai_error
from phloem.runtime.server.openai_fields import StreamOptions, UsageSoFar
from phloem.runtime.server.service import IndexedChunk, Run


class ChoiceWriter(Protocol):
    """Writes the choices of a stream's events."""

    head: dict[str, Any]
    """What all events begin with."""

    def opening(self, index: int) -> list[dict[str, Any]]:
        """Return what comes before the first piece of a choice."""

    def pieces(self, index: int, chunk: Chunk) -> list[dict[str, Any]]:
        """Return what a chunk gives of its choice, if anything."""


async def openai_events(
    run: Run, writer: ChoiceWriter, request: Request, *, options: StreamOptions, n: int
) -> AsyncIterator[str]:
    """Wait for the first token and return the events, so that what fails before it has a status of its own.

    Raises:
        ClientGone: The client did not wait for the first token.
        PhloemError: The run failed before it.
    """
    chunks = run.chunks()
    first = await first_chunk(run, chunks, request)
    return _events(first, chunks, writer, options, n)


async def first_chunk(run: Run, chunks: AsyncIterator[IndexedChunk], request: Request) -> IndexedChunk:
    """Wait for the first chunk; without one the run is closed.

    Raises:
        ClientGone: The client did not wait for it.
        PhloemError: The run failed before it.
    """
    try:
        return await while_connected(request, _first(chunks))
    except BaseException:
        run.close()
        raise


async def _first(chunks: AsyncIterator[IndexedChunk]) -> IndexedChunk:
    return await anext(chunks)


async def _events(
    first: IndexedChunk,
    chunks: AsyncIterator[IndexedChunk],
    writer: ChoiceWriter,
    options: StreamOptions,
    n: int,
) -> AsyncIterator[str]:
    usage = UsageSoFar(n)
    opened: set[int] = set()

    def events_of(item: IndexedChunk) -> list[str]:
        usage.take(item.index, item.chunk.usage)
        choices = [] if item.index in opened else writer.opening(item.index)
        opened.add(item.index)
        choices += writer.pieces(item.index, item.chunk)
        tail: dict[str, Any] = {"usage": None} if options.include_usage else {}
        if options.continuous_usage_stats:
            tail = {"usage": usage.to_dict()}
        return [event({**writer.head, "choices": [choice], **tail}) for choice in choices]

    try:
        for text in events_of(first):
            yield text
        async for item in chunks:
            for text in events_of(item):
                yield text
        if options.include_usage:
            yield event({**writer.head, "choices": [], "usage": usage.to_dict()})
    except PhloemError as error:
        yield event(openai_error(failure_of(error)))
    yield DONE
