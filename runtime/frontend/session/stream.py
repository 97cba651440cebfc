"""A turn under way: its text piece by piece, for a thread or for an event loop. Leaving it early undoes it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Generator, Iterator
from contextlib import aclosing
from threading import Event
from typing import Any, TypeVar

from phloem.runtime.errors import Cancelled
from phloem.runtime.frontend.session.messages import ToolCall, ToolResult, Turn
from phloem.runtime.frontend.session.steps import Ask, Steps
from phloem.runtime.frontend.session.tools import Toolbox
from phloem.runtime.generation import Generation
from phloem.runtime.outputs import Completion

Value = TypeVar("Value")


class TurnStream:
    """Iterate over the text that the model writes, tool calls included; then `turn` is there.

    Nothing happens before the first piece is asked for. Leaving the `with` block, or losing the last reference, before the end
    undoes the turn: the session is what it was.
    """

    def __init__(self, steps: Steps, toolbox: Toolbox, aborted: Event) -> None:
        self._steps = steps
        self._toolbox = toolbox
        self._aborted = aborted
        self._generation: Generation | None = None
        self._turn: Turn | None = None
        self._pieces = self._run()

    def __iter__(self) -> Iterator[str]:
        return self._pieces

    def __enter__(self) -> TurnStream:
        return self

    def __exit__(self, *error: object) -> None:
        self._pieces.close()

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
        for _ in self._pieces:
            pass
        return self.turn

    def abort(self) -> None:
        """End the answer at the next step, and keep what there is: the turn ends with it, and no tool is called any more."""
        self._aborted.set()
        if self._generation is not None:
            self._generation.abort()

    def _run(self) -> Generator[str, None, None]:
        try:
            command = _advance(self._steps, None)
            while not isinstance(command, Turn):
                if isinstance(command, Ask):
                    outcome: Completion | ToolResult = yield from self._answer(command)
                else:
                    outcome = self._toolbox.run(command)
                command = _advance(self._steps, outcome)
            self._turn = command
        finally:
            self._steps.close()

    def _answer(self, ask: Ask) -> Generator[str, None, Completion]:
        with ask.branch.stream(ask.params) as generation:
            self._generation = generation
            if self._aborted.is_set():
                generation.abort()
            for chunk in generation:
                if chunk.text:
                    yield chunk.text
        return generation.result()


class AsyncTurnStream:
    """The same for an event loop: `async for` over the text, then `turn`; or `await stream.result()`.

    A cancelled wait undoes the turn. What works on the session itself runs in a thread, so that the loop never waits for a step.
    """

    def __init__(self, steps: Steps, toolbox: Toolbox) -> None:
        self._steps = steps
        self._toolbox = toolbox
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

    async def _run(self) -> AsyncGenerator[str, None]:
        try:
            command = await _in_thread(_advance, self._steps, None)
            while not isinstance(command, Turn):
                outcome: Completion | ToolResult | None = None
                if isinstance(command, ToolCall):
                    outcome = await self._toolbox.arun(command)
                else:
                    async with aclosing(command.branch.astream(command.params)) as chunks:
                        async for chunk in chunks:
                            if chunk.text:
                                yield chunk.text
                            outcome = chunk.completion
                command = await _in_thread(_advance, self._steps, outcome)
            self._turn = command
        finally:
            self._steps.close()


def _advance(steps: Steps, outcome: Completion | ToolResult | None) -> Ask | ToolCall | Turn:
    """Return what has to be waited for next, or the turn at its end."""
    try:
        return next(steps) if outcome is None else steps.send(outcome)
    except StopIteration as end:
        turn: Turn = end.value
        return turn


async def _in_thread(function: Callable[..., Value], *arguments: object) -> Value:
    """Run a function in a thread, and do not leave before it has ended, not even when cancelled: it is short."""
    task = asyncio.ensure_future(asyncio.to_thread(function, *arguments))
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait([task])
        raise
