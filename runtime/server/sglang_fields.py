"""What requests of SGLang's `/generate` hold, and what of it each prompt gets.

Unknown fields are refused: one that is misspelt would silently have no effect. So are those that ask for what there is not (images,
hidden states, adapters by path); those that mean nothing to one process with one model are taken and have no effect.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field

from phloem.runtime.errors import GrammarError
from phloem.runtime.grammar import Grammar
from phloem.runtime.sampling_params import SamplingParams
from phloem.runtime.server.errors import grammar_refused, invalid
from phloem.runtime.server.openai_fields import bias_of, new_id, seed_of
from phloem.runtime.server.settings import ServerSettings

DEFAULT_MAX_NEW_TOKENS = 128

_UNSUPPORTED = {
    "image_data": "models here read text only",
    "video_data": "models here read text only",
    "audio_data": "models here read text only",
    "input_embeds": "give text or input_ids",
    "lora_path": "one model is served, without adapters",
    "session_params": "send the whole text; what it shares with earlier ones is cached",
    "custom_logit_processor": "no code of a request is run; there are logit_bias, regex and json_schema",
    "return_hidden_states": "hidden states leave no server here",
    "token_ids_logprob": "use top_logprobs_num",
}
"""Fields of a request that can't be done, and why or what to do instead."""

_UNSUPPORTED_SAMPLING = {
    "stop_regex": "use stop, or a regex for the whole text",
    "ebnf": "use regex or json_schema",
    "structural_tag": "use regex or json_schema",
    "custom_params": "no code of a request is run",
    "no_stop_trim": "a stop string is no part of the text",
}

Value = TypeVar("Value")
Count = Annotated[int, Field(ge=0)]


class SglangSampling(BaseModel):
    """The `sampling_params` of a prompt."""

    model_config = ConfigDict(extra="forbid", strict=True)

    max_new_tokens: Count | None = None
    min_new_tokens: Count | None = None
    n: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = Field(None, description="-1: all.")
    min_p: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    repetition_penalty: float | None = None
    ignore_eos: bool | None = None
    regex: str | None = None
    json_schema: str | None = Field(None, description="As JSON text.")
    logit_bias: dict[str, float] | None = None
    sampling_seed: int | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = Field(None, description="Has no effect.")
    stream_interval: int | None = Field(None, description="Has no effect.")

    stop_regex: Any = Field(None, description="Not supported.")
    ebnf: Any = Field(None, description="Not supported.")
    structural_tag: Any = Field(None, description="Not supported.")
    custom_params: Any = Field(None, description="Not supported.")
    no_stop_trim: Any = Field(None, description="Not supported.")

    @property
    def max_tokens(self) -> int:
        """Tokens to generate at most."""
        return DEFAULT_MAX_NEW_TOKENS if self.max_new_tokens is None else self.max_new_tokens

    def params(
        self, settings: ServerSettings, *, logprobs: int | None, prompt_logprobs_from: int | None
    ) -> SamplingParams:
        """Return the parameters of the engine.

        Args:
            settings: The server's limits.
            logprobs: How many likeliest tokens are reported beside each token. None: no log-probabilities at all.
            prompt_logprobs_from: After which token of the prompt its log-probabilities begin. None: none of the prompt's.

        Raises:
            ApiError: The request asks for what there is not, or too much.
            InvalidRequest: A value is out of range.
        """
        _refuse(self, _UNSUPPORTED_SAMPLING)
        if self.skip_special_tokens is False:
            raise invalid(
                "skip_special_tokens is false; texts are without special tokens: read output_ids",
                "skip_special_tokens",
            )
        if (self.min_new_tokens or 0) > self.max_tokens:
            raise invalid(
                f"min_new_tokens ({self.min_new_tokens}) is larger than max_new_tokens ({self.max_tokens})",
                "min_new_tokens",
            )
        n = 1 if self.n is None else self.n
        if n > settings.max_n:
            raise invalid(f"n is {n}; at most {settings.max_n} are made", "n")
        if n > 1 and prompt_logprobs_from is not None:
            raise invalid(
                "the prompt's log-probabilities are given for n=1: leave n out, or logprob_start_len",
                "logprob_start_len",
            )
        given = {
            "min_tokens": self.min_new_tokens,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_k": None if self.top_k == -1 else self.top_k,
            "min_p": self.min_p,
            "frequency_penalty": self.frequency_penalty,
            "presence_penalty": self.presence_penalty,
            "repetition_penalty": self.repetition_penalty,
            "ignore_eos": self.ignore_eos,
            "stop": self.stop or None,
            "stop_token_ids": self.stop_token_ids,
            "seed": seed_of(self.sampling_seed, "sampling_seed"),
            "logit_bias": None if self.logit_bias is None else bias_of(self.logit_bias),
            "grammar": self._grammar(settings.max_grammar_bytes),
        }
        return SamplingParams(
            n=n,
            max_tokens=self.max_tokens,
            logprobs=logprobs,
            prompt_logprobs=None if prompt_logprobs_from is None else logprobs,
            prompt_logprobs_from=prompt_logprobs_from or 0,
            **{name: value for name, value in given.items() if value is not None},  # type: ignore[arg-type]
        )

    def _grammar(self, max_bytes: int) -> Grammar | None:
        if self.regex is not None and self.json_schema is not None:
            raise invalid("give one of regex and json_schema, not both", "regex")
        name = "json_schema" if self.regex is None else "regex"
        text = self.json_schema if self.regex is None else self.regex
        if text is None:
            return None
        num_bytes = len(text.encode("utf-8", "surrogatepass"))
        if num_bytes > max_bytes:
            raise invalid(f"{name} has {num_bytes:,} bytes; at most {max_bytes:,} are compiled", name)
        try:
            return Grammar.json_schema(text) if self.regex is None else Grammar.regex(text)
        except GrammarError as error:
            raise grammar_refused(error, name) from error


@dataclass(frozen=True, slots=True)
class PromptOrder:
    """What is to be done for one prompt."""

    given: str | list[int]
    name: str
    """What errors call it, such as `text[2]`."""

    params: SamplingParams
    rid: str
    """What the answer calls it; answers of several generations add a number."""

    has_first: bool
    """Whether the log-probabilities of the prompt begin with its first token, which has none."""

    with_text: bool
    """Whether log-probabilities come with their tokens' texts."""


class GenerateRequest(BaseModel):
    """A request of `/generate`. What may be a list has one entry for each prompt then."""

    model_config = ConfigDict(extra="forbid", strict=True)

    text: str | list[str] | None = None
    input_ids: list[int] | list[list[int]] | None = None
    sampling_params: SglangSampling | list[SglangSampling] | None = None
    rid: str | list[str] | None = None
    stream: bool = False
    return_logprob: bool | list[bool | None] | None = None
    logprob_start_len: int | list[int | None] | None = Field(
        None, description="Reported are the tokens of the prompt after this one; -1: none of a prompt that is gone on from."
    )  # fmt: skip
    top_logprobs_num: Count | list[Count | None] | None = None
    return_text_in_logprobs: bool | list[bool | None] | None = None
    extra_key: str | None = Field(None, description="Keeps the cache of this request apart from other keys'.")

    log_metrics: bool | None = Field(None, description="Has no effect.")
    no_logs: bool | None = Field(None, description="Has no effect: prompts are never logged.")
    priority: int | None = Field(None, description="Has no effect.")
    conversation_id: str | None = Field(None, description="Has no effect.")
    custom_labels: dict[str, str] | None = Field(None, description="Has no effect.")
    modalities: list[str] | None = Field(None, description="Has no effect.")

    image_data: Any = Field(None, description="Not supported.")
    video_data: Any = Field(None, description="Not supported.")
    audio_data: Any = Field(None, description="Not supported.")
    input_embeds: Any = Field(None, description="Not supported.")
    lora_path: Any = Field(None, description="Not supported.")
    session_params: Any = Field(None, description="Not supported.")
    custom_logit_processor: Any = Field(None, description="Not supported.")
    return_hidden_states: Any = Field(None, description="Not supported.")
    token_ids_logprob: Any = Field(None, description="Not supported.")

    @property
    def is_single(self) -> bool:
        """Whether it has one prompt that is not in a list."""
        if self.text is not None:
            return isinstance(self.text, str)
        return not self.input_ids or isinstance(self.input_ids[0], int)

    @property
    def num_prompts(self) -> int:
        """How many prompts it has, before anything is checked."""
        return 1 if self.is_single else len(self.text or self.input_ids or ())

    def orders(self, settings: ServerSettings) -> list[PromptOrder]:
        """Return what is to be done, for each prompt.

        Raises:
            ApiError: The request asks for what there is not, or too much.
            InvalidRequest: A value is out of range.
        """
        _refuse(self, _UNSUPPORTED)
        field, prompts = self._prompts()
        count = len(prompts)
        fields = _per_prompt(self.sampling_params, count, "sampling_params")
        logprobs = [
            top or 0 if wanted else None
            for wanted, top in zip(
                _per_prompt(self.return_logprob, count, "return_logprob"),
                _per_prompt(self.top_logprobs_num, count, "top_logprobs_num"),
                strict=True,
            )
        ]
        starts = _per_prompt(self.logprob_start_len, count, "logprob_start_len")
        with_text = _per_prompt(self.return_text_in_logprobs, count, "return_text_in_logprobs")
        rids = self._rids(count)
        default = SglangSampling.model_validate({})
        made: dict[tuple[int, int | None, int | None], SamplingParams] = {}  # most often one for all prompts
        orders = []
        for index, given in enumerate(prompts):
            sampling = fields[index] or default
            start = _checked_start(starts[index], sampling, logprobs[index])
            key = id(sampling), logprobs[index], start
            if key not in made:
                _check_top(logprobs[index], settings)
                made[key] = sampling.params(settings, logprobs=logprobs[index], prompt_logprobs_from=start)
            params = made[key]
            name = field if self.is_single else f"{field}[{index}]"
            orders.append(PromptOrder(given, name, params, rids[index], start == 0, bool(with_text[index])))
        if len({order.params.n for order in orders}) > 1:
            raise invalid("n must be the same for all prompts of a request", "n")
        return orders

    def _prompts(self) -> tuple[str, list[str | list[int]]]:
        """Return the field that the prompts are in, and them."""
        if (self.text is None) == (self.input_ids is None):
            raise invalid("give the prompt as text or as input_ids, one of them", "text")
        field, given = ("input_ids", self.input_ids) if self.text is None else ("text", self.text)
        prompts: list[Any] = [given] if self.is_single else list(given or ())
        if not prompts:
            raise invalid(f"{field} has no prompts", field)
        return field, prompts

    def _rids(self, count: int) -> list[str]:
        if isinstance(self.rid, str) and not self.is_single:
            return [f"{self.rid}_{index}" for index in range(count)]
        return [rid or new_id("") for rid in _per_prompt(self.rid, count, "rid")]


def _per_prompt(value: Value | Sequence[Value | None] | None, count: int, field: str) -> list[Value | None]:
    """Return one value for each prompt. A client may say nothing by a list with null in it."""
    if isinstance(value, list):
        if len(value) != count and any(each is not None for each in value):
            raise invalid(f"{field} has {len(value)} entries for {count} prompts", field)
        return value if len(value) == count else [None] * count
    return [value] * count  # type: ignore[list-item]


def _checked_start(given: int | None, sampling: SglangSampling, logprobs: int | None) -> int | None:
    """Return after which token of the prompt log-probabilities begin; None for none of them.

    By default they are of what is generated; where nothing is, of the whole prompt.
    """
    if logprobs is None:
        return None
    if given is not None and given < -1:
        raise invalid(f"logprob_start_len must be at least -1, not {given}", "logprob_start_len")
    if given in (None, -1):
        return 0 if sampling.max_tokens == 0 else None
    return given


def _check_top(logprobs: int | None, settings: ServerSettings) -> None:
    if logprobs is not None and logprobs > settings.max_logprobs:
        raise invalid(
            f"{logprobs} likeliest tokens are asked for; at most {settings.max_logprobs} are given",
            "top_logprobs_num",
        )


def _refuse(request: BaseModel, unsupported: dict[str, str]) -> None:
    for name, advice in unsupported.items():
        value = getattr(request, name)
        if any(value) if isinstance(value, list) else value:
            raise invalid(f"{name} is not supported: {advice}", name)
