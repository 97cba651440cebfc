"""OpenAI's `/v1/chat/completions`.

`functions`, `audio`, `prediction` and `web_search_options` are refused, as is content that is not text. `reasoning_effort` and `verbosity` have
no effect. An answer that the server ends by shutting down has the finish reason "abort".
"""

from __future__ import annotations

import asyncio
import time
from typing import Annotated, Any, Literal, TypeAlias

from fastapi import APIRouter
from pydantic import BaseModel, ConfigDict, Field
from starlette.requests import Request
from starlette.responses import Response

from phloem.runtime.errors import GrammarError
from phloem.runtime.grammar import Grammar
from phloem.runtime.outputs import Chunk, Completion
from phloem.runtime.sampling_params import SamplingParams
from phloem.runtime.server.chat_prompt import Call, ChatPrompt
from phloem.runtime.server.errors import JsonAnswer, grammar_refused, invalid
from phloem.runtime.server.openai_fields import GenerationFields, new_id, usage_dict
from phloem.runtime.server.openai_logprobs import chat_logprobs
from phloem.runtime.server.openai_messages import Message, Tool, chat_messages, tool_dict
from phloem.runtime.server.openai_stream import openai_events
from phloem.runtime.server.service import Run, Service, ServiceDep, TenantDep
from phloem.runtime.server.tool_calls import AnswerReader, ToolUse, read_answer, tool_use

router = APIRouter(tags=["openai"])

_NO_TOOLS = ToolUse({})


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class TextFormat(_Strict):
    """Any text."""

    type: Literal["text"]


class JsonObjectFormat(_Strict):
    """Any JSON object."""

    type: Literal["json_object"]


class NamedSchema(_Strict):
    """A JSON schema with its name."""

    name: str | None = None
    description: str | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    strict: bool | None = None


class JsonSchemaFormat(_Strict):
    """JSON that fits a schema, strictly so whatever `strict` says."""

    type: Literal["json_schema"]
    json_schema: NamedSchema


ResponseFormat: TypeAlias = TextFormat | JsonObjectFormat | JsonSchemaFormat


class ChosenFunction(_Strict):
    """The name of a function."""

    name: str


class ToolChoice(_Strict):
    """The function that must be called."""

    type: Literal["function"]
    function: ChosenFunction


class ChatRequest(GenerationFields):
    """A request of `/v1/chat/completions`."""

    messages: list[Message]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    response_format: Annotated[ResponseFormat | None, Field(discriminator="type")] = None
    tools: list[Tool] | None = None
    tool_choice: Literal["none", "auto", "required"] | ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    modalities: list[Literal["text"]] | None = None
    reasoning_effort: str | None = Field(None, description="Has no effect.")
    verbosity: str | None = Field(None, description="Has no effect.")

    def checked_params(self, service: Service) -> SamplingParams:
        """Return the engine's parameters.

        Raises:
            ApiError: The request asks for what there is not, or too much.
            InvalidRequest: A value is out of range.
        """
        if self.top_logprobs is not None and not self.logprobs:
            raise invalid("top_logprobs needs logprobs: set it to true", "top_logprobs")
        limit = self.max_completion_tokens
        return self.params(
            service.settings,
            max_tokens=self.max_tokens if limit is None else limit,
            logprobs=(self.top_logprobs or 0) if self.logprobs else None,
            grammar=format_grammar(
                self.response_format, use=self.tool_use(), max_bytes=service.settings.max_grammar_bytes
            ),
        )

    def tool_use(self) -> ToolUse:
        """Return which tools may be called.

        Raises:
            ApiError: A tool is chosen that there is not.
        """
        tools = [tool_dict(tool.function) for tool in self.tools or ()]
        choice, several = self.tool_choice, self.parallel_tool_calls
        if isinstance(choice, ToolChoice):
            return tool_use(tools, None, chosen=choice.function.name)
        return tool_use(tools, choice, several=several)


def format_grammar(
    format: ResponseFormat | None, *, use: ToolUse = _NO_TOOLS, max_bytes: int
) -> Grammar | None:
    """Return what an answer of a format may be, if it calls no tool; None if it may be anything.

    Raises:
        ApiError: The schemas are larger than `max_bytes`.
        GrammarError: One is no JSON.
    """
    schema: dict[str, Any] | None = None
    if isinstance(format, JsonObjectFormat):
        schema = {"type": "object"}
    if isinstance(format, JsonSchemaFormat):
        schema = format.json_schema.schema_
        schema = {"type": "object"} if schema is None else schema
    return use.grammar(schema, max_bytes=max_bytes)


@router.post("/v1/chat/completions")
async def create_chat_completion(
    body: ChatRequest, request: Request, service: ServiceDep, tenant: TenantDep
) -> Response:
    """Answer a conversation."""
    service.check_model(body.model)
    params, options, namespace = body.checked_params(service), body.usage_options, body.namespace(tenant)
    service.gate.check(params.n)
    tools = [tool_dict(tool.function) for tool in body.tools or ()]
    messages = chat_messages(body.messages)
    prompt = await asyncio.to_thread(service.prompter.encode, messages, tools, namespace)
    try:
        run = await service.start([prompt.token_ids], params, namespace)
    except GrammarError as error:
        raise grammar_refused(error, "response_format" if body.response_format else "tools") from error
    writer = _Writer(body, prompt, params, service)
    if body.stream:
        events = await openai_events(run, writer, request, options=options, n=params.n)
        return service.stream(events, run)
    return await _whole(run, writer, request)


async def _whole(run: Run, writer: _Writer, request: Request) -> Response:
    completions = await run.whole(request)
    answer = {
        **writer.head,
        "object": "chat.completion",
        "choices": [writer.choice(index, done) for index, done in enumerate(completions)],
        "usage": usage_dict(
            [completions[0].usage],
            completion_tokens=sum(done.usage.completion_tokens for done in completions),
        ),
    }
    return JsonAnswer(answer | writer.prompt_ids())


class _Writer:
    """Writes choices, whole or as a stream's, and remembers the answers."""

    def __init__(
        self, body: ChatRequest, prompt: ChatPrompt, params: SamplingParams, service: Service
    ) -> None:
        self.head: dict[str, Any] = {
            "id": new_id("chatcmpl-"),
            "object": "chat.completion.chunk",
            "created": int(time.time()),
            "model": body.model,
        }
        self._params = params
        self._prompt = prompt
        self._prompter = service.prompter
        self._texts = service.token_texts
        self._gives_ids = bool(body.return_token_ids)
        use = body.tool_use()
        self._names = tuple(use.schemas) if use.reads_calls else ()
        self._readers: dict[int, AnswerReader] = {}

    def prompt_ids(self) -> dict[str, Any]:
        """Return the prompt's ids, if they were asked for."""
        return {"prompt_token_ids": self._prompt.token_ids} if self._gives_ids else {}

    def choice(self, index: int, done: Completion) -> dict[str, Any]:
        """Return a whole choice."""
        read = read_answer(done.text, self._names) if self._names else None
        content = done.text if read is None else read.content
        calls = () if read is None else read.calls
        self._remember(done, content, calls)
        message: dict[str, Any] = {
            "role": "assistant",
            "content": content,
            "refusal": None,
            "annotations": [],
        }
        if calls:
            message |= {"content": content or None, "tool_calls": [_call(call) for call in calls]}
        choice = {
            "index": index,
            "message": message,
            "logprobs": None if done.logprobs is None else chat_logprobs(done.logprobs, self._texts),
            "finish_reason": _reason(done, calls),
        }
        return choice | ({"token_ids": done.token_ids} if self._gives_ids else {})

    def opening(self, index: int) -> list[dict[str, Any]]:
        """Return what comes before the first piece of a choice."""
        self._readers[index] = AnswerReader(self._names)
        opening = _delta(index, {"role": "assistant", "content": ""})
        return [opening | self.prompt_ids()]

    def pieces(self, index: int, chunk: Chunk) -> list[dict[str, Any]]:
        """Return what a chunk gives of its choice, if anything."""
        reader, done = self._readers[index], chunk.completion
        text = reader.push(chunk.text)
        calls: tuple[Call, ...] = ()
        if done is not None:
            rest = reader.end()
            text, calls = text + rest.content, rest.calls
            content = read_answer(done.text, self._names).content if self._names else done.text
            self._remember(done, content, calls)
        extras: dict[str, Any] = {"token_ids": chunk.token_ids} if self._gives_ids else {}
        if chunk.logprobs is not None:
            extras["logprobs"] = chat_logprobs(chunk.logprobs, self._texts)
        pieces = []
        if text or extras:
            pieces.append(_delta(index, {"content": text}) | extras)
        if calls:
            listed = [{"index": place, **_call(call)} for place, call in enumerate(calls)]
            pieces.append(_delta(index, {"tool_calls": listed}))
        if done is not None:
            pieces.append(_delta(index, {}, _reason(done, calls)))
        return pieces

    def _remember(self, done: Completion, content: str, calls: tuple[Call, ...]) -> None:
        self._prompter.remember(self._prompt, done, self._params, content=content, calls=calls)


def _delta(index: int, delta: dict[str, Any], reason: str | None = None) -> dict[str, Any]:
    return {"index": index, "delta": delta, "logprobs": None, "finish_reason": reason}


def _call(call: Call) -> dict[str, Any]:
    function = {"name": call.name, "arguments": call.arguments_json}
    return {"id": new_id("call_"), "type": "function", "function": function}


def _reason(done: Completion, calls: tuple[Call, ...]) -> str:
    return "tool_calls" if calls else done.finish_reason
