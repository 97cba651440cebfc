"""Grammars as llguidance takes them."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING

from phloem.runtime.grammar_check import json_grammar

if TYPE_CHECKING:
    from phloem.runtime.grammar import Grammar

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
