"""Branches over HTTP: a path of tokens that stays on the server, under an id, to be grown, forked, scored and expanded.

A branch belongs to the key that opened it; to all others its id is unknown. It is released when nobody has used it for
`branch_idle_s`, and by `DELETE`. A generation is answered in the form of OpenAI's completions.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from phloem.runtime.branch import Score
from phloem.runtime.errors import GrammarError
from phloem.runtime.outputs import Chunk, Completion
from phloem.runtime.server.branch_fields import ExpandRequest, ForkRequest, GenerateRequest, ScoreRequest
from phloem.runtime.server.branch_store import HeldBranch
from phloem.runtime.server.errors import JsonAnswer, grammar_refused
from phloem.runtime.server.openai_fields import StreamOptions, checked_n, new_id, usage_dict
from phloem.runtime.server.openai_logprobs import LEAST, CompletionLogprobs
from phloem.runtime.server.openai_stream import openai_events
from phloem.runtime.server.prompt_fields import PromptFields, TextFields, encoded
from phloem.runtime.server.service import Service, ServiceDep, TenantDep

router = APIRouter(prefix="/v1/branches", tags=["branches"])


@router.post("")
async def open_branch(body: PromptFields, service: ServiceDep, tenant: TenantDep) -> JsonAnswer:
    """Open a branch on a prompt. Nothing is computed yet."""
    namespace = body.namespace(tenant)
    with service.branches.room(tenant, 1) as keep:
        prompt = await body.prompt(service, namespace)
        branch = await asyncio.to_thread(service.engine.branch, prompt.tolist(), namespace=namespace)
        [held] = keep([branch], None)
    return JsonAnswer(_branch_dict(held, service))


@router.get("")
async def list_branches(service: ServiceDep, tenant: TenantDep) -> JsonAnswer:
    """List the key's branches, the oldest first."""
    found = service.branches.all_of(tenant)
    return JsonAnswer({"object": "list", "data": [_branch_dict(held, service) for held in found]})


@router.get("/{branch_id}")
async def get_branch(branch_id: str, service: ServiceDep, tenant: TenantDep) -> JsonAnswer:
    """Tell a branch's tokens, and their text."""
    with service.branches.use(tenant, branch_id) as held:
        token_ids = await held.branch.atoken_ids()
        text = await asyncio.to_thread(service.engine.tokenizer.decode, token_ids, skip_special_tokens=False)
    return JsonAnswer(_branch_dict(held, service) | {"token_ids": token_ids, "text": text})


@router.delete("/{branch_id}")
async def delete_branch(branch_id: str, service: ServiceDep, tenant: TenantDep) -> JsonAnswer:
    """Release a branch; a request that works on it ends."""
    service.branches.drop(tenant, branch_id)
    return JsonAnswer({"id": branch_id, "object": "branch", "deleted": True})


@router.post("/{branch_id}/append")
async def append(branch_id: str, body: TextFields, service: ServiceDep, tenant: TenantDep) -> JsonAnswer:
    """Append text or token ids to the path."""
    with service.branches.use(tenant, branch_id) as held:
        await held.branch.aappend(await body.continuation(service))
    return JsonAnswer(_branch_dict(held, service))


@router.post("/{branch_id}/generate")
async def generate(
    branch_id: str, body: GenerateRequest, request: Request, service: ServiceDep, tenant: TenantDep
) -> Response:
    """Generate on the branch; what is generated becomes part of its path."""
    params = body.branch_params(service.settings)
    ends = ExitStack()
    held = ends.enter_context(service.branches.use(tenant, branch_id))
    try:
        run = await service.start_on(held.branch, params, ends.close)
    except GrammarError as error:
        raise grammar_refused(error, body.grammar_field) from error
    writer = _Writer(held.id, service)
    if body.stream:
        options = StreamOptions(include_usage=True)
        return service.stream(await openai_events(run, writer, request, options=options, n=1), run)
    [done] = await run.whole(request)
    return JsonAnswer(_answer(writer, [writer.choice(0, done)], [done]))


@router.post("/{branch_id}/fork")
async def fork(branch_id: str, body: ForkRequest, service: ServiceDep, tenant: TenantDep) -> JsonAnswer:
    """Fork the branch, at its end or at any token of its path. Its forks share all KV."""
    n = checked_n(body.n, service.settings)
    with service.branches.use(tenant, branch_id) as held, service.branches.room(tenant, n) as keep:
        source = held.branch if body.at is None else await held.branch.aat(body.at)
        kept = keep(await source.afork(n), held.id)
    return JsonAnswer({"object": "list", "data": [_branch_dict(each, service) for each in kept]})


@router.post("/{branch_id}/score")
async def score(
    branch_id: str, body: ScoreRequest, request: Request, service: ServiceDep, tenant: TenantDep
) -> JsonAnswer:
    """Tell the log-probabilities of continuations. The branch stays as it is."""
    count = len(body.continuations)
    with service.branches.use(tenant, branch_id) as held:
        service.gate.check(count)
        texts = {f"continuations[{index}]": each for index, each in enumerate(body.continuations)}
        continuations = await encoded(texts, service)
        scores = await service.work(request, count, lambda: held.branch.ascore(continuations))
    for each in scores:
        service.totals.count_prompt(each.usage)
    return JsonAnswer(
        {
            "object": "list",
            "data": [_score_dict(index, each) for index, each in enumerate(scores)],
            "usage": usage_dict([each.usage for each in scores], completion_tokens=0),
        }
    )


@router.post("/{branch_id}/expand")
async def expand(
    branch_id: str, body: ExpandRequest, request: Request, service: ServiceDep, tenant: TenantDep
) -> JsonAnswer:
    """Generate several children, each on a branch of its own. The branch itself stays as it is."""
    params, n = body.branch_params(service.settings), checked_n(body.n, service.settings)
    with service.branches.use(tenant, branch_id) as held, service.branches.room(tenant, n) as keep:
        try:
            children = await service.work(request, n, lambda: held.branch.aexpand(n, params))
        except GrammarError as error:
            raise grammar_refused(error, body.grammar_field) from error
        kept = keep(children, held.id)
    completions = [child.completion for child in children if child.completion is not None]
    for index, done in enumerate(completions):
        service.totals.count(done, is_first=index == 0)
    writer = _Writer(held.id, service)
    choices = [
        writer.choice(index, done) | {"branch": _branch_dict(child, service)}
        for index, (done, child) in enumerate(zip(completions, kept, strict=True))
    ]
    return JsonAnswer(_answer(writer, choices, completions))


class _Writer:
    """Writes choices, whole or as a stream's."""

    def __init__(self, branch_id: str, service: Service) -> None:
        self.head: dict[str, Any] = {
            "id": new_id("brgen-"),
            "object": "branch.generation",
            "created": int(time.time()),
            "model": service.model_name,
            "branch_id": branch_id,
        }
        self._texts = service.token_texts
        self._logs: dict[int, CompletionLogprobs] = {}

    def choice(self, index: int, done: Completion) -> dict[str, Any]:
        """Return a whole choice."""
        return self._choice(index, done, done.finish_reason)

    def opening(self, index: int) -> list[dict[str, Any]]:
        """Return what comes before the first piece: nothing."""
        return []

    def pieces(self, index: int, chunk: Chunk) -> list[dict[str, Any]]:
        """Return a chunk of a choice."""
        return [self._choice(index, chunk, chunk.completion.finish_reason if chunk.completion else None)]

    def _choice(self, index: int, part: Completion | Chunk, reason: str | None) -> dict[str, Any]:
        log = self._logs.setdefault(index, CompletionLogprobs(self._texts))
        return {
            "index": index,
            "text": part.text,
            "token_ids": part.token_ids,
            "logprobs": None if part.logprobs is None else log.part(part.logprobs),
            "finish_reason": reason,
        }


def _answer(
    writer: _Writer, choices: Sequence[dict[str, Any]], completions: Sequence[Completion]
) -> dict[str, Any]:
    completion_tokens = sum(done.usage.completion_tokens for done in completions)
    usage = usage_dict([completions[0].usage], completion_tokens=completion_tokens)
    return {**writer.head, "choices": choices, "usage": usage}


def _branch_dict(held: HeldBranch, service: Service) -> dict[str, Any]:
    expires_in_s = service.branches.expires_in_s(held)
    return {
        "id": held.id,
        "object": "branch",
        "created": held.created,
        "parent_id": held.parent_id,
        "num_tokens": len(held.branch),
        "busy": expires_in_s is None,
        "expires_in_s": expires_in_s,
    }


def _score_dict(index: int, score: Score) -> dict[str, Any]:
    entries = score.token_logprobs
    return {
        "index": index,
        "logprob": max(score.total, LEAST),
        "mean_logprob": max(score.mean, LEAST),
        "token_ids": [entry.token_id for entry in entries],
        "token_logprobs": [max(entry.logprob, LEAST) for entry in entries],
    }
