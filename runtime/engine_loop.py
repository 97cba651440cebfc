"""The engine's thread: it alone touches the scheduler, the tree and the tensors, so none of them needs a lock.

Others hand it commands, which it takes up between two steps. A step is three calls: schedule, run, postprocess.
"""

from __future__ import annotations

import atexit
import contextlib
import heapq
import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import TypeVar

import torch

from phloem.runtime.batch import Batch
from phloem.runtime.errors import (
    CacheFull,
    EngineClosed,
    GrammarError,
    InvalidRequest,
    PromptTooLong,
    QueueFull,
    StepFailed,
)
from phloem.runtime.fan_out import Child, FanOut, check_room, fail
from phloem.runtime.in_flight import InFlight, Launcher
from phloem.runtime.model_runner import ModelRunner, RowResult
from phloem.runtime.output import OutputStream
from phloem.runtime.outputs import EngineStats
from phloem.runtime.path import Path
from phloem.runtime.request import Phase, Request
from phloem.runtime.sampling_params import SamplingParams
from phloem.runtime.scheduler import Scheduler
from phloem.runtime.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

Value = TypeVar("Value")
Command = Callable[[], None]

FEW_DEADLINES = 64
"""So many of requests that ended are no matter."""


class EngineLoop:
    """Runs steps while there is work, and commands in between. Owns the requests' output streams."""

    def __init__(
        self,
        scheduler: Scheduler,
        runner: ModelRunner,
        tokenizer: Tokenizer,
        *,
        num_threads: int | None = None,
        runs_ahead: bool = False,
    ) -> None:
        """Start the thread; with `runs_ahead`, decode steps are launched before the results of those before are known."""
        self._launcher = Launcher(runner) if runs_ahead else None
        self._in_flight: InFlight | None = None
        self.scheduler = scheduler
        self.runner = runner
        self.tokenizer = tokenizer
        self._unstarted: dict[str, tuple[Child, Path]] = {}
        """Children whose path is still being computed, and that path, by request id."""
        self._deadlines: list[tuple[float, str]] = []
        """A heap of (time, request id); requests that ended leave theirs behind for a while."""
        self._streams: dict[str, OutputStream] = {}
        self._commands: queue.SimpleQueue[Command] = queue.SimpleQueue()
        self._closing = False
        self._is_closed = False
        self._posting = threading.RLock()
        """Held to post a command and to close, so that no command is posted which nobody will run. Reentrant, since a
        collected branch posts its release, and the garbage collector may run here."""
        self._num_threads = num_threads
        self._scheduler_s = 0.0
        self._steps = self._computed = self._generated = self._forced = self._failed_steps = 0
        # A daemon, so that a program which forgets to close its engine can still end; at its end the loop is closed first,
        # since a thread that is killed in the middle of a tensor operation takes the process down with it.
        self._thread = threading.Thread(target=self._main, name="phloem-engine", daemon=True)
        atexit.register(self.close)
        self._thread.start()

    # From any thread

    def submit(self, stream: OutputStream) -> None:
        """Queue a request; its chunks go to its stream's sink from now on.

        Raises:
            EngineClosed: The engine was closed.
        """
        self._post(lambda: self._add(stream))

    def fan_out(self, path: Path, children: Sequence[Child], *, keeps_path: bool = False) -> None:
        """Compute a path up to its last token, then start children on forks of it, in their order.

        Args:
            path: Of a branch, or a new one.
            children: What to start.
            keeps_path: Whether what was computed stays with the path, as a branch wants it.

        Raises:
            EngineClosed: The engine was closed.
        """
        self._post(lambda: self._fan_out(path, children, keeps_path=keeps_path))

    def release(self, path: Path) -> None:
        """Give back all that a branch's path holds, and abort what runs on it. Does not wait; nothing happens after close."""
        with contextlib.suppress(EngineClosed):
            self._post(lambda: self._release(path))

    def abort(self, request_id: str) -> None:
        """End a request at the next step, in whatever phase it is. An unknown or finished one is left alone."""
        # After close, there is nothing left to abort.
        with contextlib.suppress(EngineClosed):
            self._post(lambda: self._abort(request_id))

    def drop(self, children: Sequence[Child]) -> None:
        """Abort children, and give back their paths, also of those that start meanwhile. Does not wait; nothing happens after close."""
        with contextlib.suppress(EngineClosed):
            self._post(lambda: self._drop(children))

    def call(self, function: Callable[[], Value]) -> Future[Value]:
        """Run a function in the engine's thread, between two steps.

        Raises:
            EngineClosed: The engine was closed.
        """
        future: Future[Value] = Future()
        self._post(lambda: _run_into(future, function))
        return future

    @property
    def is_closed(self) -> bool:
        """Whether commands are taken no more."""
        return self._is_closed

    def close_soon(self) -> None:
        """Ask for the end of all requests and of the thread, without waiting. Safe in a finalizer."""
        with contextlib.suppress(EngineClosed):
            self._post(self._close)

    def close(self) -> None:
        """End all requests and the thread. A second call does nothing."""
        self.close_soon()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def stats(self) -> EngineStats:
        """Counters of the loop and of what it owns. Only for the engine's thread: go through `call`."""
        return EngineStats(
            cache=self.scheduler.paths.stats(),
            kept_tails=len(self.scheduler.paths.tails),
            dropped_tails=self.scheduler.paths.tails.num_dropped,
            running=len(self.scheduler.running),
            waiting=len(self.scheduler.waiting),
            steps=self._steps,
            computed_tokens=self._computed,
            generated_tokens=self._generated,
            forced_tokens=self._forced,
            preemptions=self.scheduler.preemptions,
            failed_steps=self._failed_steps,
            scheduler_s=self._scheduler_s,
        )

    def _post(self, command: Command) -> None:
        with self._posting:
            if self._is_closed:
                raise EngineClosed("the engine is closed; make a new one")
            self._commands.put(command)

    # In the engine's thread

    def _main(self) -> None:
        if self._num_threads is not None:
            torch.set_num_threads(self._num_threads)
        reason = "the engine was closed before the request ended"
        try:
            while not self._closing:
                self._run_commands()
                if not self._closing and self.scheduler.has_work:
                    self._step()
        except Exception as error:
            # Only a bug of phloem's own comes here. Nobody may wait for ever because of it.
            logger.exception("the engine's loop failed")
            reason = (
                f"the engine stopped on an internal error, please report it: {type(error).__name__}: {error}"
            )
        with self._posting:
            self._is_closed = True
        # What was posted before that still gets its answer.
        while not self._commands.empty():
            _guarded(self._commands.get())
        self._end_all(EngineClosed(reason))
        self.runner.close()
        atexit.unregister(self.close)

    def _run_commands(self) -> None:
        """Run what is queued, with nothing in flight; with no request to work on, wait for a command."""
        if self._in_flight is not None and not (self._commands.empty() and self.scheduler.has_work):
            self._land(None)
        if not self.scheduler.has_work:
            _guarded(self._commands.get())
        while not self._closing and not self._commands.empty():
            _guarded(self._commands.get())

    def _step(self) -> None:
        self._expire()
        if self._in_flight is not None:
            self._go_on()
            return
        started_s = time.perf_counter()
        batch = self.scheduler.schedule()
        self._scheduler_s += time.perf_counter() - started_s
        # Also when there are no rows: what was admitted with nothing to compute is forked from before anything else runs.
        self.runner.copy_rows(batch.copies)
        for refusal in batch.refused:
            self._streams.pop(refusal.request.id).fail(refusal.error)
        for request in batch.computed:
            self._finish_computed(request)
        if not batch.rows:
            return
        try:
            if self._launcher is not None and self._launcher.can_launch(batch):
                self._in_flight = self._launcher.launch(batch)
                return
            results = self.runner.run(batch)
        except Exception as error:
            self._fail_step(batch, error)
        else:
            self._postprocess(batch, results)

    def _go_on(self) -> None:
        """Launch the step after the one in flight, if its rows can be told, and take up the results of that one meanwhile."""
        assert self._launcher is not None
        assert self._in_flight is not None
        started_s = time.perf_counter()
        batch = self.scheduler.following(self._in_flight.batch)
        self._scheduler_s += time.perf_counter() - started_s
        try:
            following = None if batch is None else self._launcher.launch_after(self._in_flight, batch)
        except Exception as error:
            self._land(None)
            assert batch is not None
            self._fail_step(batch, error)
        else:
            self._land(following)

    def _land(self, following: InFlight | None) -> None:
        """Take up the results of the step in flight; `following` is in flight now."""
        landed, self._in_flight = self._in_flight, following
        assert landed is not None
        try:
            results = landed.results()
        except Exception as error:
            self._fail_step(landed.batch, error)
        else:
            self._postprocess(landed.batch, results)

    def _postprocess(self, batch: Batch, results: list[RowResult]) -> None:
        self._steps += 1
        self._computed += batch.num_tokens
        # What ended while the step was in flight wants no result.
        results = [result for result in results if result.row.request.phase is Phase.RUNNING]
        for result in results:
            if not result.is_finite:
                self._fail(result.row.request.id, StepFailed("the model's numbers became NaN or infinite"))
        started_s = time.perf_counter()
        self.scheduler.commit([result.row for result in results if result.is_finite])
        self._scheduler_s += time.perf_counter() - started_s
        for result in results:
            if result.is_finite:
                self._deliver(result)

    def _deliver(self, result: RowResult) -> None:
        request = result.row.request
        stream = self._streams[request.id]
        try:
            self._extend(stream, result)
        except GrammarError as error:
            self._fail(request.id, error)
            return
        except Exception as error:
            logger.exception("the output of request %s failed", request.id)
            self._fail(request.id, StepFailed(f"its output failed: {type(error).__name__}: {error}"))
            return
        self._finish_if_ended(stream)
        if not request.samples and request.num_pending == 0:
            self._finish_computed(request)

    def _finish_if_ended(self, stream: OutputStream) -> None:
        if stream.finish_reason is not None:
            self.scheduler.finish(stream.request)
            del self._streams[stream.request.id]
            stream.close()

    def _extend(self, stream: OutputStream, result: RowResult) -> None:
        """Append what was sampled, and then what the grammar forces, which takes no step of its own (fast-forward)."""
        if result.error is not None:
            raise result.error
        tokens = stream.request.tokens
        if result.token_id is not None:
            tokens.append(result.token_id)
            self._generated += 1
        stream.take(result)
        if result.token_id is not None:
            self._force(stream)

    def _force(self, stream: OutputStream) -> None:
        for token_id in stream.forced_ids():
            if stream.finish_reason is not None:
                return
            stream.request.tokens.append(token_id)
            self._forced += 1
            stream.take_forced(token_id)

    def _finish_computed(self, request: Request) -> None:
        """End a request that samples nothing: all of its path is computed now."""
        stream = self._streams.pop(request.id)
        self.scheduler.finish(request)
        stream.complete()

    def _fail_step(self, batch: Batch, error: Exception) -> None:
        logger.error("a step of %d tokens failed", batch.num_tokens, exc_info=error)
        self._failed_steps += 1
        for row in batch.rows:
            if row.request.phase is Phase.FINISHED:
                continue
            failure = StepFailed(
                f"the step that computed this request failed: {type(error).__name__}: {error}"
            )
            failure.__cause__ = error
            self._fail(row.request.id, failure)

    def _fail(self, request_id: str, error: Exception) -> None:
        stream = self._streams.pop(request_id)
        self.scheduler.finish(stream.request)
        stream.fail(error)

    def _add(self, stream: OutputStream) -> None:
        request = stream.request
        if request.keeps_path and (self.scheduler.is_busy(request.path) or request.output_ids):
            # Also when another thread appended to the branch while this request was made for it as it was.
            request.phase = Phase.FINISHED
            stream.fail(InvalidRequest("the branch is busy; wait for the end, or fork it", field="branch"))
            return
        try:
            self.scheduler.add(request)
        except (CacheFull, QueueFull) as error:
            if not request.keeps_path:
                self.scheduler.paths.release(request.path)
            request.phase = Phase.FINISHED
            stream.fail(error)
            return
        self._streams[request.id] = stream
        if request.deadline_s is not None:
            self._expect(request.deadline_s, request.id)
        try:
            self._force(stream)
        except GrammarError as error:
            self._fail(request.id, error)
        else:
            self._finish_if_ended(stream)

    def _expect(self, deadline_s: float, request_id: str) -> None:
        """Note a deadline; forget those of requests that ended, once they are most of them. O(log requests), amortised."""
        if len(self._deadlines) > 2 * len(self._streams) + FEW_DEADLINES:
            self._deadlines = [each for each in self._deadlines if each[1] in self._streams]
            heapq.heapify(self._deadlines)
        heapq.heappush(self._deadlines, (deadline_s, request_id))

    def _expire(self) -> None:
        """End the requests whose deadline has passed."""
        while self._deadlines and self._deadlines[0][0] <= time.monotonic():
            _, request_id = heapq.heappop(self._deadlines)
            stream = self._streams.pop(request_id, None)
            if stream is not None:
                self.scheduler.finish(stream.request)
                stream.expire()

    def _fan_out(self, path: Path, children: Sequence[Child], *, keeps_path: bool) -> None:
        try:
            check_room(children, len(path.tokens))
        except PromptTooLong as error:
            fail(children, error)
            return
        paths = self.scheduler.paths
        fork = not keeps_path or self.scheduler.is_busy(path)
        source = paths.fork(path, len(path.tokens)) if fork else path
        self._unstarted.update({child.request_id: (child, source) for child in children})

        def start(child: Child) -> Request:
            del self._unstarted[child.request_id]
            stream = self._stream_of(child, paths.fork(source, len(source.tokens)))
            self._add(stream)
            return stream.request

        def on_end() -> None:
            for child in children:
                self._unstarted.pop(child.request_id, None)
            if fork:
                paths.release(source)

        if not paths.prefix_cache:
            # Nothing would be shared, so there is nothing to compute first.
            for child in children:
                start(child)
            on_end()
            return
        request = Request(
            id=f"{children[0].request_id}/path",
            path=source,
            params=SamplingParams(),
            seed=0,
            max_len=len(source.tokens),
            keeps_path=True,
            deadline_s=children[0].deadline_s,
        )
        self._add(OutputStream(request, FanOut(children, start=start, on_end=on_end), self.tokenizer))

    def _stream_of(self, child: Child, path: Path) -> OutputStream:
        return OutputStream(child.request_on(path), child.sink, self.tokenizer)

    def _release(self, path: Path) -> None:
        for request in list(self.scheduler.requests_on(path)):
            self._abort(request.id)
        self.scheduler.paths.release(path)

    def _abort(self, request_id: str) -> None:
        stream = self._streams.pop(request_id, None)
        if stream is not None:
            self.scheduler.finish(stream.request)
            stream.abort()
        elif request_id in self._unstarted:
            child, source = self._unstarted.pop(request_id)
            self._stream_of(child, Path(source.namespace, source.tokens[:])).abort()
            self._stop_if_unwanted(source)

    def _drop(self, children: Sequence[Child]) -> None:
        for child in children:
            self._abort(child.request_id)
            if child.request is not None:
                self.scheduler.paths.release(child.request.path)

    def _stop_if_unwanted(self, source: Path) -> None:
        """Stop computing a path for children of which none is left."""
        if any(path is source for _, path in self._unstarted.values()):
            return
        for request in list(self.scheduler.requests_on(source)):
            if not request.samples:
                self._abort(request.id)

    def _close(self) -> None:
        self._closing = True

    def _end_all(self, error: Exception) -> None:
        for request_id in list(self._streams):
            stream = self._streams.pop(request_id)
            stream.request.phase = Phase.FINISHED
            stream.fail(error)


def _run_into(future: Future[Value], function: Callable[[], Value]) -> None:
    if not future.set_running_or_notify_cancel():
        return
    try:
        future.set_result(function())
    except Exception as error:
        future.set_exception(error)


def _guarded(command: Command) -> None:
    """Run a command; whatever goes wrong with it is its own affair, not that of the requests under way."""
    try:
        command()
    except Exception:
        logger.exception("a command to the engine failed")
