"""A turn under way: its text piece by piece, for a thread or for an event loop. Leaving it early undoes it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Generator, Iterator
from threading import Event
from typing import Any, TypeVar

from phloem.runtime.errors import Cancelled
from phloem.runtime.frontend.session.messages import ToolCall, ToolResult, Turn
from phloem.runtime.frontend.session.steps import Ask, Steps
from phloem.runtime.frontend.session.tools import Toolbox
from phloem.runtime.generation import AsyncGeneration, Generation
from phloem.runtime.outputs import Completion

Value = TypeVar("Value")


class TurnStream:
    """Iterate over the text that the model writes, tool calls included; then `turn` is there.

    Nothing happens before the first piece is asked for. Leaving the `with` block, or losing the last reference, before the end
    undoes the turn: the session is what it was. After a keyboard interrupt, `abort` and iterate on to keep what there is.
    """

    def __init__(self, steps: Steps, toolbox: Toolbox, aborted: Event) -> None:
        self._steps = steps
        self._toolbox = toolbox
        self._aborted = aborted
        self._waits_for: Ask | ToolCall | None = None
        self._generation: Generation | None = None
        self._turn: Turn | None = None
        self._is_closed = False

    def __iter__(self) -> Iterator[str]:
        return self

    def __next__(self) -> str:
        try:
            while not self._is_closed:
                if piece := self._go_on():
                    return piece
        except KeyboardInterrupt:
            raise
        except BaseException:
            self.close()
            raise
        raise StopIteration

    def __enter__(self) -> TurnStream:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    @property
    def turn(self) -> Turn:
        """The turn, after the end.

        Raises:
            Cancelled: It has not ended, or was left early.
        """
        if self._turn is None:
            raise Cancelled("the turn has not ended: iterate to the end, or ask for its result()")
        return self._turn

    def result(self) -> Turn:
        """Wait for the end.

        Raises:
            PhloemError: The turn failed; the session is what it was.
        """
        with self:
            for _ in self:
                pass
        return self.turn

    def abort(self) -> None:
        """End the answer at the next step, and keep what there is: the turn ends with it, and no tool is called any more."""
        self._aborted.set()
        if self._generation is not None:
            self._generation.abort()

    def close(self) -> None:
        """Undo the turn, unless it has ended."""
        self._is_closed = True
        if self._generation is not None:
            self._generation.abort()
        self._steps.close()

    def _go_on(self) -> str:
        """Do one thing; return the text that it gave, which may be none."""
        if self._generation is not None:
            # A fresh iterator each time: one that an interrupt left would have ended.
            chunk = next(iter(self._generation))
            if chunk.completion is not None:
                self._generation = None
                self._advance(chunk.completion)
            return chunk.text
        if isinstance(self._waits_for, Ask):
            self._generation = self._waits_for.branch.stream(self._waits_for.params)
            if self._aborted.is_set():
                self._generation.abort()
        elif isinstance(self._waits_for, ToolCall):
            self._advance(self._result(self._waits_for))
        else:
            self._advance(None)
        return ""

    def _result(self, call: ToolCall) -> ToolResult:
        return _not_called(call) if self._aborted.is_set() else self._toolbox.run(call)

    def _advance(self, outcome: Completion | ToolResult | None) -> None:
        found = _advance(self._steps, outcome)
        if isinstance(found, Turn):
            self._turn, self._is_closed = found, True
        else:
            self._waits_for = found


class AsyncTurnStream:
    """The same for an event loop: `async for` over the text, then `turn`; or `await stream.result()`.

    A cancelled wait undoes the turn. What works on the session itself runs in a thread, so that the loop never waits for a step.
    """

    def __init__(self, steps: Steps, toolbox: Toolbox, aborted: Event) -> None:
        self._steps = steps
        self._toolbox = toolbox
        self._aborted = aborted
        self._generation: AsyncGeneration | None = None
        self._turn: Turn | None = None
        self._pieces = self._run()

    def __aiter__(self) -> AsyncIterator[str]:
        return self._pieces

    def __await__(self) -> Generator[Any, None, Turn]:
        return self.result().__await__()

    async def __aenter__(self) -> AsyncTurnStream:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._pieces.aclose()

    @property
    def turn(self) -> Turn:
        """See :attr:`TurnStream.turn`."""
        if self._turn is None:
            raise Cancelled("the turn has not ended: iterate to the end, or ask for its result()")
        return self._turn

    async def result(self) -> Turn:
        """See :meth:`TurnStream.result`."""
        async with self:
            async for _ in self._pieces:
                pass
        return self.turn

    def abort(self) -> None:
        """See :meth:`TurnStream.abort`."""
        self._aborted.set()
        if self._generation is not None:
            self._generation.abort()

    async def _run(self) -> AsyncGenerator[str, None]:
        try:
            command = await _in_thread(_advance, self._steps, None)
            while not isinstance(command, Turn):
                outcome: Completion | ToolResult | None = None
                if isinstance(command, ToolCall):
                    aborted = self._aborted.is_set()
                    outcome = _not_called(command) if aborted else await self._toolbox.arun(command)
                else:
                    async with await command.branch.asubmit(command.params) as self._generation:
                        if self._aborted.is_set():
                            self._generation.abort()
                        async for chunk in self._generation:
                            if chunk.text:
                                yield chunk.text
                            outcome = chunk.completion
                command = await _in_thread(_advance, self._steps, outcome)
            self._turn = command
        finally:
            self._steps.close()


def _not_called(call: ToolCall) -> ToolResult:
    return ToolResult(call, "not called: the turn was aborted", is_error=True)


def _advance(steps: Steps, outcome: Completion | ToolResult | None) -> Ask | ToolCall | Turn:
    """Return what has to be waited for next, or the turn at its end."""
    try:
        return next(steps) if outcome is None else steps.send(outcome)
    except StopIteration as end:
        if not isinstance(end.value, Turn):
            raise Cancelled("the turn was interrupted, and has not been") from None
        return end.value


async def _in_thread(function: Callable[..., Value], *arguments: object) -> Value:
    """Run a function in a thread, and do not leave before it has ended, not even when cancelled: it is short."""
    task = asyncio.ensure_future(asyncio.to_thread(function, *arguments))
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait([task])
        raise
