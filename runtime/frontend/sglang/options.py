"""From the options of SGLang's `gen` to those of a branch. What can't be done is refused by name, never dropped."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sglang.lang.ir import REGEX_BOOL, REGEX_FLOAT, REGEX_INT, REGEX_STR, SglSamplingParams

from phloem.runtime.errors import InvalidRequest
from phloem.runtime.grammar import Grammar
from phloem.runtime.sampling_params import SamplingParams

_TYPES = {"int": REGEX_INT, "float": REGEX_FLOAT, "str": REGEX_STR, "bool": REGEX_BOOL}
_NUMBER_ENDS = (" ", "\n")
"""What ends a number: its pattern lets white space follow."""


@dataclass(frozen=True, slots=True)
class Order:
    """The options of one `gen`, checked."""

    params: SamplingParams
    n: int
    with_text: bool
    """Whether log-probabilities come with their tokens' text."""


def translate(options: SglSamplingParams) -> Order:
    """Return the options as a branch takes them.

    Raises:
        InvalidRequest: One is out of range, or is none that phloem has.
    """
    _refuse_unknown(options)
    kind = _type_of(options.dtype)
    stop = (options.stop,) if isinstance(options.stop, str) else tuple(options.stop or ())
    params = SamplingParams(
        max_tokens=options.max_new_tokens,
        min_tokens=options.min_new_tokens or 0,
        temperature=options.temperature,
        top_p=options.top_p,
        top_k=None if options.top_k == -1 else options.top_k,
        min_p=options.min_p,
        frequency_penalty=options.frequency_penalty,
        presence_penalty=options.presence_penalty,
        stop=(*stop, *_NUMBER_ENDS) if kind in ("int", "float") else stop,
        stop_token_ids=tuple(options.stop_token_ids or ()),
        ignore_eos=options.ignore_eos,
        logprobs=_given(options.top_logprobs_num) or 0 if options.return_logprob else None,
        grammar=_grammar(options, kind),
    )
    return Order(params, options.n, bool(_given(options.return_text_in_logprobs)))


def _refuse_unknown(options: SglSamplingParams) -> None:
    if options.stop_regex:
        raise InvalidRequest(
            "stop_regex is not supported; use stop, or a regex for the whole text", field="stop_regex"
        )
    if _given(options.logprob_start_len) not in (None, -1):
        raise InvalidRequest(
            "logprob_start_len is not supported: log-probabilities are of what is generated; for the prompt's use "
            "select, or Engine.generate with prompt_logprobs",
            field="logprob_start_len",
        )
    if not isinstance(options.n, int) or options.n < 1:
        raise InvalidRequest(f"n must be a whole number of at least 1, not {options.n!r}", field="n")


def _type_of(dtype: Any) -> str | None:
    name = dtype.__name__ if isinstance(dtype, type) else dtype
    if name is not None and name not in _TYPES:
        raise InvalidRequest(f"dtype must be one of {', '.join(_TYPES)}, not {dtype!r}", field="dtype")
    return name


def _grammar(options: SglSamplingParams, kind: str | None) -> Grammar | None:
    given = [
        name
        for name, value in (
            ("dtype", kind),
            ("regex", options.regex),
            ("json_schema", options.json_schema),
        )
        if value is not None
    ]
    if len(given) > 1:
        raise InvalidRequest(f"give one of {' and '.join(given)}, not both", field=given[0])
    if kind is not None:
        return Grammar.regex(_TYPES[kind])
    if options.regex is not None:
        return Grammar.regex(options.regex)
    return None if options.json_schema is None else Grammar.json_schema(options.json_schema)


def _given(value: Any) -> Any:
    """SGLang's own default for some fields is `(None,)`."""
    return None if isinstance(value, Sequence) else value
