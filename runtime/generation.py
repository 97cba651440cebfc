"""The caller's end of a running request: its chunks, for a thread or for an event loop."""

from __future__ import annotations

import asyncio
import contextlib
import queue
import weakref
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Protocol

from phloem.runtime.outputs import Chunk, Completion

Item = Chunk | Exception


class Sink(Protocol):
    """Where the engine's thread puts a request's chunks, or the error that ended it. Must not block."""

    def put(self, item: Item) -> None:
        """Take the next chunk. One with a completion, or an error, is the last."""


class QueueSink:
    """For a caller in a thread."""

    def __init__(self) -> None:
        self._items: queue.SimpleQueue[Item] = queue.SimpleQueue()

    def put(self, item: Item) -> None:
        """See :class:`Sink`."""
        self._items.put(item)

    def get(self) -> Item:
        """Wait for the next item."""
        return self._items.get()


class AsyncSink:
    """For a caller in an event loop; made inside of it."""

    def __init__(self) -> None:
        self._items: asyncio.Queue[Item] = asyncio.Queue()
        self._loop = asyncio.get_running_loop()

    def put(self, item: Item) -> None:
        """See :class:`Sink`."""
        # When the loop was closed, nobody is left who waits; it may also close between a check and the call.
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._items.put_nowait, item)

    async def get(self) -> Item:
        """Wait for the next item."""
        return await self._items.get()


class Progress:
    """How far a generation has come, as its caller has seen it. Shared by the two handles below."""

    def __init__(self, request_id: str, abort: Callable[[str], None]) -> None:
        self.request_id = request_id
        self.ended = False
        self._completion: Completion | None = None
        self._error: Exception | None = None
        self._abort = abort
        self._finalizer: weakref.finalize[..., Generation | AsyncGeneration] | None = None

    def abort_when_collected(self, handle: Generation | AsyncGeneration) -> None:
        """Abort when the handle is lost before the end: nobody could read what an abandoned generation would still give."""
        self._finalizer = weakref.finalize(handle, self.abort)
        self._finalizer.atexit = False

    def take(self, item: Item) -> Chunk:
        """Note what an item says of the end; return it, or raise it if it is an error."""
        if isinstance(item, Exception):
            self._end()
            self._error = item
            raise item
        if item.completion is not None:
            self._end()
            self._completion = item.completion
        return item

    def _end(self) -> None:
        self.ended = True
        # It refers to this object, whose error's traceback refers to the handle and to all that its callers hold.
        if self._finalizer is not None:
            self._finalizer.detach()

    def abort(self) -> None:
        """Ask the engine to end the request, unless it has ended."""
        if not self.ended:
            self._abort(self.request_id)

    @property
    def completion(self) -> Completion:
        """The outcome, after the end; or its error once more."""
        if self._error is not None:
            raise self._error
        assert self._completion is not None
        return self._completion


class Generation:
    """A generation under way: iterate over its chunks, or wait for its `result()`.

    Leaving the `with` block, or losing the last reference to it, aborts what has not finished.
    """

    def __init__(self, sink: QueueSink, progress: Progress) -> None:
        self._sink = sink
        self._progress = progress
        progress.abort_when_collected(self)

    @property
    def request_id(self) -> str:
        """The request's id, unique in its engine."""
        return self._progress.request_id

    def __iter__(self) -> Iterator[Chunk]:
        """Yield chunks as they come.

        Raises:
            PhloemError: The request failed.
        """
        while not self._progress.ended:
            yield self._progress.take(self._sink.get())

    def __enter__(self) -> Generation:
        return self

    def __exit__(self, *error: object) -> None:
        self.abort()

    def result(self) -> Completion:
        """Wait for the end.

        Raises:
            PhloemError: The request failed.
        """
        for _ in self:
            pass
        return self._progress.completion

    def abort(self) -> None:
        """End it at the next step. What was generated can still be read; its finish_reason is "abort"."""
        self._progress.abort()


class AsyncGeneration:
    """The same for an event loop: `async for` over its chunks, or `await generation.result()`."""

    def __init__(self, sink: AsyncSink, progress: Progress) -> None:
        self._sink = sink
        self._progress = progress
        progress.abort_when_collected(self)

    @property
    def request_id(self) -> str:
        """The request's id, unique in its engine."""
        return self._progress.request_id

    async def __aiter__(self) -> AsyncIterator[Chunk]:
        """Yield chunks as they come; a cancelled wait aborts the request.

        Raises:
            PhloemError: The request failed.
        """
        while not self._progress.ended:
            try:
                item = await self._sink.get()
            except asyncio.CancelledError:
                self.abort()
                raise
            yield self._progress.take(item)

    async def __aenter__(self) -> AsyncGeneration:
        return self

    async def __aexit__(self, *error: object) -> None:
        self.abort()

    async def result(self) -> Completion:
        """Wait for the end; a cancelled wait aborts the request.

        Raises:
            PhloemError: The request failed.
        """
        async for _ in self:
            pass
        return self._progress.completion

    def abort(self) -> None:
        """See :meth:`Generation.abort`."""
        self._progress.abort()
