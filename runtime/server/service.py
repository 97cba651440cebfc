"""What all protocols share: the engine, the settings, and how generations are started, read and ended."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, TypeVar

from fastapi import Depends
from starlette.requests import Request

from phloem.radix import Namespace
from phloem.runtime.branch import Branch
from phloem.runtime.engine import Engine
from phloem.runtime.errors import Cancelled
from phloem.runtime.generation import AsyncGeneration
from phloem.runtime.outputs import Chunk, Completion
from phloem.runtime.sampling_params import SamplingParams
from phloem.runtime.server.answers import AnswerMemory
from phloem.runtime.server.anthropic_cache import MarkFinder
from phloem.runtime.server.anthropic_diagnostics import FingerprintStore
from phloem.runtime.server.auth import Tenant
from phloem.runtime.server.branch_store import BranchStore
from phloem.runtime.server.chat_prompt import Prompter
from phloem.runtime.server.connection import EventStream, while_connected
from phloem.runtime.server.errors import ApiError, Failure, not_found
from phloem.runtime.server.gate import Gate, Ticket
from phloem.runtime.server.pin_store import PinStore
from phloem.runtime.server.prompt_leases import Mark, PromptLeases
from phloem.runtime.server.responses_store import ResponseStore
from phloem.runtime.server.settings import ServerSettings
from phloem.runtime.server.token_texts import TokenTexts
from phloem.runtime.server.totals import Totals

Value = TypeVar("Value")


@dataclass(frozen=True, slots=True)
class IndexedChunk:
    """A piece of one of several generations."""

    index: int
    chunk: Chunk


class Run:
    """Generations under way for one request. Close it once the answer is out; that aborts what has not ended."""

    def __init__(
        self,
        generations: Sequence[AsyncGeneration],
        ticket: Ticket,
        *,
        open_runs: set[Run],
        count: Callable[[int, Completion], None],
        names: Mapping[str, Sequence[int]],
        on_close: Callable[[], None] | None = None,
    ) -> None:
        self._generations = generations
        self._names = names
        self._ticket = ticket
        self._open_runs = open_runs
        self._count = count
        self._on_close = on_close
        open_runs.add(self)

    async def results(self) -> list[Completion]:
        """Wait for all of them; an error of one is that of the whole.

        Raises:
            PhloemError: One failed.
        """
        results = list(await asyncio.gather(*(generation.result() for generation in self._generations)))
        for index, completion in enumerate(results):
            self._count(index, completion)
        return results

    async def whole(self, request: Request) -> list[Completion]:
        """Wait for all of them while the client does, and close.

        Raises:
            ClientGone: It left; they were aborted.
            PhloemError: One failed.
        """
        try:
            return await while_connected(request, self.results())
        finally:
            self.close()

    async def chunks(self) -> AsyncIterator[IndexedChunk]:
        """Yield the pieces of all of them as they come.

        Raises:
            PhloemError: One failed.
        """
        async for item in self._merged():
            if item.chunk.completion is not None:
                self._count(item.index, item.chunk.completion)
            yield item

    async def _merged(self) -> AsyncIterator[IndexedChunk]:
        if len(self._generations) == 1:
            async for chunk in self._generations[0]:
                yield IndexedChunk(0, chunk)
            return
        queue: asyncio.Queue[IndexedChunk | Exception] = asyncio.Queue()
        pumps = [
            asyncio.ensure_future(_pump(index, generation, queue))
            for index, generation in enumerate(self._generations)
        ]
        num_open = len(pumps)
        try:
            while num_open:
                item = await queue.get()
                if isinstance(item, Exception):
                    raise item
                num_open -= item.chunk.completion is not None
                yield item
        finally:
            for pump in pumps:
                pump.cancel()

    def abort(self) -> None:
        """End what has not ended; what there is of it is still answered."""
        for generation in self._generations:
            generation.abort()

    def abort_named(self, name: str) -> None:
        """End those of its generations that were started under this name."""
        for index in self._names.get(name, ()):
            self._generations[index].abort()

    def close(self) -> None:
        """Abort what has not ended, and make room for other requests. A second call does nothing."""
        self.abort()
        self._ticket.release()
        self._open_runs.discard(self)
        on_close, self._on_close = self._on_close, None
        if on_close is not None:
            on_close()


class Service:
    """One engine behind HTTP. Used by the event loop."""

    def __init__(self, engine: Engine, settings: ServerSettings) -> None:
        self.engine = engine
        self.settings = settings
        self.gate = Gate(settings.max_requests, retry_after_s=settings.retry_after_s)
        self.totals = Totals()
        self.answers = AnswerMemory(settings.answer_memory_bytes)
        self.responses = ResponseStore(settings.stored_responses_bytes)
        self.branches = BranchStore(
            max_branches=settings.max_branches,
            max_per_key=settings.max_branches_per_key,
            idle_s=settings.branch_idle_s,
            retry_after_s=settings.retry_after_s,
        )
        self.prompter = Prompter(engine, self.answers, max_messages=settings.max_messages)
        self.marks = MarkFinder(self.prompter)
        self.prompt_leases = PromptLeases(engine, settings.max_pinned_tokens_per_key)
        self.pins = PinStore(
            settings.max_pinned_tokens_per_key,
            num_leased=self.prompt_leases.num_tokens,
            retry_after_s=settings.retry_after_s,
        )
        self.fingerprints = FingerprintStore()
        self.token_texts = TokenTexts(engine.tokenizer)
        self.started_at = int(time.time())
        """In seconds since 1970."""

        self._runs: set[Run] = set()
        self._works: set[asyncio.Future[Any]] = set()

    @property
    def model_name(self) -> str:
        """What answers call the model."""
        return self.settings.served_names[0]

    def check_model(self, name: str) -> None:
        """Check that a request is for the model that is served.

        Raises:
            ApiError: 404, it is not.
        """
        if name not in self.settings.served_names:
            known = ", ".join(self.settings.served_names)
            raise not_found(
                f"there is no model {name!r} here; there is {known}", "model", code="model_not_found"
            )

    async def start(
        self,
        prompts: Sequence[Sequence[int]],
        params: SamplingParams | Sequence[SamplingParams],
        namespace: Namespace,
        *,
        names: Mapping[str, Sequence[int]] | None = None,
    ) -> Run:
        """Start `params.n` generations on each prompt, given as token ids.

        Args:
            prompts: At least one.
            params: For all, or one per prompt, all with the same `n`.
            namespace: Where their KV is kept.
            names: By what names `abort_named` finds them: indices of generations, `n` for each prompt.

        Raises:
            ApiError: There is no room for them.
            InvalidRequest: A prompt or a parameter is wrong; nothing has been started then.
        """
        n = params.n if isinstance(params, SamplingParams) else params[0].n
        return await self._begin(
            lambda: self.engine.asubmit(
                list(prompts), params, namespace=namespace, timeout_s=self.settings.request_timeout_s
            ),
            len(prompts) * n,
            per_prompt=n,
            names=names,
        )

    async def start_on(self, branch: Branch, params: SamplingParams, on_close: Callable[[], None]) -> Run:
        """Start a generation on a branch; `on_close` is called with the run's end, also if it does not come to a run.

        Raises:
            ApiError: There is no room for it.
            InvalidRequest: A parameter is wrong, or the branch is busy; nothing has been started then.
        """

        async def submit() -> list[AsyncGeneration]:
            return [await branch.asubmit(params, timeout_s=self.settings.request_timeout_s)]

        try:
            return await self._begin(submit, 1, on_close=on_close)
        except BaseException:
            on_close()
            raise

    async def _begin(
        self,
        submit: Callable[[], Awaitable[list[AsyncGeneration]]],
        count: int,
        *,
        per_prompt: int = 1,
        names: Mapping[str, Sequence[int]] | None = None,
        on_close: Callable[[], None] | None = None,
    ) -> Run:
        ticket = self.gate.admit(count)
        try:
            generations = await submit()
        except BaseException:
            ticket.release()
            raise

        def count_end(index: int, completion: Completion) -> None:
            self.totals.count(completion, is_first=index % per_prompt == 0)

        return Run(
            generations,
            ticket,
            open_runs=self._runs,
            count=count_end,
            names=names or {},
            on_close=on_close,
        )

    async def work(
        self, request: Request, count: int, work: Callable[[], Coroutine[Any, Any, Value]]
    ) -> Value:
        """Do what takes the places of `count` generations, while its client waits and for as long as a request may take.

        Raises:
            ApiError: There is no room for it.
            ClientGone: The client left; it was cancelled.
            Cancelled: It took too long; it was cancelled.
            PhloemError: It failed.
        """
        ticket = self.gate.admit(count)
        limit_s = self.settings.request_timeout_s
        task = asyncio.ensure_future(work())
        self._works.add(task)
        try:
            return await asyncio.wait_for(while_connected(request, task), limit_s)
        except asyncio.TimeoutError:
            raise Cancelled(f"the request took longer than {limit_s:g} s") from None
        except asyncio.CancelledError:
            if task not in self._works:
                self.gate.check_open()  # which says that the server ends
            raise
        finally:
            self._works.discard(task)
            ticket.release()

    async def hold(
        self, tenant: Tenant, token_ids: Sequence[int], marks: Sequence[Mark], namespace: Namespace
    ) -> list[Mark]:
        """Take or keep the leases of a prompt within what its key's pins leave it; return the marks that have one."""
        num_pinned = await self.pins.num_tokens(tenant) if marks else 0
        return await self.prompt_leases.hold(tenant, token_ids, marks, namespace, num_pinned=num_pinned)

    def stream(self, events: AsyncIterator[str], run: Run) -> EventStream:
        """Return an answer of server-sent events, at whose end the run is closed."""
        return EventStream(events, on_end=run.close, send_timeout_s=self.settings.send_timeout_s)

    def abort_all(self) -> None:
        """End all generations; what there is of them is still answered. Work that has no half result is cancelled."""
        for run in list(self._runs):
            run.abort()
        while self._works:
            self._works.pop().cancel()

    def abort_named(self, name: str) -> None:
        """End the generations that were started under a name. O(open runs)."""
        for run in list(self._runs):
            run.abort_named(name)


async def _pump(
    index: int, generation: AsyncGeneration, queue: asyncio.Queue[IndexedChunk | Exception]
) -> None:
    try:
        async for chunk in generation:
            queue.put_nowait(IndexedChunk(index, chunk))
    except Exception as error:
        queue.put_nowait(error)


async def _service_of(request: Request) -> Service:
    service: Service = request.app.state.service
    return service


async def _tenant_of(request: Request) -> Tenant:
    tenant: Tenant = request.state.tenant
    return tenant


async def _admin_of(request: Request) -> Tenant:
    tenant = await _tenant_of(request)
    if not tenant.is_admin:
        raise ApiError(Failure(403, "permission", "this needs the admin key"))
    return tenant


ServiceDep = Annotated[Service, Depends(_service_of)]
TenantDep = Annotated[Tenant, Depends(_tenant_of)]
AdminDep = Annotated[Tenant, Depends(_admin_of)]
"""Refuses whoever has not the admin key."""
