"""Generating on a path: from `gen`'s arguments to the captured value, with seams healed before and endings cut off after."""

from __future__ import annotations

import json as json_module
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import lru_cache
from typing import Any

from phloem.runtime.errors import Cancelled, IncompleteOutput, InvalidRequest
from phloem.runtime.frontend.program.calls import Calls, OnText
from phloem.runtime.frontend.program.tokens import MAX_SEAM, TokenPath
from phloem.runtime.grammar import Grammar
from phloem.runtime.outputs import Completion
from phloem.runtime.sampling_params import SamplingParams

_OPTIONS = frozenset(field.name for field in fields(SamplingParams)) - {
    "n",
    "grammar",
    "heal",
    "prompt_logprobs",
    "prompt_logprobs_from",
}


@dataclass(slots=True)
class Wanted:
    """The arguments of one call of `gen`, as they came."""

    n: int
    regex: str | None
    json: Any
    grammar: Grammar | None
    heal: bool
    sampling: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Spec:
    """The same, checked. Calls of the same arguments share it."""

    n: int
    heal: bool
    options: Mapping[str, Any]
    """Of `params`, by name."""

    params: SamplingParams
    parse: Callable[[str], Any]
    """From the text to the captured value."""

    def value(self, completion: Completion) -> Any:
        """Return what is captured.

        Raises:
            Cancelled: The run, or the fork, was ended meanwhile.
            IncompleteOutput: The text was cut off before it fit its grammar.
        """
        if completion.finish_reason == "abort":
            raise Cancelled("the run or the fork was ended while it generated", partial=completion.text)
        if completion.fits_grammar is False:
            raise IncompleteOutput(
                f"the output does not fit its grammar yet after {len(completion.token_ids)} tokens "
                f"(max_tokens={self.params.max_tokens}): raise max_tokens, use no stop strings, or bound the grammar's strings and lists; "
                f"it begins with {completion.text[:80]!r}",
                partial=completion.text,
            )
        return self.parse(completion.text)


def check(want: Wanted) -> Spec:
    """Check the arguments of `gen`.

    Raises:
        InvalidRequest: An option is unknown or out of range, or more than one grammar is given.
        GrammarError: The grammar's form is wrong.
    """
    if want.regex is None and want.json is None and want.grammar is None:
        try:
            return _plain_spec(want.n, want.heal, **want.sampling)
        except TypeError:  # a list or a mapping among them, which can't be looked up
            return _checked(want)
    return _checked(want)


@lru_cache(maxsize=256, typed=True)
def _plain_spec(n: int, heal: bool, /, **sampling: Any) -> Spec:
    """Check arguments without a grammar, once for all the times that a program, or a loop, asks for the same ones."""
    return _checked(Wanted(n, None, None, None, heal, sampling))


def _checked(want: Wanted) -> Spec:
    if not want.sampling.keys() <= _OPTIONS:
        unknown = want.sampling.keys() - _OPTIONS
        raise InvalidRequest(
            f"gen has no option {', '.join(sorted(unknown))}; there are name, n, regex, json, grammar, heal and "
            f"{', '.join(sorted(_OPTIONS))}",
            field=sorted(unknown)[0],
        )
    grammar = want.grammar
    if (want.regex, want.json, grammar).count(None) < 2:
        raise InvalidRequest("give one of regex, json and grammar, not several", field="grammar")
    parse: Callable[[str], Any] = str
    if want.regex is not None:
        grammar = Grammar.regex(want.regex)
    elif want.json is not None:
        grammar = Grammar.json_schema(want.json)
        parse = getattr(want.json, "model_validate_json", json_module.loads)
    options = want.sampling if grammar is None else {**want.sampling, "grammar": grammar}
    return Spec(want.n, want.heal, options, _params(options), parse)


def _params(options: Mapping[str, Any]) -> SamplingParams:
    try:
        return _known_params(**options)
    except TypeError:  # a list or a mapping among them, which can't be looked up
        return SamplingParams(**options)


@lru_cache(maxsize=256, typed=True)
def _known_params(**options: Any) -> SamplingParams:
    """Return parameters that are checked once for all the times that a program, or a loop, asks for the same ones."""
    return SamplingParams(**options)


async def generate(path: TokenPath, calls: Calls, spec: Spec, on_text: OnText | None) -> list[Completion]:
    """Generate at the end of a path, which then holds the first of the texts.

    Raises:
        PhloemError: The generation failed; the path is as it was.
    """
    seam = _cut_seam(path) if spec.heal and spec.params.max_tokens != 0 else _NO_SEAM
    params = _healing(spec, seam)
    try:
        branch = await path.settle(calls)
        if spec.n == 1:
            completion = await calls.generate(branch, params, on_text)
            path.follow(completion.token_ids)
            completions = [completion]
        else:
            first, *others = await calls.expand(branch, spec.n, params)
            completions = [each.completion for each in (first, *others) if each.completion is not None]
            path.follow(completions[0].token_ids, first)
            for each in others:
                each.release()
    except BaseException:
        if not path.is_released:
            path.append(seam.ids, is_text=True)
        raise
    _drop_end(path, completions[0], seam)
    return completions


@dataclass(frozen=True, slots=True)
class _Seam:
    """The end of the text that is left to the model to tokenise anew."""

    ids: Sequence[int] = ()
    text: str = ""


_NO_SEAM = _Seam()


def _cut_seam(path: TokenPath) -> _Seam:
    """Cut off the end of the text that could be the beginning of a longer token, and return it; at least one token stays."""
    tokenizer = path.engine.tokenizer
    count = min(tokenizer.num_joinable(path.seam()), len(path.ids) - 1)
    if count <= 0:
        return _NO_SEAM
    ids = path.ids[-count:]
    text = tokenizer.text_after(path.ids[-count - MAX_SEAM : -count], ids)
    if not text:
        return _NO_SEAM
    path.cut(len(path.ids) - count)
    return _Seam(ids, text)


def _healing(spec: Spec, seam: _Seam) -> SamplingParams:
    if not seam.ids:
        return spec.params
    max_tokens = None if spec.params.max_tokens is None else spec.params.max_tokens + len(seam.ids)
    return _params({**spec.options, "heal": seam.text, "max_tokens": max_tokens})


def _drop_end(path: TokenPath, completion: Completion, seam: _Seam) -> None:
    """Do as `drop_end`, for text that begins with a seam."""
    ids = completion.token_ids
    if not completion.text and not (" " + path.engine.tokenizer.decode(ids)).endswith(seam.text):
        # It took more tokens than there were to say the seam again.
        path.cut(len(path.ids) - len(ids))
        path.append(seam.ids, is_text=True)
        return
    drop_end(path, completion, seam.text)


def drop_end(path: TokenPath, completion: Completion, healed: str = "") -> None:
    """Cut off what ended the text, the end-of-sequence token or a stop string: it is no part of what the program asked for.

    Of a token in which a stop string began, the part before it is appended as text.
    """
    tokenizer, ids = path.engine.tokenizer, completion.token_ids
    if completion.finish_reason != "stop" or not ids:
        return
    if ids[-1] in tokenizer.eos_token_ids:
        path.cut(len(path.ids) - 1)
        return
    text = healed + completion.text
    for count in range(len(ids), -1, -1):
        part = tokenizer.decode(ids[:count])
        # The tokenizer may drop a first space.
        shown = next((each for each in (part, " " + part) if text.startswith(each)), None)
        if shown is not None:
            path.cut(len(path.ids) - (len(ids) - count))
            path.append_text(text[len(shown) :])
            return
