"""From a grammar to llguidance's matcher, or to the reason why there is none. Needs no torch, so that a small process can do it."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

from phloem.runtime.errors import GrammarError
from phloem.runtime.grammar_check import explain, refuse_endless
from phloem.runtime.grammar_source import Grammar, source, source_after

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer


def make_parser_tokenizer(tokenizer_json: str, width: int, eos_token_ids: Sequence[int]) -> LLTokenizer:
    """Return a vocabulary in the parser's form. About 0.3 s for 50,000 tokens.

    Args:
        tokenizer_json: A fast tokenizer, as `tokenizer.json` holds it.
        width: The number of token ids, those that no text uses included.
        eos_token_ids: The tokens that end a text.

    Raises:
        GrammarError: The parser can't use it.
    """
    from llguidance import LLTokenizer

    if not eos_token_ids:
        raise GrammarError(
            "the model's tokenizer has no end-of-text token, so constrained text could not end; "
            "set eos_token in its tokenizer_config.json",
            field="grammar",
        )
    try:
        return LLTokenizer(tokenizer_json, n_vocab=width, eos_token=list(eos_token_ids))
    except ValueError as error:
        raise GrammarError(
            f"output can't be constrained with this model's tokenizer ({error}); use another model",
            field="grammar",
        ) from error


def make_matcher(parser_tokenizer: LLTokenizer, grammar: Grammar | None, after: str) -> LLMatcher:
    """Compile a grammar. Most take a millisecond; some small ones take minutes and gigabytes, and nothing here ends them.

    Args:
        parser_tokenizer: The vocabulary.
        grammar: None: anything may come, after `after`.
        after: A text that comes before what the grammar describes.

    Raises:
        GrammarError: The grammar is wrong, or uses what is not supported.
    """
    from llguidance import LLMatcher, LLParserLimits

    # verbose errors would put the parser's whole state, user text included, into messages
    matcher = LLMatcher(
        parser_tokenizer,
        source_after(after, grammar) if grammar is None or after else source(grammar),
        log_level=0,
        limits=LLParserLimits(verbose_errors=False),
    )
    if matcher.is_error():
        known = grammar or Grammar.regex(re.escape(after))
        raise explain(known.kind, known.text, matcher.get_error())
    if warnings := matcher.get_grammar_warnings():
        # only a schema inside Lark that asks for it ("lenient") gets here: its output need not validate
        raise GrammarError(
            f"the grammar would be followed in part only: {'; '.join(warnings)}", field="grammar"
        )
    if grammar is not None and grammar.kind == "json_schema":
        refuse_endless(json.loads(grammar.text))
    return matcher
