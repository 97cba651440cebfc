"""Anthropic's `/v1/messages` and `/v1/messages/count_tokens`.

Images, documents and thinking are refused, as are tools that Anthropic's servers would run. `anthropic-version` may be anything, and
`anthropic-beta` has no effect.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, replace
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from phloem.radix import Namespace
from phloem.runtime.errors import GrammarError
from phloem.runtime.server.anthropic_answer import MessageAnswer
from phloem.runtime.server.anthropic_content import Conversation, conversation_of
from phloem.runtime.server.anthropic_diagnostics import diagnose, fingerprint
from phloem.runtime.server.anthropic_fields import Diagnostics, MessageRequest, PromptFields
from phloem.runtime.server.anthropic_stream import MessageEvents
from phloem.runtime.server.auth import Tenant
from phloem.runtime.server.chat_prompt import ChatPrompt, Prompter
from phloem.runtime.server.errors import JsonAnswer, grammar_refused
from phloem.runtime.server.openai_stream import first_chunk
from phloem.runtime.server.service import Service, ServiceDep, TenantDep

router = APIRouter(tags=["anthropic"])


@router.post("/v1/messages")
async def create_message(
    body: MessageRequest, request: Request, service: ServiceDep, tenant: TenantDep
) -> Response:
    """Answer a conversation."""
    service.check_model(body.model)
    use, namespace = body.tool_use(), body.namespace(tenant)
    params = body.params(use, max_grammar_bytes=service.settings.max_grammar_bytes)
    service.gate.check(1)
    asked = await asyncio.to_thread(_asked, body, service.prompter, namespace)
    marks = await asyncio.to_thread(
        service.marks.marks, asked.prompt, asked.conversation.breakpoints, asked.tools, namespace
    )
    answer = MessageAnswer(
        model=body.model,
        prompt=asked.prompt,
        params=params,
        prompter=service.prompter,
        tool_names=tuple(use.schemas) if use.reads_calls else (),
        takes_one_call=not use.allows_several,
        diagnostics=None,
    )
    if body.diagnostics is not None:
        answer = replace(
            answer, diagnostics=await _diagnostics(body.diagnostics, asked, answer.id, service, tenant)
        )
    try:
        run = await service.start([asked.prompt.token_ids], params, namespace)
    except GrammarError as error:
        raise grammar_refused(error, "tools" if body.tools else "output_config") from error
    if not body.stream:
        [done] = await run.whole(request)
        held = await service.hold(tenant, asked.prompt.token_ids, marks, namespace)
        return JsonAnswer(answer.whole(done, held))
    chunks = run.chunks()
    first = await first_chunk(run, chunks, request)
    try:
        held = await service.hold(tenant, asked.prompt.token_ids, marks, namespace)
    except BaseException:
        run.close()
        raise
    return service.stream(MessageEvents(answer, held).events(first, chunks), run)


@router.post("/v1/messages/count_tokens")
async def count_tokens(body: PromptFields, service: ServiceDep, tenant: TenantDep) -> JsonAnswer:
    """Tell how many tokens a prompt has."""
    service.check_model(body.model)
    service.gate.check(1)
    body.tool_use()
    asked = await asyncio.to_thread(_asked, body, service.prompter, body.namespace(tenant))
    return JsonAnswer({"input_tokens": len(asked.prompt.token_ids)})


@dataclass(frozen=True, slots=True)
class _Asked:
    """A request's prompt, and what it is made of."""

    conversation: Conversation
    tools: list[dict[str, Any]]
    prompt: ChatPrompt
    namespace: Namespace


def _asked(body: PromptFields, prompter: Prompter, namespace: Namespace) -> _Asked:
    conversation, tools = conversation_of(body), body.tool_dicts()
    prompt = prompter.encode(conversation.messages, tools, namespace, begun=conversation.begun)
    return _Asked(conversation, tools, prompt, namespace)


async def _diagnostics(
    wanted: Diagnostics, asked: _Asked, message_id: str, service: Service, tenant: Tenant
) -> dict[str, Any] | None:
    """Remember a prompt as that of a message; return what has changed since an earlier one, if one is named."""
    now = await asyncio.to_thread(fingerprint, asked.prompt, asked.conversation.messages, asked.tools)
    store, before_id = service.fingerprints, wanted.previous_message_id
    store.keep(tenant, message_id, now)
    if before_id is None:
        return None
    explanation = await asyncio.to_thread(
        service.engine.explain, asked.prompt.token_ids, namespace=asked.namespace
    )
    return diagnose(store.get(tenant, before_id), now, explanation)
