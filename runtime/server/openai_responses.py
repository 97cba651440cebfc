"""OpenAI's `/v1/responses`: text and functions, streamed or whole, stored in memory so that the next one can go on from it.

`background`, `truncation: auto`, hosted tools, files and images are refused; `reasoning` has no effect. vLLM's further sampling fields are
taken as in the other endpoints. A response that is stored is its tenant's alone.
"""

from __future__ import annotations

import asyncio
from typing import Annotated, Any, Literal

from fastapi import APIRouter
from pydantic import BaseModel, ConfigDict, Field
from starlette.requests import Request
from starlette.responses import Response

from phloem.runtime.errors import GrammarError
from phloem.runtime.sampling_params import SamplingParams
from phloem.runtime.server.auth import Tenant
from phloem.runtime.server.chat_prompt import ChatMessage
from phloem.runtime.server.errors import JsonAnswer, grammar_refused, invalid
from phloem.runtime.server.openai_fields import GenerationFields
from phloem.runtime.server.openai_messages import Function, tool_dict
from phloem.runtime.server.openai_stream import first_chunk
from phloem.runtime.server.responses_answer import ResponseAnswer
from phloem.runtime.server.responses_items import input_items, messages_of
from phloem.runtime.server.responses_stream import ResponseEvents
from phloem.runtime.server.service import Service, ServiceDep, TenantDep
from phloem.runtime.server.tool_calls import ToolUse, tool_use

WANTS_LOGPROBS = "message.output_text.logprobs"

router = APIRouter(tags=["openai"])


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class PlainFormat(_Strict):
    """Any text, or any JSON object."""

    type: Literal["text", "json_object"]


class SchemaFormat(_Strict):
    """JSON that fits a schema, strictly so whatever `strict` says."""

    type: Literal["json_schema"]
    name: str
    schema_: dict[str, Any] = Field(alias="schema")
    description: str | None = None
    strict: bool | None = None


class TextOptions(_Strict):
    """What the text is to be."""

    format: Annotated[PlainFormat | SchemaFormat | None, Field(discriminator="type")] = None
    verbosity: str | None = Field(None, description="Has no effect.")


class FunctionTool(Function):
    """A function that the model may call."""

    type: Literal["function"]


class FunctionChoice(_Strict):
    """The function that must be called."""

    type: Literal["function"]
    name: str


class ResponseRequest(GenerationFields):
    """A request of `/v1/responses`."""

    input: str | list[dict[str, Any]]
    instructions: str | None = None
    previous_response_id: str | None = None
    max_output_tokens: int | None = None
    text: TextOptions | None = None
    tools: list[FunctionTool] | None = None
    tool_choice: Literal["none", "auto", "required"] | FunctionChoice | None = None
    parallel_tool_calls: bool | None = None
    include: list[Literal["message.output_text.logprobs", "reasoning.encrypted_content"]] | None = None
    top_logprobs: int | None = None
    truncation: Literal["disabled"] | None = None
    background: Literal[False] | None = None
    reasoning: dict[str, Any] | None = Field(None, description="Has no effect.")

    def tool_dicts(self) -> list[dict[str, Any]]:
        """Return the tools as templates want them."""
        return [tool_dict(tool) for tool in self.tools or ()]

    def tool_use(self) -> ToolUse:
        """Return which tools may be called.

        Raises:
            ApiError: One is chosen that there is not.
        """
        choice = self.tool_choice
        if isinstance(choice, FunctionChoice):
            return tool_use(self.tool_dicts(), None, chosen=choice.name)
        return tool_use(self.tool_dicts(), choice, several=self.parallel_tool_calls)

    def checked_params(self, service: Service, use: ToolUse) -> SamplingParams:
        """Return the engine's parameters.

        Raises:
            ApiError: The request asks for what there is not, or too much.
            InvalidRequest: A value is out of range.
        """
        if self.n not in (None, 1):
            raise invalid("a response is one answer; leave n out", "n")
        if self.max_tokens is not None:
            raise invalid("the limit of a response is max_output_tokens", "max_tokens")
        wants_logprobs = WANTS_LOGPROBS in (self.include or ())
        return self.params(
            service.settings,
            max_tokens=self.max_output_tokens,
            logprobs=(self.top_logprobs or 0) if wants_logprobs else None,
            grammar=use.grammar(self._schema(), max_bytes=service.settings.max_grammar_bytes),
        )

    def echo(self) -> dict[str, Any]:
        """Return the fields of a response that repeat the request."""
        given = self.model_dump(
            by_alias=True, include={"metadata", "user", "tools", "tool_choice", "reasoning"}
        )
        text_format = self.text.format if self.text is not None else None
        return {
            "background": False,
            "frequency_penalty": self.frequency_penalty or 0.0,
            "instructions": self.instructions,
            "max_output_tokens": self.max_output_tokens,
            "max_tool_calls": None,
            "metadata": given["metadata"] or {},
            "model": self.model,
            "parallel_tool_calls": self.parallel_tool_calls is not False,
            "presence_penalty": self.presence_penalty or 0.0,
            "previous_response_id": self.previous_response_id,
            "prompt_cache_key": self.prompt_cache_key,
            "reasoning": {"effort": None, "summary": None, **(given["reasoning"] or {})},
            "safety_identifier": self.safety_identifier,
            "service_tier": "default",
            "store": self.store is not False,
            "temperature": 1.0 if self.temperature is None else self.temperature,
            "text": {
                "format": {"type": "text"} if text_format is None else text_format.model_dump(by_alias=True)
            },
            "tool_choice": given["tool_choice"] or "auto",
            "tools": given["tools"] or [],
            "top_logprobs": self.top_logprobs or 0,
            "top_p": 1.0 if self.top_p is None else self.top_p,
            "truncation": "disabled",
            "user": given["user"],
        }

    def _schema(self) -> dict[str, Any] | None:
        found = None if self.text is None else self.text.format
        if isinstance(found, SchemaFormat):
            return found.schema_
        return {"type": "object"} if found is not None and found.type == "json_object" else None


@router.post("/v1/responses")
async def create_response(
    body: ResponseRequest, request: Request, service: ServiceDep, tenant: TenantDep
) -> Response:
    """Answer an input, on top of a stored response if one is named."""
    service.check_model(body.model)
    answer = await _prepare(body, service, tenant)
    try:
        run = await service.start([answer.prompt.token_ids], answer.params, body.namespace(tenant))
    except GrammarError as error:
        raise grammar_refused(error, "tools" if body.tools else "text") from error
    if body.stream:
        chunks = run.chunks()
        first = await first_chunk(run, chunks, request)
        return service.stream(ResponseEvents(answer).events(first, chunks), run)
    [done] = await run.whole(request)
    return JsonAnswer(answer.whole(done))


@router.get("/v1/responses/{response_id}")
async def get_response(response_id: str, service: ServiceDep, tenant: TenantDep) -> JsonAnswer:
    """Return a stored response."""
    return JsonAnswer(service.responses.get(tenant, response_id, field="response_id").response)


@router.delete("/v1/responses/{response_id}")
async def delete_response(response_id: str, service: ServiceDep, tenant: TenantDep) -> JsonAnswer:
    """Forget a stored response. Those that went on from it keep their conversation."""
    service.responses.drop(tenant, response_id)
    return JsonAnswer({"id": response_id, "object": "response", "deleted": True})


@router.get("/v1/responses/{response_id}/input_items")
async def list_input_items(response_id: str, service: ServiceDep, tenant: TenantDep) -> JsonAnswer:
    """Return the items that a stored response was asked with, the newest first."""
    items = service.responses.get(tenant, response_id, field="response_id").input_items
    named = [{"id": f"item_{index}", **item} for index, item in enumerate(items)][::-1]
    ends = {"first_id": named[0]["id"], "last_id": named[-1]["id"]} if named else {}
    return JsonAnswer({"object": "list", "data": named, "has_more": False, **ends})


async def _prepare(body: ResponseRequest, service: Service, tenant: Tenant) -> ResponseAnswer:
    use = body.tool_use()
    params, namespace = body.checked_params(service, use), body.namespace(tenant)
    service.gate.check(1)
    before: tuple[ChatMessage, ...] = ()
    if body.previous_response_id is not None:
        stored = service.responses.get(tenant, body.previous_response_id, field="previous_response_id")
        before = stored.messages
    items = input_items(body.input)
    messages = messages_of(items, before)
    if len(messages) == len(before):
        raise invalid("input is empty; it needs at least one message", "input")
    told = [ChatMessage("system", body.instructions)] if body.instructions else []
    prompt = await asyncio.to_thread(
        service.prompter.encode, [*told, *messages], body.tool_dicts(), namespace
    )
    return ResponseAnswer(
        service=service,
        tenant=tenant,
        prompt=prompt,
        params=params,
        echo=body.echo(),
        input_items=items,
        messages=tuple(messages),
        tool_names=tuple(use.schemas) if use.reads_calls else (),
        is_stored=body.store is not False,
    )
