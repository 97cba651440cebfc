"""The token paths behind SGLang's states.

SGLang's interpreter keeps a state as text, and forks it by copying the text; here each state has a path of tokens beside it. What the
text gained since is tokenised alone and appended when something is to be computed; what was generated or chosen is on the path
already. A fork takes its parent's path up to the place where it was forked, with all KV.
"""

from __future__ import annotations

import threading
import weakref
from array import array
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from sglang.lang.interpreter import StreamExecutor
from sglang.lang.ir import SglCommitLazy, SglConcateAndAppend, SglExprList, SglGen, SglSelect

from phloem.radix import Namespace
from phloem.runtime.branch import Branch
from phloem.runtime.engine import Engine
from phloem.runtime.errors import BranchReleased, InvalidRequest
from phloem.runtime.frontend.program.calls import BLOCKING, finish
from phloem.runtime.frontend.program.tokens import TokenPath


class Mark(NamedTuple):
    """A place that text and tokens have in common."""

    num_characters: int
    num_tokens: int


@dataclass(frozen=True, slots=True)
class Covered:
    """The text that a path stands for. Frozen, so that forks may read it from their threads."""

    text: str = ""
    marks: tuple[Mark, ...] = ()
    """In order; the last one is at the end of the text."""

    def plus(self, text: str, num_tokens: int) -> Covered:
        """Return what is covered when the path has `num_tokens` and the text goes on. O(len(text) + marks)."""
        whole = self.text + text
        return Covered(whole, (*self.marks, Mark(len(whole), num_tokens)))

    def beginning(self, text: str) -> Covered:
        """Return the longest part, up to a mark, that another text begins with."""
        for count in range(len(self.marks), 0, -1):
            part = self.text[: self.marks[count - 1].num_characters]
            if text.startswith(part):
                return Covered(part, self.marks[:count])
        return Covered()

    @property
    def num_tokens(self) -> int:
        """The path's tokens that stand for the text."""
        return self.marks[-1].num_tokens if self.marks else 0


@dataclass(slots=True, eq=False)
class Held:
    """What there is of one state. Its executor works on it alone; other threads may end it, or fork from it."""

    path: TokenPath
    covered: Covered = field(default_factory=Covered)
    num_fork_tokens: int = 0
    """Where the state was forked from its parent."""

    is_busy: bool = False

    def append(self, text: str) -> None:
        """Tokenise text alone and append it.

        Raises:
            PromptTooLong: The path would leave no room for a token more.
        """
        if text:
            self.path.append_text(text)
            self.cover(text)

    def cover(self, text: str) -> None:
        """Note that the path stands for so much more text, or text with other tokens at its end."""
        self.covered = self.covered.plus(text, len(self.path.ids))

    def take(self, fork: Held, text: str) -> None:
        """Append the text that a fork gained, by its tokens. Where the fork went on from just here, its KV comes with them.

        Raises:
            PromptTooLong: The path would leave no room for a token more.
        """
        start, ids = fork.num_fork_tokens, fork.path.ids
        if ids[:start] == self.path.ids:
            self.path.follow(ids[start:], fork.settled().fork()[0])
        else:
            self.path.append(ids[start:], is_text=False)
        self.cover(text)

    def settled(self) -> Branch:
        """Return the branch, which holds the path's tokens.

        Raises:
            ProgramError: There are none yet.
        """
        return finish(self.path.settle(BLOCKING))


class Paths:
    """Owner of the paths of all states of one backend. Used from any thread."""

    def __init__(self, engine: Engine, namespace: Namespace | None) -> None:
        self._engine = engine
        self._namespace = namespace
        # The collector may end an executor in the middle of anything, in the same thread.
        self._guard = threading.RLock()
        self._held: weakref.WeakKeyDictionary[StreamExecutor, Held] = weakref.WeakKeyDictionary()
        # Most often before there is anything to hold: the function returns before its executor has begun.
        self._ended: weakref.WeakSet[StreamExecutor] = weakref.WeakSet()

    @contextmanager
    def following(self, executor: StreamExecutor, text: str | None = None) -> Iterator[Held]:
        """Give what is held for a state, its path brought up to the state's text (or to `text`).

        SGLang ends a program when its function returns, while its executor may still have work queued; the branch goes with the last of
        it. What comes later all the same opens the path anew, from the cache.

        Raises:
            InvalidRequest: The state has images.
            PromptTooLong: The path would leave no room for a token more.
        """
        if executor.images_:
            raise InvalidRequest("phloem runs text models: leave images and videos out", field="images")
        with self._guard:
            held = self._held.get(executor)
        if held is None:
            held = self._started(executor)
        with self._guard:
            self._held[executor] = held
            held.is_busy = True
        try:
            self._follow(held, executor.text_ if text is None else text)
            yield held
        except BaseException:
            held.path.rest()  # an executor that has a thread works no more after an error
            raise
        finally:
            with self._guard:
                held.is_busy = False
                self._rest_if_done(executor, held)

    def end(self, executor: StreamExecutor) -> None:
        """Let the state's memory go, now or when what runs on it is done."""
        with self._guard:
            self._ended.add(executor)
            held = self._held.get(executor)
            if held is not None:
                self._rest_if_done(executor, held)

    def end_all(self) -> None:
        """End every state."""
        with self._guard:
            executors = list(self._held)
        for executor in executors:
            self.end(executor)

    def find(self, sids: Sequence[str]) -> list[StreamExecutor]:
        """Return the executors of these ids, without those that nothing was computed for. O(executors)."""
        with self._guard:
            by_sid = {executor.sid: executor for executor in self._held}
        return [by_sid[sid] for sid in sids if sid in by_sid]

    def _rest_if_done(self, executor: StreamExecutor, held: Held) -> None:
        if executor in self._ended and not held.is_busy and not _has_work(executor):
            held.path.rest()

    def _follow(self, held: Held, text: str) -> None:
        with self._guard:  # a fork may be reading
            if not text.startswith(held.covered.text):  # the interpreter took something back
                held.covered = held.covered.beginning(text)
                held.path.cut(held.covered.num_tokens)
        held.append(text[len(held.covered.text) :])

    def _started(self, executor: StreamExecutor) -> Held:
        """Return a new state's path: that of its parent, or an empty one."""
        held = Held(TokenPath.empty(self._engine, self._namespace))
        if executor.fork_start_text_pos:
            text = executor.text_[: executor.fork_start_text_pos]
            place = self._place_of(executor, text)
            if place is not None:
                held = place.fork(self._engine, self._namespace)
            held.append(text[len(held.covered.text) :])
            held.num_fork_tokens = len(held.path.ids)
        return held

    def _place_of(self, executor: StreamExecutor, text: str) -> _Place | None:
        """Return where a fork's family was at a text, or shortly before. O(executors).

        Executors of one run have the dictionary of its arguments in common; nothing else tells who forked whom.
        """
        with self._guard:
            best: _Place | None = None
            for other, held in self._held.items():
                if other is executor or other.arguments is not executor.arguments:
                    continue
                covered = held.covered.beginning(text)
                if covered.marks and (best is None or len(covered.text) > len(best.covered.text)):
                    ids = held.path.ids[: covered.num_tokens]
                    is_there = held.path.num_synced >= len(ids)
                    best = _Place(covered, ids, held.path.branch if is_there else None)
            return best


def _has_work(executor: StreamExecutor) -> bool:
    """Whether more is queued that will call the backend. What is left of an expression under way is not seen."""
    return bool(executor.use_thread) and any(map(_calls_backend, executor.queue.queue.copy()))


def _calls_backend(expression: Any) -> bool:
    if isinstance(expression, SglExprList):
        return any(map(_calls_backend, expression.expr_list))
    return isinstance(expression, (SglGen, SglSelect, SglCommitLazy, SglConcateAndAppend))


@dataclass(frozen=True, slots=True)
class _Place:
    """A place on a state's path, for a fork to start from."""

    covered: Covered
    ids: array[int]
    branch: Branch | None
    """One that goes through it, which another thread may release meanwhile."""

    def fork(self, engine: Engine, namespace: Namespace | None) -> Held:
        """Return a new state here. Without a branch its path is opened from the cache, by its tokens."""
        path = TokenPath(engine, namespace, self.ids, len(self.ids))
        if self.branch is not None:
            with suppress(BranchReleased):
                path.branch, path.num_synced = self.branch.at(len(self.ids)), len(self.ids)
        return Held(path, self.covered)
