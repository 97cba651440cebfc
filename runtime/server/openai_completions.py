"""OpenAI's `/v1/completions`: prompts as text, token ids, or lists of either.

`suffix` and `best_of` above `n` are refused. With `echo`, the prompt is part of the text and of the log-probabilities; `max_tokens: 0` then
scores a prompt without generating.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from phloem.runtime.outputs import Chunk, Completion
from phloem.runtime.prompts import encode, is_quick
from phloem.runtime.sampling_params import SamplingParams
from phloem.runtime.server.errors import JsonAnswer, invalid
from phloem.runtime.server.openai_fields import GenerationFields, new_id, usage_dict
from phloem.runtime.server.openai_logprobs import CompletionLogprobs, joined
from phloem.runtime.server.openai_stream import openai_events
from phloem.runtime.server.service import Run, Service, ServiceDep, TenantDep

DEFAULT_MAX_TOKENS = 16

router = APIRouter(tags=["openai"])


class CompletionRequest(GenerationFields):
    """A request of `/v1/completions`."""

    prompt: str | list[str] | list[int] | list[list[int]]
    echo: bool | None = None
    logprobs: int | None = None
    suffix: str | None = None
    best_of: int | None = None

    def checked_params(self, service: Service) -> SamplingParams:
        """Return the engine's parameters.

        Raises:
            ApiError: The request asks for what there is not, or too much.
            InvalidRequest: A value is out of range.
        """
        if self.suffix:
            raise invalid("suffix is not supported: models here do not fill in the middle", "suffix")
        if self.best_of is not None and self.best_of != (self.n or 1):
            raise invalid(
                f"best_of is {self.best_of}; only the value of n is supported: ask for n and choose",
                "best_of",
            )
        if self.stream and self.echo and self.logprobs is not None:
            raise invalid(
                "the log-probabilities of an echo are not streamed: ask for them without stream", "stream"
            )
        return self.params(
            service.settings,
            max_tokens=DEFAULT_MAX_TOKENS if self.max_tokens is None else self.max_tokens,
            logprobs=self.logprobs,
            prompt_logprobs=self.logprobs if self.echo else None,
        )

    def prompts(self) -> list[str | list[int]]:
        """Return each prompt.

        Raises:
            ApiError: There is none.
        """
        prompt = self.prompt
        if isinstance(prompt, str):
            return [prompt]
        if not prompt:
            raise invalid("prompt is empty; it needs at least one text or token", "prompt")
        if all(isinstance(each, int) for each in prompt):
            return [prompt]  # type: ignore[list-item]
        return list(prompt)  # type: ignore[arg-type]


@router.post("/v1/completions")
async def create_completion(
    body: CompletionRequest, request: Request, service: ServiceDep, tenant: TenantDep
) -> Response:
    """Complete one prompt or several."""
    service.check_model(body.model)
    params, options = body.checked_params(service), body.usage_options
    given = body.prompts()
    service.gate.check(len(given) * params.n)
    prompts = (
        _encoded(given, service) if is_quick(given) else await asyncio.to_thread(_encoded, given, service)
    )
    run = await service.start(prompts, params, body.namespace(tenant))
    writer = _Writer(body, prompts, params, service)
    if body.stream:
        events = await openai_events(run, writer, request, options=options, n=params.n)
        return service.stream(events, run)
    return await _whole(run, writer, request)


async def _whole(run: Run, writer: _Writer, request: Request) -> Response:
    completions = await run.whole(request)
    n = writer.params.n
    return JsonAnswer(
        {
            **writer.head,
            "choices": [writer.choice(index, done) for index, done in enumerate(completions)],
            "usage": usage_dict(
                [done.usage for done in completions[::n]],
                completion_tokens=sum(done.usage.completion_tokens for done in completions),
            ),
        }
    )


def _encoded(prompts: Sequence[str | list[int]], service: Service) -> list[list[int]]:
    engine = service.engine
    names = ["prompt"] if len(prompts) == 1 else [f"prompt[{index}]" for index in range(len(prompts))]
    return [
        encode(prompt, engine.tokenizer, vocab_size=engine.model.vocab_size, name=name).tolist()
        for prompt, name in zip(prompts, names, strict=True)
    ]


class _Writer:
    """Writes choices, whole or as a stream's."""

    def __init__(
        self,
        body: CompletionRequest,
        prompts: Sequence[list[int]],
        params: SamplingParams,
        service: Service,
    ) -> None:
        self.params = params
        self.head = {
            "id": new_id("cmpl-"),
            "object": "text_completion",
            "created": int(time.time()),
            "model": body.model,
        }
        self._body = body
        self._prompts = prompts
        self._given = body.prompts()
        self._tokenizer = service.engine.tokenizer
        self._texts = service.token_texts
        self._logs: dict[int, CompletionLogprobs] = {}

    def choice(self, index: int, done: Completion) -> dict[str, Any]:
        """Return a whole choice."""
        log = self._log(index)
        prompt = self._prompt(index)
        parts = []
        if done.prompt_logprobs is not None:
            parts += [log.first(prompt[0]), log.part(done.prompt_logprobs)]
        if done.logprobs is not None:
            parts.append(log.part(done.logprobs))
        text = self._echoed(index) + done.text
        choice = _choice(index, text, parts, done.finish_reason)
        if self._body.return_token_ids:
            choice |= {"prompt_token_ids": prompt, "token_ids": done.token_ids}
        return choice

    def opening(self, index: int) -> list[dict[str, Any]]:
        """Return what comes before the first piece of a choice."""
        echoed = self._echoed(index)
        ids = {"prompt_token_ids": self._prompt(index), "token_ids": []}
        if self._body.return_token_ids:
            return [_choice(index, echoed, [], None) | ids]
        return [_choice(index, echoed, [], None)] if echoed else []

    def pieces(self, index: int, chunk: Chunk) -> list[dict[str, Any]]:
        """Return what a chunk gives of its choice, if anything."""
        parts = [] if chunk.logprobs is None else [self._log(index).part(chunk.logprobs)]
        if not (chunk.text or parts or chunk.completion or self._body.return_token_ids):
            return []
        reason = None if chunk.completion is None else chunk.completion.finish_reason
        choice = _choice(index, chunk.text, parts, reason)
        return [choice | {"token_ids": chunk.token_ids} if self._body.return_token_ids else choice]

    def _echoed(self, index: int) -> str:
        """Return the prompt's text, if it is to be given back."""
        if not self._body.echo:
            return ""
        given = self._given[index // self.params.n]
        if isinstance(given, str):
            return given
        return self._tokenizer.decode(self._prompt(index), skip_special_tokens=False)

    def _prompt(self, index: int) -> list[int]:
        return self._prompts[index // self.params.n]

    def _log(self, index: int) -> CompletionLogprobs:
        return self._logs.setdefault(index, CompletionLogprobs(self._texts))


def _choice(index: int, text: str, parts: Sequence[dict[str, Any]], reason: str | None) -> dict[str, Any]:
    return {
        "index": index,
        "text": text,
        "logprobs": joined(parts) if parts else None,
        "finish_reason": reason,
    }
