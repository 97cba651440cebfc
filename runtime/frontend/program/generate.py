"""From `gen`'s arguments to sampling parameters, and from a completion to the value that is captured."""

from __future__ import annotations

import json as json_module
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any

from phloem.runtime.errors import Cancelled, IncompleteOutput, InvalidRequest
from phloem.runtime.grammar import Grammar
from phloem.runtime.outputs import Completion
from phloem.runtime.sampling_params import SamplingParams

_OPTIONS = frozenset(field.name for field in fields(SamplingParams)) - {"n", "grammar", "prompt_logprobs"}


@dataclass(frozen=True, slots=True)
class Wanted:
    """One call of `gen`, checked."""

    params: SamplingParams
    parse: Callable[[str], Any]
    """From the text to the captured value."""

    is_complete: Callable[[str], bool]
    """Whether a text that was cut off fits the grammar all the same."""

    def value(self, completion: Completion) -> Any:
        """Return what is captured.

        Raises:
            Cancelled: The run, or the fork, was ended meanwhile.
            IncompleteOutput: The text was cut off before it fit its grammar.
        """
        if completion.finish_reason == "abort":
            raise Cancelled("the run or the fork was ended while it generated", partial=completion.text)
        if completion.finish_reason == "length" and not self.is_complete(completion.text):
            raise IncompleteOutput(
                f"the output does not fit its grammar yet after {len(completion.token_ids)} tokens "
                f"(max_tokens={self.params.max_tokens}): raise max_tokens, or bound the grammar's strings and lists; "
                f"it begins with {completion.text[:80]!r}",
                partial=completion.text,
            )
        return self.parse(completion.text)


def wanted(sampling: Mapping[str, Any], *, regex: str | None, json: Any, grammar: Grammar | None) -> Wanted:
    """Check the arguments of `gen`.

    Raises:
        InvalidRequest: An option is unknown or out of range, or more than one grammar is given.
        GrammarError: The grammar's form is wrong.
    """
    if unknown := set(sampling) - _OPTIONS:
        raise InvalidRequest(
            f"gen has no option {', '.join(sorted(unknown))}; there are name, n, regex, json, grammar and "
            f"{', '.join(sorted(_OPTIONS))}",
            field=sorted(unknown)[0],
        )
    if sum(each is not None for each in (regex, json, grammar)) > 1:
        raise InvalidRequest("give one of regex, json and grammar, not several", field="grammar")
    parse: Callable[[str], Any] = str
    if regex is not None:
        grammar = Grammar.regex(regex)
    elif json is not None:
        grammar = Grammar.json_schema(json)
        parse = getattr(json, "model_validate_json", json_module.loads)
    return Wanted(SamplingParams(**sampling, grammar=grammar), parse, lambda text: _fits(grammar, text))


def _fits(grammar: Grammar | None, text: str) -> bool:
    """Whether a text fits a grammar; True also where only the parser could tell (Lark)."""
    if grammar is None or grammar.kind == "lark":
        return True
    if grammar.kind == "choice":
        return text in json_module.loads(grammar.text)
    if grammar.kind == "json_schema":
        return _is_json(text)
    try:
        return re.fullmatch(grammar.text, text, re.DOTALL) is not None
    except re.error:  # Rust's syntax is not quite Python's
        return False


def _is_json(text: str) -> bool:
    try:
        json_module.loads(text)
    except json_module.JSONDecodeError:
        return False
    return True


def num_kept(completion: Completion, *, decode: Callable[[list[int]], str], eos_ids: tuple[int, ...]) -> int:
    """Return how many of the generated tokens belong to the text: not the end-of-sequence token, nor a stop string's.

    A token that holds the text's end and the stop string's beginning is not counted: see `rest_of_text`.
    """
    ids = completion.token_ids
    if completion.finish_reason != "stop" or not ids:
        return len(ids)
    if ids[-1] in eos_ids:
        return len(ids) - 1
    for count in range(len(ids), -1, -1):
        if _begins(completion.text, decode(ids[:count])):
            return count
    return len(ids)


def rest_of_text(completion: Completion, kept_text: str) -> str:
    """Return what the kept tokens miss of the text: the beginning of a token in which a stop string began."""
    lost = 0 if completion.text.startswith(kept_text) else 1
    return completion.text[len(kept_text) + lost :]


def _begins(text: str, part: str) -> bool:
    """Whether a text begins with a part, whose first space the tokenizer may have dropped."""
    return text.startswith((part, " " + part))
