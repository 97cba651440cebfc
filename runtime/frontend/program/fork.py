"""The children of a state, for as long as a `with` block lasts."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from typing import TYPE_CHECKING, Any, TypeVar, overload

from phloem.runtime.errors import InvalidRequest, ProgramError
from phloem.runtime.frontend.program.calls import AWAITING, BLOCKING, Calls, finish
from phloem.runtime.frontend.program.where import located

if TYPE_CHECKING:
    from phloem.runtime.frontend.program.state import State

Result = TypeVar("Result")

MAX_THREADS = 64
"""Children of one fork that work at the same time; the others follow."""


class Fork:
    """`with s.fork(...) as kids`: a sequence of states that share the parent's KV.

    When the block is left, however it is left, what they still generate is cancelled, and their memory is freed.
    """

    def __init__(self, parent: State, children: int | Sequence[str]) -> None:
        self._parent = parent
        self._texts: Sequence[str] | None = None if isinstance(children, int) else children
        with located:
            self._count = _count_of(children)
        self._states: list[State] | None = None

    def __enter__(self) -> Fork:
        return finish(self._open(BLOCKING))

    def __exit__(self, *error: object) -> None:
        self._close()

    async def __aenter__(self) -> Fork:
        return await self._open(AWAITING)

    async def __aexit__(self, *error: object) -> None:
        self._close()

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[State]:
        return iter(self._opened())

    @overload
    def __getitem__(self, key: int) -> State: ...

    @overload
    def __getitem__(self, key: str) -> list[Any]: ...

    def __getitem__(self, key: int | str) -> State | list[Any]:
        """Return one child by its number, or all children's captures by their name."""
        states = self._opened()
        return states[key] if isinstance(key, int) else [state[key] for state in states]

    def join(self, name: str, separator: str = "\n") -> str:
        """Return the children's captures of one name as one text, for the parent to append."""
        return separator.join(str(value) for value in self[name])

    def each(self, function: Callable[[State], Result]) -> list[Result]:
        """Run a function on every child, side by side in threads; return what it returns, in order.

        The first error ends the other children, and is raised.
        """
        states = self._opened()
        with located, ThreadPoolExecutor(min(len(states), MAX_THREADS)) as pool:
            futures = [pool.submit(function, state) for state in states]
            try:
                failed = [
                    each for each in wait(futures, return_when=FIRST_EXCEPTION).done if each.exception()
                ]
                return [future.result() for future in failed or futures]
            except BaseException:
                self._close()
                raise

    async def aeach(self, function: Callable[[State], Awaitable[Result]]) -> list[Result]:
        """Do as `each` with an asynchronous function, for an event loop."""
        tasks = [asyncio.ensure_future(function(state)) for state in self._opened()]
        try:
            return list(await asyncio.gather(*tasks))
        except BaseException:
            for task in tasks:
                task.cancel()
            self._close()
            raise

    def gen(self, name: str | None = None, **options: Any) -> list[Any]:
        """Generate on every child at the same time; return the values. The options are those of `State.gen`.

        With a `seed`, child i draws with seed + i, so that children which are still equal differ.
        """
        with located:
            return self.each(lambda state: state.gen(name, **self._options_of(state, options)))

    async def agen(self, name: str | None = None, **options: Any) -> list[Any]:
        """Do as `gen`, for an event loop."""
        return await self.aeach(lambda state: state.agen(name, **self._options_of(state, options)))

    def _options_of(self, state: State, options: dict[str, Any]) -> dict[str, Any]:
        seed = options.get("seed")
        return (
            options if not isinstance(seed, int) else {**options, "seed": seed + self._opened().index(state)}
        )

    async def _open(self, calls: Calls) -> Fork:
        if self._states is not None:
            with located:
                raise ProgramError("a fork is entered once; fork again")
        self._states = await self._parent._fork_paths(calls, self._count)
        try:
            for state, text in zip(self._states, self._texts or (), strict=False):
                state += text
        except BaseException:
            self._close()
            raise
        return self

    def _opened(self) -> list[State]:
        if self._states is None:
            with located:
                raise ProgramError("a fork has children inside of its `with` block: with s.fork(...) as kids")
        return self._states

    def _close(self) -> None:
        for state in self._states or ():
            state._release()


def _count_of(children: object) -> int:
    if isinstance(children, int) and not isinstance(children, bool) and children >= 1:
        return children
    if isinstance(children, Sequence) and not isinstance(children, str) and children:
        return len(children)
    raise InvalidRequest(
        f"a fork takes a number of at least 1, or a list of texts, not {children!r}", field="children"
    )
