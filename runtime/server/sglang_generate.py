"""SGLang's `/generate`: one prompt or several, as text or token ids, whole or as a stream of texts so far.

SGLang's frontend asks for nothing else: a prefix is cached by `max_new_tokens: 0`, and choices are scored by that with log-probabilities
from a token near the prompt's end, before which all comes from the cache.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from phloem.runtime.engine import Engine
from phloem.runtime.errors import GrammarError, PhloemError, PromptTooLong
from phloem.runtime.outputs import Chunk, Completion, Usage
from phloem.runtime.prompts import encode
from phloem.runtime.server.auth import Tenant
from phloem.runtime.server.connection import DONE, event
from phloem.runtime.server.errors import JsonAnswer, failure_of, grammar_refused, invalid, openai_error
from phloem.runtime.server.openai_stream import first_chunk
from phloem.runtime.server.service import IndexedChunk, Service, ServiceDep, TenantDep
from phloem.runtime.server.sglang_fields import GenerateRequest, PromptOrder
from phloem.runtime.server.sglang_logprobs import TokenLog

router = APIRouter(tags=["sglang"])


@router.post("/generate")
async def generate(
    body: GenerateRequest, request: Request, service: ServiceDep, tenant: TenantDep
) -> Response:
    """Generate after one prompt or several; or compute, or score, what there is."""
    service.gate.check(body.num_prompts)
    orders = body.orders(service.settings)
    service.gate.check(len(orders) * orders[0].params.n)
    namespace = tenant.namespace(body.extra_key, field="extra_key")
    jobs = await asyncio.to_thread(_encoded, orders, service.engine)
    writer = _Writer(jobs, service, is_single=body.is_single)
    running = [job for job in jobs if job.token_ids]
    if body.stream and len(running) < len(jobs):
        raise invalid("text is empty; a stream needs at least one token", "text")
    if not running:
        return JsonAnswer(writer.whole([]))
    try:
        run = await service.start(
            [job.token_ids for job in running],
            [job.order.params for job in running],
            namespace,
            names=_names(body, running, tenant),
        )
    except GrammarError as error:
        [kind, *_] = (job.order.params.grammar.kind for job in running if job.order.params.grammar)
        raise grammar_refused(error, kind) from error
    if body.stream:
        chunks = run.chunks()
        first = await first_chunk(run, chunks, request)
        return service.stream(_events(first, chunks, writer), run)
    return JsonAnswer(writer.whole(await run.whole(request)))


def rid_name(tenant: Tenant, rid: str) -> str:
    """Return the name under which the tenant's generations of this `rid` run; those of "" are all from `/generate`."""
    return tenant.digest("rid", rid)


@dataclass(frozen=True, slots=True)
class _Job:
    """A prompt, and what to do for it."""

    order: PromptOrder
    token_ids: list[int]
    """Empty where an empty text was to be cached, and not even a BOS comes before it: then there is nothing to do."""


def _encoded(orders: Sequence[PromptOrder], engine: Engine) -> list[_Job]:
    return [_Job(order, _ids_of(order, engine)) for order in orders]


def _ids_of(order: PromptOrder, engine: Engine) -> list[int]:
    tokenizer = engine.tokenizer
    # The frontend computes an empty text where a program forks before it has said anything.
    if order.given == "":
        alone = tokenizer.encode("")
        if alone or order.params.max_tokens == 0:
            return alone
    ids = encode(order.given, tokenizer, vocab_size=engine.model.vocab_size, name=order.name)
    if len(ids) >= engine.max_model_len:
        raise PromptTooLong(
            f"{order.name} has {len(ids)} tokens; at most {engine.max_model_len - 1} are taken: shorten it",
            field=order.name,
        )
    return ids.tolist()


def _names(body: GenerateRequest, jobs: Sequence[_Job], tenant: Tenant) -> dict[str, list[int]]:
    """Return the generations by the names that end them: each one's own, its prompt's, the request's, and that of all."""
    names: dict[str, list[int]] = {}
    n = jobs[0].order.params.n
    for index in range(len(jobs) * n):
        order = jobs[index // n].order
        own = {"", order.rid, _id_of(order, index % n)} | ({body.rid} if isinstance(body.rid, str) else set())
        for rid in own:
            names.setdefault(rid_name(tenant, rid), []).append(index)
    return names


def _id_of(order: PromptOrder, number: int) -> str:
    return order.rid if order.params.n == 1 else f"{order.rid}_{number}"


async def _events(
    first: IndexedChunk, chunks: AsyncIterator[IndexedChunk], writer: _Writer
) -> AsyncIterator[str]:
    try:
        yield event(writer.so_far(first.index, first.chunk))
        async for item in chunks:
            yield event(writer.so_far(item.index, item.chunk))
    except PhloemError as error:
        yield event(openai_error(failure_of(error)))
    yield DONE


@dataclass(slots=True)
class _Stream:
    """What has come of one generation."""

    log: TokenLog
    texts: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)


class _Writer:
    """Writes answers, whole or as a stream's."""

    def __init__(self, jobs: Sequence[_Job], service: Service, *, is_single: bool) -> None:
        self._jobs = jobs
        self._running = [job for job in jobs if job.token_ids]
        self._n = jobs[0].order.params.n
        self._is_single = is_single and self._n == 1
        self._tokenizer = service.engine.tokenizer
        self._token_texts = service.token_texts
        self._streams: dict[int, _Stream] = {}

    def whole(self, completions: Sequence[Completion]) -> dict[str, Any] | list[dict[str, Any]]:
        """Return the answer of all prompts, from the completions of those that had something to run."""
        done = iter(completions)
        answers = [
            self._answer(job, number, next(done)) if job.token_ids else _nothing(job, number)
            for job in self._jobs
            for number in range(self._n)
        ]
        return answers[0] if self._is_single else answers

    def so_far(self, index: int, chunk: Chunk) -> dict[str, Any]:
        """Return all that has come of a generation, with its newest chunk."""
        job = self._running[index // self._n]
        stream = self._streams.get(index)
        if stream is None:
            stream = self._streams[index] = _Stream(self._log(job, job.token_ids))
        stream.texts.append(chunk.text)
        stream.token_ids += chunk.token_ids
        stream.log.add(chunk.logprobs or [])
        answer = {
            "text": "".join(stream.texts),
            "output_ids": stream.token_ids,
            "meta_info": self._meta(job, index % self._n, chunk.usage, stream.log, chunk.completion),
        }
        return answer if self._is_single else answer | {"index": index}

    def _answer(self, job: _Job, number: int, done: Completion) -> dict[str, Any]:
        log = self._log(job, job.token_ids)
        log.add(done.logprobs or [])
        return {
            "text": done.text,
            "output_ids": done.token_ids,
            "meta_info": self._meta(job, number, done.usage, log, done),
        }

    def _meta(
        self, job: _Job, number: int, usage: Usage | None, output: TokenLog, done: Completion | None
    ) -> dict[str, Any]:
        """Return what there is to tell of a generation; `done` is None before its end."""
        params = job.order.params
        meta: dict[str, Any] = {
            "id": _id_of(job.order, number),
            "finish_reason": None if done is None else _finish_reason(done),
            **_usage_meta(usage),
        }
        with_tops = bool(params.logprobs)
        if done is not None:
            meta["e2e_latency"] = done.total_s
            if params.logprobs is not None:
                scored = self._scored(job, done)
                meta |= scored.to_dict("input", with_tops=with_tops)
                meta["normalized_prompt_logprob"] = scored.mean
        if params.logprobs is not None:
            meta |= output.to_dict("output", with_tops=with_tops)
        return meta

    def _scored(self, job: _Job, done: Completion) -> TokenLog:
        """Return the log-probabilities of the prompt's tokens that were asked for."""
        start = job.order.params.prompt_logprobs_from
        log = self._log(job, [] if job.order.has_first else job.token_ids[: start + 1])
        if job.order.has_first:
            log.add_first(job.token_ids[0])
        log.add(done.prompt_logprobs or [])
        return log

    def _log(self, job: _Job, before: Sequence[int]) -> TokenLog:
        return TokenLog(self._tokenizer, self._token_texts, before=before, with_text=job.order.with_text)


def _finish_reason(done: Completion) -> dict[str, Any]:
    if done.finish_reason == "length":
        return {"type": "length", "length": done.usage.completion_tokens}
    if done.finish_reason == "abort":
        return {"type": "abort", "message": "it was ended from outside"}
    return {"type": "stop", "matched": done.stopped_by}


def _nothing(job: _Job, number: int) -> dict[str, Any]:
    """Return the answer of a prompt without tokens."""
    meta: dict[str, Any] = {
        "id": _id_of(job.order, number),
        "finish_reason": {"type": "length", "length": 0},
        **_usage_meta(Usage(prompt_tokens=0, cached_tokens=0, completion_tokens=0)),
        "e2e_latency": 0.0,
    }
    if job.order.params.logprobs is not None:
        meta |= {"input_token_logprobs": [], "output_token_logprobs": []}
    return {"text": "", "output_ids": [], "meta_info": meta}


def _usage_meta(usage: Usage | None) -> dict[str, int]:
    if usage is None:
        return {}
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "cached_tokens": usage.cached_tokens,
    }
