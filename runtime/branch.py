"""The branch: a live handle on one token path. Everything else that phloem offers is a way to use branches."""

from __future__ import annotations

import asyncio
import threading
import weakref
from array import array
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from phloem.radix import Explanation, Lease, Namespace, PinRefused
from phloem.runtime.engine_core import EngineCore, check_count, check_expansion
from phloem.runtime.errors import BranchBusy, BranchReleased, CacheFull, InvalidRequest
from phloem.runtime.fan_out import Child
from phloem.runtime.generation import AsyncGeneration, AsyncSink, Generation, Progress, QueueSink, Sink
from phloem.runtime.outputs import Chunk, Completion, TokenLogprob, Usage
from phloem.runtime.path import Path
from phloem.runtime.prompts import encode_continuation, is_list
from phloem.runtime.request import Phase, Request
from phloem.runtime.sampling_params import SamplingParams

_ANY = SamplingParams()
"""Of children that generate nothing."""


@dataclass(frozen=True, slots=True)
class Score:
    """How likely a continuation is after a branch."""

    token_logprobs: list[TokenLogprob]
    usage: Usage = field(compare=False)
    """Of the branch with the continuation. The first of several counts what the branch itself had to compute."""

    @property
    def total(self) -> float:
        """Log-probability of the whole continuation."""
        return sum(entry.logprob for entry in self.token_logprobs)

    @property
    def mean(self) -> float:
        """Per token, which does not favour short continuations."""
        return self.total / len(self.token_logprobs)


class Branch:
    """A path of tokens whose KV is kept for what comes next.

    Made by `Engine.branch`, `fork`, `at` and `expand`. It locks the tree nodes that it runs through; when memory is short, the
    engine suspends branches that wait, which then resume with a hit on whatever is still cached. It may be used from any
    thread, with one generation at a time. Releasing it, leaving its `with` block, or losing the last reference frees its
    blocks for eviction.
    """

    def __init__(self, core: EngineCore, path: Path, completion: Completion | None = None) -> None:
        self._core = core
        self._path = path
        self._guard = threading.Lock()
        self._request: Request | None = None
        self._is_released = False
        self._lease: Lease | None = None
        self.completion = completion
        """Of the generation that made this branch, for those that `expand` returned."""

        self._finalizer = weakref.finalize(self, core.loop.release, path)
        self._finalizer.atexit = False

    def __enter__(self) -> Branch:
        return self

    def __exit__(self, *error: object) -> None:
        self.release()

    def __len__(self) -> int:
        return len(self._live_path().tokens)

    @property
    def token_ids(self) -> list[int]:
        """The path's tokens."""
        return self._token_ids().result()

    async def atoken_ids(self) -> list[int]:
        """Do as `token_ids`, for an event loop."""
        return await asyncio.wrap_future(self._token_ids())

    @property
    def text(self) -> str:
        """The path as text: a view, never the state."""
        return self._core.tokenizer.decode(self.token_ids)

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """The model's end-of-sequence tokens."""
        return tuple(self._core.tokenizer.eos_token_ids)

    # Growing

    def append(self, continuation: str | Sequence[int]) -> Branch:
        """Append text or token ids. Nothing is computed yet.

        Raises:
            InvalidRequest: It is empty or holds ids that are none, or the branch is generating.
            PromptTooLong: The path would not fit the context.
        """
        self._append(continuation).result()
        return self

    async def aappend(self, continuation: str | Sequence[int]) -> Branch:
        """Do as `append`, for an event loop."""
        await asyncio.wrap_future(self._append(continuation))
        return self

    def generate(self, params: SamplingParams | None = None) -> Completion:
        """Generate on this branch; the tokens become part of its path.

        Raises:
            InvalidRequest: It is generating already, or `params` asks for what one branch can't give (`n`).
            PhloemError: The generation failed; the path ends where it failed.
        """
        return self.stream(params).result()

    def stream(self, params: SamplingParams | None = None) -> Generation:
        """Generate piece by piece; leaving its `with` block aborts."""
        if self._seems_busy:
            self._core.call(_nothing).result()
        sink = QueueSink()
        return Generation(sink, self._start(sink, params))

    async def agenerate(self, params: SamplingParams | None = None) -> Completion:
        """Do as `generate`, for an event loop."""
        return await (await self.asubmit(params)).result()

    async def astream(self, params: SamplingParams | None = None) -> AsyncGenerator[Chunk, None]:
        """Do as `stream`, for an event loop. Closing the iterator aborts."""
        async with await self.asubmit(params) as generation:
            async for chunk in generation:
                yield chunk

    async def asubmit(
        self, params: SamplingParams | None = None, *, timeout_s: float | None = None
    ) -> AsyncGeneration:
        """Start as `agenerate` does, and return the generation under way, which ends with an error after `timeout_s` seconds."""
        await self._core.prepare(params)
        if self._seems_busy:
            await asyncio.wrap_future(self._core.call(_nothing))
        sink = AsyncSink()
        return AsyncGeneration(sink, self._start(sink, params, timeout_s=timeout_s))

    # Branching

    def fork(self, n: int = 1) -> list[Branch]:
        """Return n branches of the same path, also while this one generates. They share all its KV; none is copied now.

        Raises:
            InvalidRequest: `n` is not from 1 to 100,000.
        """
        check_count("n", n)
        return self._forks(_whole, n).result()

    async def afork(self, n: int = 1) -> list[Branch]:
        """Do as `fork`, for an event loop."""
        check_count("n", n)
        return await asyncio.wrap_future(self._forks(_whole, n))

    def at(self, index: int) -> Branch:
        """Return a branch of the first `index` tokens of the path.

        Raises:
            InvalidRequest: `index` is not from 1 to the path's length.
        """
        return self._forks(lambda path: _checked_index(index, path), 1).result()[0]

    async def aat(self, index: int) -> Branch:
        """Do as `at`, for an event loop."""
        return (await asyncio.wrap_future(self._forks(lambda path: _checked_index(index, path), 1)))[0]

    def expand(self, n: int, params: SamplingParams | None = None) -> list[Branch]:
        """Generate n children from here; return a branch for each, with its `completion`. This branch stays as it is.

        Child i draws from (seed, i, position): re-run alone with the same seed it gives the same.

        Raises:
            InvalidRequest: `n` is not from 1 to 100,000.
            PromptTooLong: The path leaves no room for a token more.
            PhloemError: A child failed; the others have been aborted and released.
        """
        children = self._children_of(n, params, QueueSink)
        try:
            return [self.branch_of(child, self._result(child)) for child in children]
        except BaseException:
            self._core.drop(children)
            raise

    async def aexpand(self, n: int, params: SamplingParams | None = None) -> list[Branch]:
        """Do as `expand`, for an event loop."""
        check_count("n", n)
        await self._core.prepare(params)
        children = self._children_of(n, params, AsyncSink)
        try:
            results = await asyncio.gather(*(self._aresult(child) for child in children))
            return [self.branch_of(child, result) for child, result in zip(children, results, strict=True)]
        except BaseException:
            self._core.drop(children)
            raise

    # Scoring

    def score(self, continuations: Sequence[str | Sequence[int]]) -> list[Score]:
        """Return the log-probabilities of continuations, all computed in one batch over the shared path.

        The branch does not change, and its KV stays cached.

        Raises:
            InvalidRequest: A continuation is empty; or holds ids that are none.
            PromptTooLong: The path with it would not fit the context.
        """
        return self.scores_of([self], continuations)[0]

    async def ascore(self, continuations: Sequence[str | Sequence[int]]) -> list[Score]:
        """Do as `score`, for an event loop."""
        children = self._score_children(continuations, AsyncSink)
        self.fan_out(children)
        try:
            return [_score(await self._aresult(child)) for child in children]
        except BaseException:
            self._core.drop(children)
            raise

    def next_token_logprobs(
        self, candidates: Sequence[int] | None = None, *, top: int = 20
    ) -> list[tuple[int, float]]:
        """Return (token id, log-probability) of the next token: of the candidates in their order, or of the likeliest.

        Raises:
            InvalidRequest: A candidate is no token id, or `top` is out of range.
        """
        child = self._start_next(candidates, top, QueueSink)
        return _next_tokens(child, self._result(child))

    async def anext_token_logprobs(
        self, candidates: Sequence[int] | None = None, *, top: int = 20
    ) -> list[tuple[int, float]]:
        """Do as `next_token_logprobs`, for an event loop."""
        child = self._start_next(candidates, top, AsyncSink)
        return _next_tokens(child, await self._aresult(child))

    @staticmethod
    def next_token_logprobs_of(branches: Sequence[Branch], *, top: int = 20) -> list[list[tuple[int, float]]]:
        """Return what `next_token_logprobs` gives for each of several branches, computed together."""
        for index, branch in enumerate(branches):
            branch._core.check_length(len(branch), new_tokens=1, name=f"branches[{index}]")
        children = [branch._start_next(None, top, QueueSink) for branch in branches]
        return [
            _next_tokens(child, branch._result(child))
            for branch, child in zip(branches, children, strict=True)
        ]

    @staticmethod
    def scores_of(
        branches: Sequence[Branch], continuations: Sequence[str | Sequence[int]]
    ) -> list[list[Score]]:
        """Return what `score` gives for each of several branches, computed together."""
        families = [branch._score_children(continuations, QueueSink) for branch in branches]
        try:
            for branch, children in zip(branches, families, strict=True):
                branch.fan_out(children)
            return [
                [_score(branch._result(child)) for child in children]
                for branch, children in zip(branches, families, strict=True)
            ]
        except BaseException:
            for branch, children in zip(branches, families, strict=True):
                branch._core.drop(children)
            raise

    # Keeping and ending

    def release(self) -> None:
        """End the branch: its blocks can be evicted at once, and a generation on it is aborted. A second call does nothing."""
        with self._guard:  # a use that begins meanwhile is either seen by it, or refused
            self._is_released = True
            self._finalizer()

    def pin(self, *, ttl: float = 60.0, owner: str = "branch") -> int:
        """Keep the branch's whole blocks from eviction for `ttl` seconds after their last use; return how many tokens.

        Computes what is not computed yet. The lease outlives the branch; `unpin` ends it. A second call replaces the first.

        Raises:
            InvalidRequest: `ttl` or `owner` is out of range, or the path does not fill one block.
            CacheFull: The budget for pins does not hold it; the message says what is pinned.
        """
        if not self._core.call(self._is_committed).result():
            self.next_token_logprobs(top=1)
        return self._pin(ttl, owner).result()

    async def apin(self, *, ttl: float = 60.0, owner: str = "branch") -> int:
        """Do as `pin`, for an event loop."""
        if not await asyncio.wrap_future(self._core.call(self._is_committed)):
            await self.anext_token_logprobs(top=1)
        return await asyncio.wrap_future(self._pin(ttl, owner))

    def unpin(self) -> None:
        """End the lease that `pin` took, also after `release`; without one, do nothing."""
        self._core.call(lambda: self._take_lease(None)).result()

    async def aunpin(self) -> None:
        """Do as `unpin`, for an event loop."""
        await asyncio.wrap_future(self._core.call(lambda: self._take_lease(None)))

    @staticmethod
    async def apinned_s_of(branches: Sequence[Branch]) -> list[float]:
        """Return how long the lease of each of several branches lasts if it is not used, in seconds; 0 without one, or after its end."""
        if not branches:
            return []
        leases = [branch._lease for branch in branches]
        return await asyncio.wrap_future(
            branches[0]._core.call(lambda: [lease.expires_in_s if lease else 0.0 for lease in leases])
        )

    @property
    def lease(self) -> Lease | None:
        """What `pin` took, and `unpin` did not end. To be looked at: its methods are for the engine's thread."""
        return self._lease

    def explain(self) -> Explanation:
        """Tell how much of the path needs no computing for the next token, and why the rest does."""
        path = self._live_path()
        return self._core.call(lambda: self._core.paths.explain(path, reusable=len(path.tokens) - 1)).result()

    def to_dict(self) -> dict[str, Any]:
        """Return the branch as plain data: tokens and namespace. KV is not part of it: it comes back when it is needed."""
        namespace = self._path.namespace
        return {"token_ids": self.token_ids, "salt": namespace.salt, "adapter": namespace.adapter}

    def belongs_to(self, core: EngineCore) -> bool:
        """Whether the engine is the one that holds its KV."""
        return self._core is core

    def fan_out(self, children: Sequence[Child]) -> None:
        """Start children from the end of the path; for `expand` and `score`, which know how to end them."""
        with self._guard:
            self._core.loop.fan_out(self._live_path(), children, keeps_path=True)

    # Parts of the above

    def _live_path(self) -> Path:
        if self._is_released:
            raise BranchReleased("the branch was released; fork it before, or open another one")
        return self._path

    def _token_ids(self) -> Future[list[int]]:
        return self._core.call(lambda: self._live_path().tokens.tolist())

    @property
    def _seems_busy(self) -> bool:
        """Whether a generation runs on it, or was aborted and the engine has not come to that: it has after any later `call`."""
        return self._request is not None and self._request.phase is not Phase.FINISHED

    def _idle_path(self) -> Path:
        path = self._live_path()
        if self._seems_busy:
            raise BranchBusy("the branch is generating; wait for the end, or fork it", field="branch")
        return path

    def _unused_path(self) -> Path:
        """The path, with no request on it, not even one that only computes. For the engine's thread."""
        path = self._idle_path()
        if self._core.loop.scheduler.is_busy(path):
            raise BranchBusy(
                "the branch is busy with a score or an expansion; wait for it, or fork", field="branch"
            )
        return path

    def _is_committed(self) -> bool:
        """Whether the tree has all whole blocks of the path. For the engine's thread."""
        path = self._live_path()
        num_tokens = len(path.tokens)
        whole = num_tokens - num_tokens % self._core.paths.block_size
        return self._core.paths.cached_tokens(path, reusable=num_tokens) == whole

    def _start(
        self, sink: Sink, params: SamplingParams | None, *, timeout_s: float | None = None
    ) -> Progress:
        params = self._core.checked(params)
        if params.n != 1:
            raise InvalidRequest("a branch generates one continuation; use expand(n) for several", field="n")
        with self._guard:
            path = self._idle_path()
            self._core.check_length(len(path.tokens), new_tokens=1, name="the path")
            request = self._core.request(path, params, keeps_path=True, timeout_s=timeout_s)
            self._core.submit(request, sink)
            self._request = request
        return Progress(request.id, self._core.abort)

    def _append(self, continuation: str | Sequence[int]) -> Future[None]:
        ids = self._encode(continuation, "continuation")

        def extend() -> None:
            path = self._unused_path()
            self._core.check_length(len(path.tokens) + len(ids), new_tokens=0, name="the path")
            path.tokens.extend(ids)

        return self._core.call(extend)

    def _forks(self, size_of: Callable[[Path], int], n: int) -> Future[list[Branch]]:
        def fork() -> list[Branch]:
            path = self._live_path()
            size = size_of(path)
            # Made here, so that branches which nobody waits for any more are collected, and released.
            return [Branch(self._core, self._core.paths.fork(path, size)) for _ in range(n)]

        return self._core.call(fork)

    def _score_children(
        self, continuations: Sequence[str | Sequence[int]], make_sink: Callable[[], Sink]
    ) -> list[Child]:
        if not is_list(continuations) or not len(continuations):
            raise InvalidRequest("continuations must be a list of one or more", field="continuations")
        encoded = [self._encode(each, f"continuations[{index}]") for index, each in enumerate(continuations)]
        for index, ids in enumerate(encoded):
            self._core.check_length(
                len(self) + len(ids), new_tokens=0, name=f"the path with continuations[{index}]"
            )
        children = self._core.children(len(self), _ANY, [make_sink() for _ in encoded])
        for child, ids in zip(children, encoded, strict=True):
            child.max_new_tokens, child.appended, child.is_scored = 0, ids, True
        return children

    def _pin(self, ttl: float, owner: str) -> Future[int]:
        path = self._live_path()

        def take() -> int:
            try:
                lease = self._core.paths.pin(path, ttl=ttl, owner=owner)
            except PinRefused as error:
                raise CacheFull(str(error)) from error
            except ValueError as error:
                raise InvalidRequest(str(error), field="pin") from error
            self._take_lease(lease)
            return lease.num_tokens

        return self._core.call(take)

    def _take_lease(self, lease: Lease | None) -> None:
        """Put a lease in the place of the one there is, which ends. For the engine's thread, so that no `unpin` is overtaken by a `pin`."""
        before, self._lease = self._lease, lease
        if before is not None:
            before.release()

    def _start_next(self, candidates: Sequence[int] | None, top: int, make_sink: Callable[[], Sink]) -> Child:
        candidate_ids = () if candidates is None else tuple(self._encode(candidates, "candidates"))
        params = SamplingParams(
            max_tokens=1, temperature=0, logprobs=0 if candidate_ids else top, ignore_eos=True
        )
        self._core.check_length(len(self), new_tokens=1, name="the path")
        [child] = self._core.children(len(self), params, [make_sink()])
        child.candidate_ids = candidate_ids
        self.fan_out([child])
        return child

    def _result(self, child: Child) -> Completion:
        assert isinstance(child.sink, QueueSink)
        return Generation(child.sink, Progress(child.request_id, self._core.abort)).result()

    async def _aresult(self, child: Child) -> Completion:
        assert isinstance(child.sink, AsyncSink)
        return await AsyncGeneration(child.sink, Progress(child.request_id, self._core.abort)).result()

    def _children_of(
        self, n: int, params: SamplingParams | None, make_sink: Callable[[], Sink]
    ) -> list[Child]:
        params = check_expansion(self._core, n, params)
        self._core.check_length(len(self), new_tokens=1, name="the path")
        children = self._core.children(len(self), params, [make_sink() for _ in range(n)], keeps_path=True)
        self.fan_out(children)
        return children

    def branch_of(self, child: Child, completion: Completion) -> Branch:
        """Return the branch that a child left, which was started with `keeps_path`."""
        assert child.request is not None
        return Branch(self._core, child.request.path, completion)

    def _encode(self, continuation: str | Sequence[int], name: str) -> array[int]:
        core = self._core
        return encode_continuation(continuation, core.tokenizer, vocab_size=core.model.vocab_size, name=name)


def _nothing() -> None:
    """Take the engine's thread a moment."""


def _whole(path: Path) -> int:
    return len(path.tokens)


def _checked_index(index: object, path: Path) -> int:
    if isinstance(index, bool) or not isinstance(index, int) or not 1 <= index <= len(path.tokens):
        raise InvalidRequest(
            f"index must be a whole number from 1 to the path's length of {len(path.tokens)}, not {index!r}",
            field="index",
        )
    return index


def _next_tokens(child: Child, result: Completion) -> list[tuple[int, float]]:
    if child.candidate_ids:
        return list(zip(child.candidate_ids, result.candidate_logprobs, strict=True))
    assert result.logprobs is not None
    return list(result.logprobs[0].top)


def _score(result: Completion) -> Score:
    return Score(result.prompt_logprobs or [], result.usage)


def branch_from_dict(core: EngineCore, state: Mapping[str, Any]) -> Branch:
    """Return the branch that `Branch.to_dict` described.

    Raises:
        InvalidRequest: The description is not one of these.
    """
    if not isinstance(state, Mapping) or set(state) != {"token_ids", "salt", "adapter"}:
        raise InvalidRequest(
            "a branch's description has token_ids, salt and adapter, and nothing else", field="state"
        )
    tokens = encode_continuation(
        state["token_ids"], core.tokenizer, vocab_size=core.model.vocab_size, name="token_ids"
    )
    namespace = Namespace(salt=state["salt"], adapter=state["adapter"])
    return Branch(core, core.new_path(tokens, namespace, name="token_ids"))
