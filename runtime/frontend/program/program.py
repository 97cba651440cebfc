"""Programs: Python functions over a state, run once, as a stream, or over many inputs at the same time."""

from __future__ import annotations

import asyncio
import functools
import queue
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal
from weakref import WeakKeyDictionary

from phloem.radix import Namespace
from phloem.runtime.engine import Engine
from phloem.runtime.errors import InvalidRequest
from phloem.runtime.frontend.program.choose import KnownOptions
from phloem.runtime.frontend.program.job import Job, Run
from phloem.runtime.frontend.program.roles import Roles
from phloem.runtime.frontend.program.scope import Piece, Scope
from phloem.runtime.frontend.program.state import State
from phloem.runtime.frontend.program.tokens import TokenPath
from phloem.runtime.frontend.program.trace import Trace
from phloem.runtime.progress import track

OnError = Literal["keep", "raise"]
MAX_CONCURRENCY = 1024


class Program:
    """A program, made by the decorator `program`. Call it with a state to run it as a part of another one.

    Its function takes a `State` and the caller's arguments; it may be asynchronous, and then awaits `agen` and its siblings.
    """

    def __init__(self, function: Callable[..., Any], *, namespace: Namespace | None = None) -> None:
        self._function = function
        self._namespace = namespace
        self._roles: WeakKeyDictionary[Engine, Roles] = WeakKeyDictionary()
        self._options: WeakKeyDictionary[Engine, KnownOptions] = WeakKeyDictionary()
        functools.update_wrapper(self, function)
        self.name = str(getattr(function, "__name__", "program"))

    def __call__(self, state: State, *args: Any, **kwargs: Any) -> Any:
        """Run it on the state of another program, and return its value (to be awaited, if its function is asynchronous).

        Raises:
            InvalidRequest: The first argument is no state.
        """
        if not isinstance(state, State):
            raise InvalidRequest(
                f"{self.name} is a program: call it with a state, or {self.name}.run(engine, ...), "
                f"not with {type(state).__name__}",
                field="state",
            )
        return self._function(state, *args, **kwargs)

    def within(self, namespace: Namespace) -> Program:
        """Return the same program with a namespace that keeps its cache apart."""
        return Program(self._function, namespace=namespace)

    def run(self, engine: Engine, *args: Any, **kwargs: Any) -> Run:
        """Run the program and wait for its end.

        Raises:
            PhloemError: An operation failed; the message ends with the program's line.
            Exception: Whatever the function raised.
        """
        return self._job(engine, args, kwargs).run()

    async def arun(self, engine: Engine, *args: Any, **kwargs: Any) -> Run:
        """Do as `run`, for an event loop; a function that is not asynchronous runs in a thread. Cancelling it ends the run."""
        return await self._job(engine, args, kwargs).arun()

    def stream(self, engine: Engine, *args: Any, **kwargs: Any) -> Iterator[Piece]:
        """Run the program, and yield what it generates as it comes; the last piece has the `run`.

        Of a `gen` with `n` above 1, nothing is yielded. The run begins with the first `next`; leaving the loop early ends it.

        Raises:
            Exception: As `run`.
        """
        pieces: queue.SimpleQueue[Piece | BaseException] = queue.SimpleQueue()
        job = self._job(engine, args, kwargs, on_piece=pieces.put)
        return _pieces(job, pieces)

    async def astream(self, engine: Engine, *args: Any, **kwargs: Any) -> AsyncIterator[Piece]:
        """Do as `stream`, for an event loop. Closing the iterator ends the run."""
        pieces: asyncio.Queue[Piece] = asyncio.Queue()
        loop = asyncio.get_running_loop()
        job = self._job(engine, args, kwargs, on_piece=lambda piece: _put(loop, pieces, piece))
        task = asyncio.ensure_future(job.arun())
        # Wakes the loop below; pieces of the run's thread were put before.
        task.add_done_callback(lambda _: pieces.put_nowait(Piece("")))
        try:
            while not (task.done() and pieces.empty()):
                piece = await pieces.get()
                if piece.text:
                    yield piece
            yield Piece("", run=task.result())
        finally:
            task.cancel()
            job.scope.close()

    def map(
        self,
        engine: Engine,
        inputs: Sequence[Any],
        *,
        concurrency: int = 16,
        on_error: OnError = "keep",
        progress: bool = True,
    ) -> list[Run]:
        """Run the program on many inputs, several at a time; what they share is computed once.

        Args:
            engine: Where to run.
            inputs: Each is the program's argument; a tuple is several arguments, a mapping is arguments by name.
            concurrency: Runs at the same time.
            on_error: "keep": a run that fails has its `error`, and the others go on. "raise": an error ends them all.
            progress: Show a progress bar when standard error is a terminal.

        Returns:
            The runs, in the order of the inputs.

        Raises:
            InvalidRequest: An argument is wrong.
            Exception: The error of the first input that failed, if `on_error` is "raise".
        """
        jobs = self._jobs(engine, inputs, concurrency, on_error)
        pool = ThreadPoolExecutor(concurrency, thread_name_prefix=self.name)
        try:
            futures = [pool.submit(job.run if on_error == "raise" else job.run_or_fail) for job in jobs]
            return [future.result() for future in track(futures, self.name, show=progress)]
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            for job in jobs:
                job.scope.close()
            raise
        finally:
            pool.shutdown()

    async def amap(
        self, engine: Engine, inputs: Sequence[Any], *, concurrency: int = 16, on_error: OnError = "keep"
    ) -> list[Run]:
        """Do as `map`, for an event loop, without a progress bar. Cancelling it ends all runs."""
        jobs = self._jobs(engine, inputs, concurrency, on_error)
        turns = asyncio.Semaphore(concurrency)

        async def run(job: Job) -> Run:
            async with turns:
                return await (job.arun() if on_error == "raise" else job.arun_or_fail())

        tasks = [asyncio.ensure_future(run(job)) for job in jobs]
        try:
            return list(await asyncio.gather(*tasks))
        finally:
            for task in tasks:
                task.cancel()

    def _jobs(self, engine: Engine, inputs: Sequence[Any], concurrency: int, on_error: str) -> list[Job]:
        if isinstance(inputs, str | bytes | Mapping) or not isinstance(inputs, Sequence):
            raise InvalidRequest(f"inputs must be a list, not {type(inputs).__name__}", field="inputs")
        whole = isinstance(concurrency, int) and not isinstance(concurrency, bool)
        if not whole or not 1 <= concurrency <= MAX_CONCURRENCY:
            raise InvalidRequest(
                f"concurrency must be a whole number from 1 to {MAX_CONCURRENCY}, not {concurrency!r}",
                field="concurrency",
            )
        if on_error not in ("keep", "raise"):
            raise InvalidRequest(f"on_error must be 'keep' or 'raise', not {on_error!r}", field="on_error")
        jobs = []
        for each in inputs:
            args = each if isinstance(each, tuple) else () if isinstance(each, Mapping) else (each,)
            kwargs = each if isinstance(each, Mapping) else {}
            jobs.append(self._job(engine, args, kwargs))
        return jobs

    def _job(
        self,
        engine: Engine,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        *,
        on_piece: Callable[[Piece], None] | None = None,
    ) -> Job:
        path = TokenPath.empty(_checked(engine, self.name), self._namespace)
        roles = self._roles.get(engine) or self._roles.setdefault(engine, Roles(engine))
        options = self._options.get(engine) or self._options.setdefault(
            engine, KnownOptions(engine.tokenizer.encode_continuation)
        )
        scope = Scope(engine, roles, options, Trace(self.name), on_piece)
        return Job(self._function, scope, State(scope, path), args, kwargs)


def program(function: Callable[..., Any]) -> Program:
    """Make a program of a function whose first argument is its `State`; for use as a decorator."""
    return Program(function)


def _checked(engine: object, name: str) -> Engine:
    if not isinstance(engine, Engine):
        raise InvalidRequest(
            f"a program runs on an Engine: {name}.run(engine, ...), not on {type(engine).__name__}",
            field="engine",
        )
    return engine


def _pieces(job: Job, pieces: queue.SimpleQueue[Piece | BaseException]) -> Iterator[Piece]:
    def run() -> None:
        try:
            pieces.put(Piece("", run=job.run()))
        except BaseException as error:
            pieces.put(error)

    threading.Thread(target=run, name=job.scope.trace.program, daemon=True).start()
    try:
        while True:
            piece = pieces.get()
            if isinstance(piece, BaseException):
                raise piece
            yield piece
            if piece.run is not None:
                return
    finally:
        job.scope.close()


def _put(loop: asyncio.AbstractEventLoop, pieces: asyncio.Queue[Piece], piece: Piece) -> None:
    loop.call_soon_threadsafe(pieces.put_nowait, piece)
