"""One text for the blocking and the asynchronous face: operations are written once, as coroutines over a `Calls`.

With `Blocking` no await ever waits, so `finish` runs such a coroutine to its end in one go.
"""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, Protocol, TypeVar

from phloem.runtime.branch import Branch, Score
from phloem.runtime.outputs import Completion
from phloem.runtime.sampling_params import SamplingParams

Result = TypeVar("Result")
OnText = Callable[[str], None]


class Calls(Protocol):
    """What programs ask of branches."""

    async def at(self, branch: Branch, index: int) -> Branch:
        """See `Branch.at`."""

    async def append(self, branch: Branch, ids: array[int]) -> None:
        """See `Branch.append`."""

    async def fork(self, branch: Branch, n: int) -> list[Branch]:
        """See `Branch.fork`."""

    async def generate(self, branch: Branch, params: SamplingParams, on_text: OnText | None) -> Completion:
        """See `Branch.generate`; `on_text` gets the pieces of text as they come."""

    async def expand(self, branch: Branch, n: int, params: SamplingParams) -> list[Branch]:
        """See `Branch.expand`."""

    async def score(self, branch: Branch, continuations: Sequence[Sequence[int]]) -> list[Score]:
        """See `Branch.score`."""

    async def pin(self, branch: Branch, *, ttl: float, owner: str) -> int:
        """See `Branch.pin`."""


class Blocking:
    """For a program that runs in a thread."""

    async def at(self, branch: Branch, index: int) -> Branch:
        """See :class:`Calls`."""
        return branch.at(index)

    async def append(self, branch: Branch, ids: array[int]) -> None:
        """See :class:`Calls`."""
        branch.append(ids)

    async def fork(self, branch: Branch, n: int) -> list[Branch]:
        """See :class:`Calls`."""
        return branch.fork(n)

    async def generate(self, branch: Branch, params: SamplingParams, on_text: OnText | None) -> Completion:
        """See :class:`Calls`."""
        completion: Completion | None = None
        for chunk in branch.stream(params):
            if on_text is not None and chunk.text:
                on_text(chunk.text)
            completion = chunk.completion
        assert completion is not None
        return completion

    async def expand(self, branch: Branch, n: int, params: SamplingParams) -> list[Branch]:
        """See :class:`Calls`."""
        return branch.expand(n, params)

    async def score(self, branch: Branch, continuations: Sequence[Sequence[int]]) -> list[Score]:
        """See :class:`Calls`."""
        return branch.score(continuations)

    async def pin(self, branch: Branch, *, ttl: float, owner: str) -> int:
        """See :class:`Calls`."""
        return branch.pin(ttl=ttl, owner=owner)


class Awaiting:
    """For a program that runs in an event loop, which is never held up."""

    async def at(self, branch: Branch, index: int) -> Branch:
        """See :class:`Calls`."""
        return await branch.aat(index)

    async def append(self, branch: Branch, ids: array[int]) -> None:
        """See :class:`Calls`."""
        await branch.aappend(ids)

    async def fork(self, branch: Branch, n: int) -> list[Branch]:
        """See :class:`Calls`."""
        return await branch.afork(n)

    async def generate(self, branch: Branch, params: SamplingParams, on_text: OnText | None) -> Completion:
        """See :class:`Calls`."""
        completion: Completion | None = None
        async for chunk in branch.astream(params):
            if on_text is not None and chunk.text:
                on_text(chunk.text)
            completion = chunk.completion
        assert completion is not None
        return completion

    async def expand(self, branch: Branch, n: int, params: SamplingParams) -> list[Branch]:
        """See :class:`Calls`."""
        return await branch.aexpand(n, params)

    async def score(self, branch: Branch, continuations: Sequence[Sequence[int]]) -> list[Score]:
        """See :class:`Calls`."""
        return await branch.ascore(continuations)

    async def pin(self, branch: Branch, *, ttl: float, owner: str) -> int:
        """See :class:`Calls`."""
        return await asyncio.to_thread(branch.pin, ttl=ttl, owner=owner)


BLOCKING = Blocking()
AWAITING = Awaiting()


def finish(coroutine: Coroutine[Any, Any, Result]) -> Result:
    """Run a coroutine over `Blocking`, which never waits for an event loop, and return its result."""
    try:
        coroutine.send(None)
    except StopIteration as end:
        result: Result = end.value
        return result
    raise AssertionError("a blocking operation waited for an event loop")
