"""Generating children of many branches at once, without a barrier between them."""

from __future__ import annotations

import asyncio
import itertools
import queue
import weakref
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass

from phloem.runtime.branch import Branch
from phloem.runtime.engine_core import EngineCore, check_expansion
from phloem.runtime.errors import InvalidRequest
from phloem.runtime.fan_out import Child
from phloem.runtime.generation import AsyncGeneration, AsyncSink, Item, Progress
from phloem.runtime.prompts import is_list
from phloem.runtime.sampling_params import SamplingParams

Event = tuple["ChildSink", Item]


class ChildSink:
    """One child's end of the queue that all children share."""

    def __init__(self, events: queue.SimpleQueue[Event]) -> None:
        self._events = events

    def put(self, item: Item) -> None:
        """Pass on what matters here: the end, or an error."""
        if isinstance(item, Exception) or item.completion is not None:
            self._events.put((self, item))


@dataclass(frozen=True, slots=True)
class Born:
    """A child that is done."""

    family: int
    """What the `add` that it comes from returned."""

    index: int
    """Its number; the first of an `add` has that call's `first`."""

    branch: Branch
    """With its `completion`."""


@dataclass(frozen=True, slots=True, eq=False)
class _Expected:
    family: int
    child: Child


class Expansion:
    """Children under way; more can be added between two of them. Iterate over it to get each as soon as it is done.

    The iteration ends when none is under way; after another `add` it can be taken up again. Leaving the `with` block, or
    losing the last reference, aborts and releases those that were not handed out. For one thread at a time.
    """

    def __init__(self, core: EngineCore) -> None:
        self._core = core
        self._events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self._expected: dict[ChildSink, _Expected] = {}
        self._families = itertools.count()
        self._finalizer = weakref.finalize(self, _drop, core, self._expected)
        self._finalizer.atexit = False

    def __enter__(self) -> Expansion:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def __len__(self) -> int:
        return len(self._expected)

    def add(self, branch: Branch, n: int, params: SamplingParams | None = None, *, first: int = 0) -> int:
        """Start n children of a branch, numbered from `first`; child i draws from (seed, i). Return the family's number.

        Raises:
            InvalidRequest: `branch` is of another engine, or `n`, `first` or a parameter is wrong.
            PromptTooLong: The path leaves no room for a token more.
        """
        params = check_expansion(self._core, n, params)
        if not isinstance(first, int) or isinstance(first, bool) or first < 0:
            raise InvalidRequest(f"first must be a whole number of at least 0, not {first!r}", field="first")
        _check_branches(self._core, [branch])
        sinks = [ChildSink(self._events) for _ in range(n)]
        children = self._core.children(len(branch), params, sinks, keeps_path=True, first=first)
        family = next(self._families)
        self._expected.update(
            {sink: _Expected(family, child) for sink, child in zip(sinks, children, strict=True)}
        )
        branch.fan_out(children)
        return family

    def __iter__(self) -> Iterator[Born]:
        """Yield the children in the order in which they finish.

        Raises:
            PhloemError: A child failed; the others are still under way.
        """
        while self._expected:
            sink, item = self._events.get()
            expected = self._expected.pop(sink)
            if isinstance(item, Exception):
                self._core.drop([expected.child])
                raise item
            request = expected.child.request
            assert request is not None
            yield Born(
                expected.family, expected.child.index, Branch(self._core, request.path, item.completion)
            )

    def abort(self) -> None:
        """Abort what is under way; it is handed out all the same, with what there is of it. From any thread."""
        for expected in list(self._expected.values()):
            self._core.abort(expected.child.request_id)

    def close(self) -> None:
        """Abort and release what is under way."""
        _drop(self._core, self._expected)


def expand(
    core: EngineCore, branches: Sequence[Branch], n: int, params: SamplingParams | None
) -> Iterator[Branch]:
    """Start n children of each branch, and yield them as they finish.

    Arguments are checked at once; the children start with the first `next`. What has not finished when the iterator is
    closed, or fails, is aborted and released.
    """
    params = check_expansion(core, n, params)
    _check_branches(core, branches)
    return _run(core, branches, n, params)


def _run(core: EngineCore, branches: Sequence[Branch], n: int, params: SamplingParams) -> Iterator[Branch]:
    with Expansion(core) as expansion:
        for branch in branches:
            expansion.add(branch, n, params)
        for born in expansion:
            yield born.branch


async def aexpand(
    core: EngineCore, branches: Sequence[Branch], n: int, params: SamplingParams | None
) -> AsyncIterator[Branch]:
    """Do as `expand`, for an event loop."""
    await core.prepare(params)
    params = check_expansion(core, n, params)
    _check_branches(core, branches)
    left: dict[str, Child] = {}

    async def result(branch: Branch, child: Child, sink: AsyncSink) -> tuple[Child, Branch]:
        done = await AsyncGeneration(sink, Progress(child.request_id, core.abort)).result()
        return child, branch.branch_of(child, done)

    tasks = []
    try:
        for branch in branches:
            sinks = [AsyncSink() for _ in range(n)]
            children = core.children(len(branch), params, sinks, keeps_path=True)
            left.update({child.request_id: child for child in children})
            branch.fan_out(children)
            tasks += [
                asyncio.ensure_future(result(branch, child, sink))
                for child, sink in zip(children, sinks, strict=True)
            ]
        for task in asyncio.as_completed(tasks):
            child, born = await task
            del left[child.request_id]
            yield born
    finally:
        for each in tasks:
            each.cancel()
        core.drop(left.values())


def _check_branches(core: EngineCore, branches: Sequence[Branch]) -> None:
    """Check what is to be expanded.

    Raises:
        InvalidRequest: They are no list of branches of this engine.
        PromptTooLong: A path leaves no room for a token more.
    """
    if not is_list(branches):
        raise InvalidRequest(
            f"branches must be a list of branches, not {type(branches).__name__}", field="branches"
        )
    for index, branch in enumerate(branches):
        name = f"branches[{index}]"
        if not isinstance(branch, Branch):
            raise InvalidRequest(f"{name} must be a Branch, not {type(branch).__name__}", field=name)
        if not branch.belongs_to(core):
            raise InvalidRequest(f"{name} belongs to another engine, which holds its KV", field=name)
        core.check_length(len(branch), new_tokens=1, name=name)


def _drop(core: EngineCore, expected: dict[ChildSink, _Expected]) -> None:
    core.drop([each.child for each in expected.values()])
    expected.clear()
