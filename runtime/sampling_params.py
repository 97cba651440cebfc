"""How the next token is chosen and when a generation ends."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from phloem.runtime.errors import InvalidRequest

if TYPE_CHECKING:
    from phloem.runtime.grammar import Grammar

MAX_SEED = 2**63 - 1
MAX_STOP_STRINGS = 64
MAX_STOP_CHARACTERS = 4_096
MAX_N = 10_000
MAX_LOGPROBS = 1_000
MAX_BIAS = 1_000.0


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """Parameters of one generation. `temperature=0` is greedy.

    Filters apply in this order: temperature, `top_k`, `top_p` (of what `top_k` left), `min_p` (relative to
    the likeliest token); then one token is drawn.

    Raises:
        InvalidRequest: A value is out of range; the message names the field and the limit.
    """

    max_tokens: int | None = 256
    """Tokens to generate at most. None: as many as the context holds. The context limits it in any case. 0: compute the prompt,
    which also gives its log-probabilities."""

    min_tokens: int = 0
    """No end-of-sequence token, stop id or stop string counts before so many tokens."""

    temperature: float = 1.0
    top_k: int | None = None
    """Keep the k likeliest tokens. None: all."""

    top_p: float = 1.0
    """Keep the smallest set of likeliest tokens whose probabilities sum to at least this (Holtzman et al., 2020)."""

    min_p: float = 0.0
    """Drop tokens less likely than this fraction of the likeliest (Nguyen et al., 2024)."""

    seed: int | None = None
    """The draw at position p is a function of (seed, p) alone: batch mates and caching do not matter. None: random."""

    stop: str | Sequence[str] = ()
    """End before the first of these strings; it is not part of the text."""

    stop_token_ids: Sequence[int] = ()
    """End at any of these tokens, besides the model's own end-of-sequence tokens."""

    ignore_eos: bool = False
    """Go on past the model's end-of-sequence tokens."""

    n: int = 1
    """Completions per prompt. Child i draws from (seed, i), and alone it would draw the same."""

    logprobs: int | None = None
    """Report the log-probability of each generated token, and of so many likeliest alternatives. None: do not."""

    prompt_logprobs: int | None = None
    """The same for the prompt's tokens after `prompt_logprobs_from`, which are computed for it: they do not count as cached."""

    prompt_logprobs_from: int = 0
    """Position of the prompt's token after which `prompt_logprobs` begin; what is before it may come from the cache."""

    repetition_penalty: float = 1.0
    """Divides positive and multiplies negative logits of tokens in prompt and output (Keskar et al., 2019)."""

    presence_penalty: float = 0.0
    """Subtracted from the logits of tokens that were generated already."""

    frequency_penalty: float = 0.0
    """Subtracted once for each time that a token was generated."""

    grammar: Grammar | None = None
    """What the text may be: a JSON schema, a regular expression, a choice or a grammar. See `phloem.runtime.Grammar`."""

    heal: str = ""
    """Text at the end of the prompt that its tokens leave out. The output begins with it, in tokens that may reach beyond it, and
    neither `text` nor a stop string sees it; a `grammar` applies from there on (token healing)."""

    logit_bias: Mapping[int, float] = field(default_factory=dict)
    """Added to the logits of these token ids."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "stop", _strings(self.stop))
        object.__setattr__(self, "stop_token_ids", _token_ids(self.stop_token_ids))
        object.__setattr__(self, "logit_bias", _bias(self.logit_bias))
        self._check_counts()
        self._check_numbers()
        if not isinstance(self.ignore_eos, bool):
            raise InvalidRequest(
                f"ignore_eos must be True or False, not {self.ignore_eos!r}", field="ignore_eos"
            )
        if not isinstance(self.heal, str) or self.heal.encode(errors="ignore").decode() != self.heal:
            raise InvalidRequest(
                f"heal must be a string without lone surrogates, not {self.heal!r}", field="heal"
            )
        if self.grammar is not None:
            _require_grammar(self.grammar)

    def _check_counts(self) -> None:
        _whole("min_tokens", self.min_tokens, at_least=0)
        _whole("n", self.n, at_least=1, at_most=MAX_N)
        _whole("prompt_logprobs_from", self.prompt_logprobs_from, at_least=0)
        for name, least, most in (
            ("max_tokens", 0, None),
            ("top_k", 1, None),
            ("seed", 0, MAX_SEED),
            ("logprobs", 0, MAX_LOGPROBS),
            ("prompt_logprobs", 0, MAX_LOGPROBS),
        ):
            if getattr(self, name) is not None:
                _whole(name, getattr(self, name), at_least=least, at_most=most)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise InvalidRequest(
                f"min_tokens ({self.min_tokens}) is larger than max_tokens ({self.max_tokens})",
                field="min_tokens",
            )
        if self.prompt_logprobs is not None and self.n > 1:
            raise InvalidRequest(
                "prompt_logprobs are given for n=1; ask for them in a request of their own",
                field="prompt_logprobs",
            )

    def _check_numbers(self) -> None:
        _real("temperature", self.temperature, 0.0, math.inf)
        _real("top_p", self.top_p, 0.0, 1.0, above_least=True)
        _real("min_p", self.min_p, 0.0, 1.0)
        _real("repetition_penalty", self.repetition_penalty, 0.01, 100.0)
        for name in ("presence_penalty", "frequency_penalty"):
            _real(name, getattr(self, name), -MAX_BIAS, MAX_BIAS)

    @property
    def has_penalties(self) -> bool:
        """Whether logits depend on the tokens so far."""
        return (self.repetition_penalty, self.presence_penalty, self.frequency_penalty) != (1.0, 0.0, 0.0)

    @property
    def is_greedy(self) -> bool:
        """Whether the likeliest token is taken, without drawing."""
        return self.temperature == 0


def _whole(name: str, value: object, *, at_least: int, at_most: int | None = None) -> None:
    good = isinstance(value, int) and not isinstance(value, bool) and value >= at_least
    if not good or (at_most is not None and isinstance(value, int) and value > at_most):
        limit = f"of at least {at_least}" if at_most is None else f"from {at_least} to {at_most}"
        raise InvalidRequest(f"{name} must be a whole number {limit}, not {value!r}", field=_field(name))


def _real(name: str, value: object, least: float, most: float, *, above_least: bool = False) -> None:
    good = isinstance(value, (int, float)) and not isinstance(value, bool) and least <= value <= most
    good = good and abs(value) <= sys.float_info.max  # type: ignore[arg-type]
    if not good or (above_least and value == least):
        bound = f"above {least:g}" if above_least else f"of at least {least:g}"
        limit = bound if most == math.inf else f"{bound} and at most {most:g}"
        raise InvalidRequest(f"{name} must be a finite number {limit}, not {value!r}", field=_field(name))


def _field(name: str) -> str:
    """The parameter that a name in a message belongs to: "logit_bias[7]" is part of logit_bias."""
    return name.partition("[")[0].partition(" ")[0]


def _require_grammar(value: object) -> None:
    from phloem.runtime.grammar import Grammar  # brings torch, which a plain SamplingParams does without

    if not isinstance(value, Grammar):
        raise InvalidRequest(
            f"grammar must be a Grammar, such as Grammar.json_schema(...), not {type(value).__name__}",
            field="grammar",
        )


def _bias(bias: object) -> dict[int, float]:
    if not isinstance(bias, Mapping):
        raise InvalidRequest(f"logit_bias must map token ids to numbers, not {bias!r}", field="logit_bias")
    for token_id, value in bias.items():
        _whole("logit_bias token id", token_id, at_least=0)
        _real(f"logit_bias[{token_id}]", value, -MAX_BIAS, MAX_BIAS)
    return dict(bias)


def _strings(stop: object) -> tuple[str, ...]:
    strings = (stop,) if isinstance(stop, str) else tuple(stop) if isinstance(stop, Sequence) else None
    if strings is None or any(not isinstance(string, str) or not string for string in strings):
        raise InvalidRequest(
            f"stop must be a string or several, none of them empty, not {stop!r}", field="stop"
        )
    if len(strings) > MAX_STOP_STRINGS:
        raise InvalidRequest(
            f"stop has {len(strings)} strings; at most {MAX_STOP_STRINGS} are taken", field="stop"
        )
    # Each token's text is searched for them, with as much before it as they are long.
    if (num_characters := sum(map(len, strings))) > MAX_STOP_CHARACTERS:
        raise InvalidRequest(
            f"stop has {num_characters:,} characters; at most {MAX_STOP_CHARACTERS:,} are taken, in all its strings",
            field="stop",
        )
    return strings


def _token_ids(ids: object) -> tuple[int, ...]:
    good = isinstance(ids, Sequence) and not isinstance(ids, (str, bytes))
    if not good or any(not isinstance(i, int) or isinstance(i, bool) or i < 0 for i in ids):  # type: ignore[attr-defined]
        raise InvalidRequest(
            f"stop_token_ids must be token ids of 0 and more, not {ids!r}", field="stop_token_ids"
        )
    return tuple(ids)  # type: ignore[arg-type]
