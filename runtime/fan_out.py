"""One path computed once, then several requests that go on from its end: `n`, `expand` and `score` are all this.

The last token is for the children to compute, in their own first step; continuations that are scored compute it once for all of
them that start together (`twins.py`).
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from phloem.runtime.errors import BranchReleased, PromptTooLong
from phloem.runtime.generation import Item, Sink
from phloem.runtime.grammar import Constraint
from phloem.runtime.path import Path
from phloem.runtime.request import Request
from phloem.runtime.sampling_params import SamplingParams


@dataclass(slots=True, eq=False)
class Child:
    """A request that will start from a fork of a path, once that is computed."""

    request_id: str
    params: SamplingParams
    seed: int
    index: int
    sink: Sink
    max_new_tokens: int
    """Tokens to generate; 0 to compute and score only."""

    max_len: int
    """Longest that its path may get, all included: the parent may have grown since the child was made."""

    appended: array[int] = field(default_factory=lambda: array("i"))
    """Tokens between the end of the path and what is generated."""

    is_scored: bool = False
    """Whether the log-probabilities of `appended` are wanted."""

    candidate_ids: tuple[int, ...] = ()
    constraint: Constraint | None = None
    keeps_path: bool = False
    deadline_s: float | None = None
    request: Request | None = None
    """Set when it starts, or when it is aborted before."""

    def request_on(self, fork: Path) -> Request:
        """Make the request, on its own fork of the parent's path."""
        parent_len = len(fork.tokens)
        fork.tokens.extend(self.appended)
        self.request = Request(
            id=self.request_id,
            path=fork,
            params=self.params,
            seed=self.seed,
            max_len=min(self.max_len, len(fork.tokens) + self.max_new_tokens),
            child_index=self.index,
            logits_from=parent_len - 1 if self.is_scored else None,
            candidate_ids=self.candidate_ids,
            constraint=self.constraint,
            keeps_path=self.keeps_path,
            deadline_s=self.deadline_s,
        )
        return self.request


def check_room(children: Sequence[Child], path_len: int) -> None:
    """Check that every child fits after a path of so many tokens.

    Raises:
        PromptTooLong: One does not.
    """
    for child in children:
        needed = len(child.appended) + (child.max_new_tokens > 0)
        if path_len + needed > child.max_len:
            raise PromptTooLong(
                f"the path has {path_len} tokens by now, and {needed} more would exceed the limit of {child.max_len}"
            )


class FanOut:
    """The sink of a request that computes a path; starts the children when it has. Lives in the engine's thread."""

    def __init__(
        self,
        children: Sequence[Child],
        *,
        start: Callable[[Child], Request],
        on_end: Callable[[], None],
    ) -> None:
        """Take what to do at the end."""
        self._children = children
        self._start = start
        self._on_end = on_end

    def put(self, item: Item) -> None:
        """Take the end of the computation: start the children, or pass the error on to all of them."""
        # Those that were aborted meanwhile have had their end.
        waiting = [child for child in self._children if child.request is None]
        if isinstance(item, Exception):
            fail(waiting, item)
        elif item.completion is not None and item.completion.finish_reason == "abort":
            fail(waiting, BranchReleased("the branch was released before its children could start"))
        elif item.completion is not None:
            requests = [self._start(child) for child in waiting]
            # What the path itself had to compute is counted once, with the first child.
            for request in requests[:1]:
                request.cached_tokens = item.completion.usage.cached_tokens
        self._on_end()


def fail(children: Sequence[Child], error: Exception) -> None:
    """End children that have not started with an error."""
    for child in children:
        child.sink.put(error)
