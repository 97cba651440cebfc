"""What OpenAI's two generating endpoints share: fields of requests, usage, ends.

Unknown fields are refused, as OpenAI does: one that is misspelt would silently have no effect. Known ones that mean nothing to one
process with one model are taken and have none (`user`, `metadata`, `store`, `service_tier`, ...). The fields after those of OpenAI are
vLLM's, under its names.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Mapping
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from phloem.radix import Namespace
from phloem.runtime.errors import InvalidRequest
from phloem.runtime.grammar import Grammar
from phloem.runtime.outputs import Usage
from phloem.runtime.sampling_params import MAX_SEED, SamplingParams
from phloem.runtime.server.auth import Tenant
from phloem.runtime.server.errors import invalid
from phloem.runtime.server.settings import ServerSettings


class StreamOptions(BaseModel):
    """What a stream tells besides text."""

    model_config = ConfigDict(extra="forbid", strict=True)

    include_usage: bool = False
    """A last event with the usage."""

    continuous_usage_stats: bool = False
    """The usage so far in every event."""

    include_obfuscation: bool = False
    """Has no effect."""


class SamplingFields(BaseModel):
    """How tokens are chosen, and when the end is: of every request that generates."""

    model_config = ConfigDict(extra="forbid", strict=True)

    temperature: float | None = None
    top_p: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    max_tokens: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None

    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    min_tokens: int | None = None
    ignore_eos: bool | None = None
    stop_token_ids: list[int] | None = None

    def sampling_params(
        self,
        settings: ServerSettings,
        *,
        n: int = 1,
        max_tokens: int | None,
        logprobs: int | None = None,
        prompt_logprobs: int | None = None,
        grammar: Grammar | None = None,
    ) -> SamplingParams:
        """Return the parameters of the engine.

        Raises:
            ApiError: A value is beyond the server's limits.
            InvalidRequest: A value is out of range.
        """
        if logprobs is not None and logprobs > settings.max_logprobs:
            raise invalid(
                f"{logprobs} likeliest tokens are asked for; at most {settings.max_logprobs} are given",
                "logprobs",
            )
        given = {
            "temperature": self.temperature,
            "top_p": self.top_p,
            "min_p": self.min_p,
            "presence_penalty": self.presence_penalty,
            "frequency_penalty": self.frequency_penalty,
            "repetition_penalty": self.repetition_penalty,
            "min_tokens": self.min_tokens,
            "ignore_eos": self.ignore_eos,
            "stop": self.stop or None,
            "stop_token_ids": self.stop_token_ids,
            # vLLM's way to say "all" is -1 or 0.
            "top_k": self.top_k if self.top_k is not None and self.top_k > 0 else None,
            "seed": seed_of(self.seed, "seed"),
            "logit_bias": None if self.logit_bias is None else bias_of(self.logit_bias),
        }
        return SamplingParams(
            n=n,
            max_tokens=max_tokens,
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
            grammar=grammar,
            **{name: value for name, value in given.items() if value is not None},  # type: ignore[arg-type]
        )


class GenerationFields(SamplingFields):
    """Fields of `/v1/completions` and `/v1/chat/completions` alike."""

    model: str
    n: int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None

    user: str | None = Field(None, description="Has no effect.")
    metadata: dict[str, str] | None = Field(None, description="Has no effect.")
    store: bool | None = Field(None, description="Has no effect.")
    service_tier: str | None = Field(None, description="Has no effect.")
    safety_identifier: str | None = Field(None, description="Has no effect.")
    prompt_cache_retention: str | None = Field(None, description="Has no effect: what is used stays longest.")
    prompt_cache_key: str | None = Field(
        None, description="Has no effect: all prompts of a key share what they can."
    )

    cache_salt: str | None = Field(
        None, description="Keeps the cache of this request apart from other salts'."
    )
    return_token_ids: bool | None = None

    @property
    def usage_options(self) -> StreamOptions:
        """The stream's options.

        Raises:
            ApiError: They are given, but there is no stream.
        """
        if self.stream_options is not None and not self.stream:
            raise invalid("stream_options are for streams: set stream, or leave them out", "stream_options")
        return self.stream_options or StreamOptions()

    def namespace(self, tenant: Tenant) -> Namespace:
        """Return where the request's KV is kept."""
        return tenant.namespace(self.cache_salt)

    def params(
        self,
        settings: ServerSettings,
        *,
        max_tokens: int | None,
        logprobs: int | None = None,
        prompt_logprobs: int | None = None,
        grammar: Grammar | None = None,
    ) -> SamplingParams:
        """Return the parameters of the engine, for as many completions as are asked for.

        Raises:
            ApiError: A value is beyond the server's limits.
            InvalidRequest: A value is out of range.
        """
        return self.sampling_params(
            settings,
            n=checked_n(self.n, settings),
            max_tokens=max_tokens,
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
            grammar=grammar,
        )


def checked_n(n: int | None, settings: ServerSettings) -> int:
    """Return how many are to be made of something; None is one.

    Raises:
        ApiError: More than the server makes.
    """
    n = 1 if n is None else n
    if n > settings.max_n:
        raise invalid(f"n is {n}; at most {settings.max_n} are made", "n")
    return n


def usage_dict(usages: Iterable[Usage], *, completion_tokens: int) -> dict[str, Any]:
    """Return OpenAI's usage.

    Args:
        usages: One for each prompt: of its first generation, which tells what the prompt itself cost.
        completion_tokens: Of all generations.
    """
    known = list(usages)
    prompt_tokens = sum(usage.prompt_tokens for usage in known)
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": sum(usage.cached_tokens for usage in known)},
    }


class UsageSoFar:
    """The usage of a stream of several generations, as far as they have come."""

    def __init__(self, n: int) -> None:
        """Begin with nothing; `n` generations belong to each prompt."""
        self._n = n
        self._latest: dict[int, Usage] = {}

    def take(self, index: int, usage: Usage | None) -> None:
        """Take the usage of a generation's newest chunk."""
        if usage is not None:
            self._latest[index] = usage

    def to_dict(self) -> dict[str, Any]:
        """Return it in OpenAI's form."""
        # The first of a prompt's generations may not have begun: the others tell the prompt's length, but not its cost.
        firsts: dict[int, Usage] = {}
        for index in sorted(self._latest):
            firsts.setdefault(index // self._n, self._latest[index])
        completion_tokens = sum(usage.completion_tokens for usage in self._latest.values())
        return usage_dict(firsts.values(), completion_tokens=completion_tokens)


def new_id(prefix: str) -> str:
    """Return an id such as `chatcmpl-3f2a...`, that nobody can guess."""
    return prefix + secrets.token_hex(16)


def seed_of(seed: int | None, field: str) -> int | None:
    """Return the engine's seed. Clients may send a negative one; the same one is then another number, always the same.

    Raises:
        InvalidRequest: It has more than 64 bits.
    """
    if seed is not None and not -MAX_SEED - 1 <= seed <= MAX_SEED:
        raise InvalidRequest(f"{field} must be a whole number of 64 bits, not {seed}", field=field)
    return None if seed is None else seed & MAX_SEED


def bias_of(bias: Mapping[str, float]) -> dict[int, float]:
    """Return a bias whose keys are numbers; in JSON they are strings.

    Raises:
        InvalidRequest: A key is no token id.
    """
    for token_id in bias:
        if not (token_id.isascii() and token_id.isdigit() and len(token_id) < 10):
            raise InvalidRequest(
                f"logit_bias has {token_id!r} where a token id should be", field="logit_bias"
            )
    return {int(token_id): value for token_id, value in bias.items()}
