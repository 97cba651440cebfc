"""Generating children of many branches at once, without a barrier between them."""

from __future__ import annotations

import queue
from collections.abc import Iterator, Sequence

from phloem.runtime.branch import Branch, check_expansion
from phloem.runtime.engine_core import EngineCore
from phloem.runtime.fan_out import Child
from phloem.runtime.generation import Item
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


def expand(
    core: EngineCore, branches: Sequence[Branch], n: int, params: SamplingParams | None
) -> Iterator[tuple[int, Branch]]:
    """Start n children of each branch, and yield (number, child) as they finish, numbered branch by branch.

    Arguments are checked at once; the children start with the first `next`. What has not finished when the iterator is
    closed, or fails, is aborted and released.
    """
    params = check_expansion(core, n, params)
    events: queue.SimpleQueue[Event] = queue.SimpleQueue()
    families = []
    for index, branch in enumerate(branches):
        core.check_length(len(branch), new_tokens=1, name=f"branches[{index}]")
        sinks = [ChildSink(events) for _ in range(n)]
        families.append((branch, core.children(len(branch), params, sinks, keeps_path=True)))
    return _run(core, families, events)


def _run(
    core: EngineCore, families: list[tuple[Branch, list[Child]]], events: queue.SimpleQueue[Event]
) -> Iterator[tuple[int, Branch]]:
    children = [child for _, of_branch in families for child in of_branch]
    numbers = {child.sink: number for number, child in enumerate(children)}
    try:
        for branch, of_branch in families:
            branch.fan_out(of_branch)
        while numbers:
            sink, item = events.get()
            number = numbers.pop(sink)
            if isinstance(item, Exception):
                raise item
            request = children[number].request
            assert request is not None
            yield number, Branch(core, request.path, item.completion)
    finally:
        core.drop([children[number] for number in numbers.values()])
