"""What a text may be, as its user says it (`Grammar`) and as llguidance takes it (`source`). Needs no torch."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

from phloem.runtime.errors import GrammarError
from phloem.runtime.grammar_check import json_grammar

GrammarKind = Literal["json_schema", "regex", "choice", "lark"]


@dataclass(frozen=True, slots=True)
class Grammar:
    """What a text may be: a JSON schema, a regular expression, a choice, or a context-free grammar.

    Use the class methods. Equal descriptions are equal and hash alike, so they can be keys. Only the form is
    checked here; whether a schema or a pattern is sound is found by `GrammarCompiler.compile`.
    """

    kind: GrammarKind

    text: str
    """The schema or the options as JSON, the pattern, or the Lark text."""

    flexible_whitespace: bool = False
    """For JSON: any whitespace between tokens, where False fixes it to that of ``json.dumps``."""

    def __post_init__(self) -> None:
        if self.kind not in get_args(GrammarKind):
            raise GrammarError(
                f"{self.kind!r} is no kind of grammar; use one of {', '.join(get_args(GrammarKind))}",
                field="grammar",
            )
        if not isinstance(self.text, str):
            raise GrammarError(
                f"a {self.kind} must be a string, not {type(self.text).__name__}", field="grammar"
            )
        try:
            self.text.encode()
        except UnicodeEncodeError as error:
            raise GrammarError(
                f"the {self.kind} has a lone surrogate at character {error.start}, which no UTF-8 can hold: "
                "remove it",
                field="grammar",
            ) from None

    @classmethod
    def json_schema(
        cls, schema: Mapping[str, Any] | str | Any, *, flexible_whitespace: bool = False
    ) -> Grammar:
        """JSON that a schema accepts, with the properties in the schema's order.

        A ``format`` is followed as a pattern: a ``date`` has its shape, but may be the 29th of February of
        any year.

        Args:
            schema: A JSON Schema (2020-12 or draft 7) as a mapping or as JSON text, or a class that gives one
                by ``model_json_schema()``, such as a pydantic model.
            flexible_whitespace: Let the model lay the JSON out as it likes. The default is the layout of
                ``json.dumps``, where more tokens are forced and so cost no model step, and no endless run of
                blanks is possible.

        Raises:
            GrammarError: It is none of these, or no JSON.
        """
        if hasattr(schema, "model_json_schema"):
            schema = schema.model_json_schema()
        if isinstance(schema, str):
            schema = _parse_json(schema)
        if not isinstance(schema, Mapping):
            raise GrammarError(
                f"a JSON schema must be a mapping, JSON text of an object, or have model_json_schema(), "
                f"not {type(schema).__name__}",
                field="grammar",
            )
        return cls("json_schema", _dump_json(dict(schema)), flexible_whitespace)

    @classmethod
    def json_object(cls, *, flexible_whitespace: bool = False) -> Grammar:
        """Any JSON object."""
        return cls.json_schema({"type": "object"}, flexible_whitespace=flexible_whitespace)

    @classmethod
    def regex(cls, pattern: str) -> Grammar:
        r"""Text that a pattern matches as a whole, in the syntax of Rust's regex crate.

        It is nearly that of `re`, without look-around and backreferences; ``^`` and ``$`` are not needed.
        ``\d`` and ``\w`` mean the characters of all scripts: write ``[0-9]`` for the ASCII digits.
        """
        return cls("regex", pattern)

    @classmethod
    def choice(cls, options: Sequence[str]) -> Grammar:
        """Exactly one of some texts.

        Raises:
            GrammarError: There are none, or one is empty or no string.
        """
        if isinstance(options, str) or not isinstance(options, Sequence) or not options:
            raise GrammarError(
                f"options must be a list of at least one string, not {options!r}", field="grammar"
            )
        for index, option in enumerate(options):
            if not isinstance(option, str) or not option:
                raise GrammarError(
                    f"options[{index}] must be a string of at least one character, not {option!r}",
                    field="grammar",
                )
        return cls("choice", _dump_json(list(dict.fromkeys(options))))

    @classmethod
    def lark(cls, text: str) -> Grammar:
        """A context-free grammar in llguidance's dialect of Lark; its first rule is ``start``."""
        return cls("lark", text)


_REGEX_META = re.compile(r"[\\.+*?()|\[\]{}^$#&\-~]")


def source(grammar: Grammar) -> str:
    """Return the grammar as llguidance takes it."""
    from llguidance import LLMatcher

    if grammar.kind == "json_schema":
        return json_grammar(grammar.text, flexible_whitespace=grammar.flexible_whitespace)
    if grammar.kind == "regex":
        return LLMatcher.grammar_from_regex(grammar.text)
    if grammar.kind == "choice":
        # one pattern is one lexeme to the parser, where Lark alternatives would be one each
        options = (_REGEX_META.sub(r"\\\g<0>", option) for option in json.loads(grammar.text))
        return LLMatcher.grammar_from_regex("|".join(options))
    return LLMatcher.grammar_from_lark(grammar.text)


def source_after(after: str, grammar: Grammar | None) -> str:
    """Return the grammar of a text and what follows it, as llguidance takes it; without a grammar, anything follows."""
    literal = json.dumps(after, ensure_ascii=False).replace(
        "\x7f", "\\u007f"
    )  # llguidance refuses the plain one
    if grammar is None:
        return json.dumps({"grammars": [{"lark_grammar": f"start: {literal} /(?s:.*)/"}]})
    own = source(grammar)
    inner = {"lark_grammar": own} if grammar.kind == "lark" else json.loads(own)["grammars"][0]
    outer = {"lark_grammar": f"start: {literal} @inner"}
    return json.dumps({"grammars": [outer, {**inner, "name": "inner"}]})


def _parse_json(text: str) -> object:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise GrammarError(
            f"the JSON schema is no JSON: {error.msg} at line {error.lineno}, column {error.colno}",
            field="grammar",
        ) from error
    except RecursionError:
        raise GrammarError(
            "the JSON schema is nested too deeply: flatten it with $defs", field="grammar"
        ) from None


def _dump_json(value: object) -> str:
    """Return one text for equal values. The order of keys is kept: it is that of the output's properties."""
    try:
        return json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    except RecursionError:
        raise GrammarError(
            "the JSON schema is nested too deeply: flatten it with $defs", field="grammar"
        ) from None
    except (TypeError, ValueError) as error:
        raise GrammarError(
            f"the JSON schema can't be written as JSON ({error}): "
            "use plain dicts, lists, strings and finite numbers",
            field="grammar",
        ) from error
