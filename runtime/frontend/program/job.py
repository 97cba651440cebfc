"""One run of a program: its state and arguments before, what it left behind after."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from phloem.runtime.frontend.program.scope import Scope
from phloem.runtime.frontend.program.state import State, captured
from phloem.runtime.frontend.program.trace import Trace
from phloem.runtime.outputs import Usage


@dataclass(frozen=True, slots=True)
class Run:
    """What a program left behind: `run["name"]` is a capture."""

    value: Any
    """What the function returned; None when it failed."""

    captures: Mapping[str, Any]
    token_ids: list[int]
    """The state's path at the end."""

    trace: Trace
    error: Exception | None = None
    """What ended a run of `map` early; captures and path are those until then."""

    _decode: Callable[..., str] = field(default=str, repr=False)

    def __getitem__(self, name: str) -> Any:
        """Return a capture.

        Raises:
            UnknownCapture: Nothing was captured under this name.
            Exception: The error that ended the run, when that was before the capture.
        """
        if self.error is not None and name not in self.captures:
            raise self.error
        return captured(self.captures, name)

    @property
    def text(self) -> str:
        """The exact text of the path at the end, special tokens included."""
        return self._decode(self.token_ids, skip_special_tokens=False)

    @property
    def usage(self) -> Usage:
        """The sums over all requests of the run."""
        return self.trace.usage


@dataclass(frozen=True, slots=True, eq=False)
class Job:
    """A run to be. It is run once."""

    function: Callable[..., Any]
    scope: Scope
    state: State
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]

    def run(self) -> Run:
        """Run it in this thread.

        Raises:
            Exception: Whatever the function raised.
        """
        if inspect.iscoroutinefunction(self.function):
            return asyncio.run(self.arun())
        try:
            return self._ended(self.function(self.state, *self.args, **self.kwargs))
        finally:
            self.scope.close()

    async def arun(self) -> Run:
        """Run it in this event loop, or in a thread if its function is not asynchronous."""
        try:
            if inspect.iscoroutinefunction(self.function):
                return self._ended(await self.function(self.state, *self.args, **self.kwargs))
            return self._ended(await self._in_thread())
        finally:
            self.scope.close()

    def run_or_fail(self) -> Run:
        """Do as `run`, but return an error in the run."""
        try:
            return self.run()
        except Exception as error:
            return self._ended(None, error)

    async def arun_or_fail(self) -> Run:
        """Do as `arun`, but return an error in the run."""
        try:
            return await self.arun()
        except Exception as error:
            return self._ended(None, error)

    async def _in_thread(self) -> Any:
        """Run the function in a thread of its own: asyncio's pool is too small for many runs that wait."""
        pool = ThreadPoolExecutor(1, thread_name_prefix=self.scope.trace.program)
        try:
            return await asyncio.get_running_loop().run_in_executor(
                pool, lambda: self.function(self.state, *self.args, **self.kwargs)
            )
        finally:
            pool.shutdown(wait=False)

    def _ended(self, value: Any, error: Exception | None = None) -> Run:
        decode = self.scope.engine.tokenizer.decode
        return Run(value, self.state.captures, self.state.token_ids, self.scope.trace, error, decode)
