"""Grammars: what compiles, what is refused and where, and that masks lead to text that the grammar accepts.

Text is made by drawing from the masks alone, with no model: any text that a model could write under the mask
may come.
"""

from __future__ import annotations

import asyncio
import datetime
import json
import random
import re
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from real_model import real_model_path
from tiny_model import IM_END_ID, IM_START_ID, PAD_ID, VOCAB_SIZE, write_byte_tokenizer

from phloem.runtime import grammar as grammar_module
from phloem.runtime.errors import GrammarError, InvalidRequest, QueueFull
from phloem.runtime.grammar import Constraint, Grammar, GrammarCompiler
from phloem.runtime.tokenizer import Tokenizer

PADDED_SIZE = 300
"""Width of the tiny model's logits in these tests, beyond its tokenizer's 260 ids, no multiple of 32."""

TREE = {
    "$defs": {
        "node": {
            "type": "object",
            "properties": {
                "value": {"type": "integer", "minimum": 0, "maximum": 9},
                "children": {"type": "array", "items": {"$ref": "#/$defs/node"}, "maxItems": 3},
            },
            "required": ["value", "children"],
            "additionalProperties": False,
        }
    },
    "$ref": "#/$defs/node",
}


def closed(properties: dict[str, Any], **more: Any) -> dict[str, Any]:
    """An object schema with these properties, all required unless `more` says otherwise."""
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    } | more


SCHEMAS: dict[str, dict[str, Any]] = {
    "nested": closed(
        {"a": closed({"b": closed({"c": {"type": "string", "maxLength": 12}}), "d": {"type": "integer"}})}
    ),
    "enums": closed(
        {"color": {"enum": ["red", "green", "blue", 7, None]}, "size": {"enum": ["s", "m", "xxl"]}}
    ),
    "arrays": {
        "type": "array",
        "items": {"type": "array", "items": {"type": "boolean"}, "minItems": 1, "maxItems": 3},
        "minItems": 2,
        "maxItems": 4,
    },
    "numbers": closed(
        {
            "age": {"type": "integer", "minimum": -3, "maximum": 150},
            "ratio": {"type": "number", "exclusiveMinimum": 0.25, "maximum": 1.5},
            "step": {"type": "integer", "multipleOf": 7, "minimum": 1, "maximum": 99},
        }
    ),
    "strings": closed(
        {
            "code": {"type": "string", "pattern": "^[A-Z]{2}-[0-9]{3,5}$"},
            "day": {"type": "string", "format": "date"},
            "id": {"type": "string", "format": "uuid"},
            "host": {"type": "string", "format": "ipv4"},
            "name": {"type": "string", "minLength": 2, "maxLength": 5},
        }
    ),
    "optional": closed(
        {"a": {"type": "integer"}, "b": {"type": "string"}, "c": {"type": "boolean"}, "d": {"type": "null"}},
        required=["b"],
    ),
    "unions": {
        "oneOf": [
            closed({"kind": {"const": "circle"}, "radius": {"type": "number", "minimum": 0}}),
            closed({"kind": {"const": "text"}, "body": {"anyOf": [{"type": "string"}, {"type": "integer"}]}}),
        ]
    },
    "const": closed({"version": {"const": 3}, "tags": {"const": ["a", {"b": None}]}, "é": {"const": "日本"}}),
    "scalars": closed(
        {"on": {"type": "boolean"}, "none": {"type": "null"}, "either": {"type": ["integer", "null"]}}
    ),
    "recursion": TREE,
}


@pytest.fixture(scope="session")
def byte_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    path = tmp_path_factory.mktemp("byte_tokenizer")
    write_byte_tokenizer(path)
    return Tokenizer.from_directory(path, eos_token_ids=[IM_END_ID])


@pytest.fixture(scope="session")
def compiler(byte_tokenizer: Tokenizer) -> GrammarCompiler:
    return GrammarCompiler(byte_tokenizer, PADDED_SIZE)


@pytest.fixture(scope="session")
def real_tokenizer() -> Tokenizer:
    return Tokenizer.from_directory(real_model_path())


@pytest.fixture(scope="session")
def real_compiler(real_tokenizer: Tokenizer) -> GrammarCompiler:
    return GrammarCompiler(real_tokenizer, real_tokenizer.vocab_size)


def allowed_ids(constraint: Constraint) -> list[int]:
    ids: list[int] = constraint.mask().nonzero().flatten().tolist()
    return ids


def write(constraint: Constraint, text: str) -> None:
    """Advance over a text, one token for each byte; for the byte tokenizer."""
    for byte in text.encode():
        constraint.advance(byte)


def draw_text(
    constraint: Constraint, tokenizer: Tokenizer, seed: int, *, num_free: int = 40, closers: str = '"}],'
) -> str:
    """Draw tokens uniformly from the masks until the text ends; after `num_free` tokens, closers first."""
    rng = random.Random(seed)
    closing = [tokenizer.encode(text, add_special_tokens=False)[0] for text in closers]
    ids: list[int] = []
    while not constraint.is_finished:
        allowed = allowed_ids(constraint)
        assert allowed, "a state that is not finished must allow a token"
        token_id = rng.choice(allowed)
        if len(ids) >= num_free:
            token_id = next((i for i in (*tokenizer.eos_token_ids, *closing) if i in allowed), token_id)
        constraint.advance(token_id)
        ids.append(token_id)
        assert len(ids) < 5000, "the text does not end"
    return tokenizer.decode(ids, skip_special_tokens=True)


def assert_valid(text: str, schema: dict[str, Any]) -> None:
    value = json.loads(text)
    checker = jsonschema.FormatChecker(formats=["uuid", "ipv4"])
    jsonschema.Draft202012Validator(schema, format_checker=checker).validate(value)
    if isinstance(value, dict) and "day" in value:  # format "date" knows no leap years; 2000 is one
        datetime.date.fromisoformat("2000" + value["day"][4:])


# What a grammar is


def test_equal_grammars_are_one_key() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    as_dict, as_text = Grammar.json_schema(schema), Grammar.json_schema(json.dumps(schema, indent=3))
    assert as_dict == as_text
    assert len({as_dict, as_text, Grammar.regex("a"), Grammar.regex("a"), Grammar.lark("a")}) == 3
    assert Grammar.json_schema(schema, flexible_whitespace=True) != as_dict
    assert Grammar.choice(["a", "b", "a"]) == Grammar.choice(("a", "b"))


def test_the_order_of_properties_is_part_of_a_schema(compiler: GrammarCompiler) -> None:
    one, two = closed({"x": {"const": 1}, "y": {"const": 2}}), closed({"y": {"const": 2}, "x": {"const": 1}})
    assert Grammar.json_schema(one) != Grammar.json_schema(two)
    texts = [bytes(compiler.compile(Grammar.json_schema(schema)).forced_ids()) for schema in (one, two)]
    assert texts == [b'{"x": 1, "y": 2}', b'{"y": 2, "x": 1}']


def test_a_change_of_the_callers_schema_does_not_reach_the_grammar() -> None:
    schema: dict[str, Any] = {"type": "integer"}
    grammar = Grammar.json_schema(schema)
    schema["type"] = "string"
    assert grammar == Grammar.json_schema({"type": "integer"})


def test_a_pydantic_model_is_a_schema(compiler: GrammarCompiler, byte_tokenizer: Tokenizer) -> None:
    pydantic = pytest.importorskip("pydantic")
    inner = pydantic.create_model("Inner", tags=(list[str], ...), maybe=(int | None, None))
    outer = pydantic.create_model("Outer", inner=(inner, ...), on=(bool, True))
    for seed in range(5):
        outer.model_validate_json(
            draw_text(compiler.compile(Grammar.json_schema(outer)), byte_tokenizer, seed)
        )


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: Grammar.json_schema('{"type": }'), "line 1, column 10"),
        (lambda: Grammar.json_schema("[1]"), "not list"),
        (lambda: Grammar.json_schema(5), "not int"),
        (lambda: Grammar.json_schema("[" * 100_000), "nested too deeply"),
        (lambda: Grammar.json_schema({"const": float("inf")}), "not JSON compliant"),
        (lambda: Grammar.json_schema({"const": {1}}), "set is not JSON serializable"),
        (lambda: Grammar.choice([]), "at least one string"),
        (lambda: Grammar.choice("yes"), "a list"),
        (lambda: Grammar.choice(["a", ""]), r"options\[1\]"),
        (lambda: Grammar.choice(["a", 5]), r"options\[1\]"),  # type: ignore[list-item]
        (lambda: Grammar.regex(5), "must be a string, not int"),  # type: ignore[arg-type]
        (lambda: Grammar.regex("a\ud800"), "lone surrogate at character 1"),
        (lambda: Grammar("yaml", "x"), "no kind of grammar"),  # type: ignore[arg-type]
    ],
)
def test_what_is_no_grammar_is_refused_when_it_is_made(make: Any, says: str) -> None:
    with pytest.raises(GrammarError, match=says) as caught:
        make()
    assert isinstance(caught.value, InvalidRequest)
    assert isinstance(caught.value, ValueError)
    assert caught.value.field == "grammar"


def test_only_a_grammar_compiles(compiler: GrammarCompiler) -> None:
    with pytest.raises(GrammarError, match="not dict"):
        compiler.compile({"type": "integer"})  # type: ignore[arg-type]


# What is refused, and where

IMPOSSIBLE = {"type": "integer", "minimum": 5, "maximum": 3}

REFUSED_SCHEMAS: list[tuple[str, dict[str, Any]]] = [
    ("#/enum: ", {"enum": []}),
    ("#/minimum: ", IMPOSSIBLE),
    ("#/minItems: ", {"type": "array", "minItems": 3, "maxItems": 2}),
    ("#/properties/a~1b~0/items/not: ", closed({"ok": {}, "a/b~": {"type": "array", "items": {"not": {}}}})),
    ("#/properties/a/properties/b/minimum: ", closed({"a": closed({"b": IMPOSSIBLE})})),
    ("#/minProperties: ", closed({"a": IMPOSSIBLE}, required=[], minProperties=3, maxProperties=2)),
    (
        "#/additionalProperties/uniqueItems: ",
        {"type": "object", "additionalProperties": {"uniqueItems": True}},
    ),
    ("#/additionalProperties: ", closed({}, required=["missing"])),
    ("#/anyOf/1/prefixItems/0/type: ", {"anyOf": [{"type": "null"}, {"prefixItems": [{"type": "foo"}]}]}),
    (
        "#/$defs/d/format: ",
        {"$defs": {"d": {"type": "string", "format": "zip"}}, **closed({"a": {"$ref": "#/$defs/d"}})},
    ),
    ("#/properties/a/$ref: ", closed({"a": {"$ref": "#/$defs/nowhere"}})),
    ("#/$ref: ", {"$ref": "https://example.com/schema"}),
    (
        "#/$defs/a~1b~0/pattern: unclosed group, at character 2",
        {"$defs": {"a/b~": {"type": "string", "pattern": "x/("}}, "$ref": "#/$defs/a~1b~0"},
    ),
    ("#/if: ", {"if": {"type": "string"}, "then": {"minLength": 3}}),
    ("#/oneOf: ", {"oneOf": [{"type": "integer"}, {"type": "number"}]}),
    (
        "#/properties/p/pattern: unclosed group, at character 3",
        closed({"p": {"type": "string", "pattern": "ab/(c"}}),
    ),
    ("#/pattern: look-around", {"type": "string", "pattern": "(?=a)b"}),
    ("#/pattern: unclosed group", {"type": "string", "pattern": "a\n(b"}),
    (
        "#/patternProperties: unclosed group, at character 0",
        {"type": "object", "patternProperties": {"(": {}}},
    ),
    ("#/not: ", {"x-guidance": {"lenient": True}, "not": {"type": "null"}}),
    ("#/properties/next: ", closed({"next": {"$ref": "#"}})),
    ("#/$defs/b: ", {"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}),
    (
        "#/$defs/n/items: ",
        {
            "$defs": {"n": {"type": "array", "items": {"$ref": "#/$defs/n"}, "minItems": 1}},
            **closed({"a": {"$ref": "#/$defs/n"}}),
        },
    ),
]


@pytest.mark.parametrize(("place", "schema"), REFUSED_SCHEMAS, ids=[place for place, _ in REFUSED_SCHEMAS])
def test_a_refused_schema_names_the_place_and_a_way_out(
    compiler: GrammarCompiler, place: str, schema: dict[str, Any]
) -> None:
    with pytest.raises(GrammarError, match=re.escape(f"at {place}")) as caught:
        compiler.compile(Grammar.json_schema(schema))
    message = str(caught.value)
    assert ";" in message
    assert "\n" not in message
    assert len(message) < 500


def test_a_schema_nested_too_deeply_is_refused(compiler: GrammarCompiler) -> None:
    schema: dict[str, Any] = {"type": "integer"}
    for _ in range(300):
        schema = {"type": "array", "items": schema}
    with pytest.raises(GrammarError, match="nested too deeply"):
        compiler.compile(Grammar.json_schema(schema))


def test_a_wide_schema_is_searched_within_bounds(compiler: GrammarCompiler) -> None:
    few = closed({f"p{index}": {"type": "integer"} for index in range(500)} | {"last": {"not": {}}})
    with pytest.raises(GrammarError, match="at #/properties/last/not: "):
        compiler.compile(Grammar.json_schema(few))
    many = closed({f"p{index}": {"type": "integer"} for index in range(3000)} | {"last": {"not": {}}})
    with pytest.raises(GrammarError, match=r"at #: Unimplemented"):
        compiler.compile(Grammar.json_schema(many))


def test_an_optional_property_that_nothing_satisfies_is_left_out(
    compiler: GrammarCompiler, byte_tokenizer: Tokenizer
) -> None:
    schema = closed({"never": IMPOSSIBLE, "next": {"$ref": "#"}, "x": {"const": 1}}, required=["x"])
    for seed in range(5):
        text = draw_text(compiler.compile(Grammar.json_schema(schema)), byte_tokenizer, seed, num_free=10)
        assert '"never"' not in text


@pytest.mark.parametrize(
    "schema",
    [
        closed({"next": {"anyOf": [{"$ref": "#"}, {"type": "null"}]}}),
        closed(
            {
                "next": {
                    "type": ["object", "null"],
                    "properties": {"next": {"$ref": "#"}},
                    "required": ["next"],
                }
            }
        ),
        closed({"next": {"type": "array", "items": {"$ref": "#"}}}),
        closed(
            {"next": {"type": "array", "prefixItems": [{"const": 1}], "items": {"$ref": "#"}, "minItems": 1}}
        ),
        closed({"a": {"$ref": "#/properties/b"}, "b": {"$ref": "#/properties/c"}, "c": {"type": "null"}}),
        {"allOf": [{"$ref": "#/$defs/x"}], "$defs": {"x": closed({"x": {"enum": [1, 2]}})}},
    ],
)
def test_recursion_that_can_end_compiles(
    compiler: GrammarCompiler, byte_tokenizer: Tokenizer, schema: dict[str, Any]
) -> None:
    # the shortest way out is taken by closing, and by null instead of an object, after 20 tokens
    constraint = compiler.compile(Grammar.json_schema(schema))
    text = draw_text(constraint, byte_tokenizer, 0, num_free=20, closers='"}],n')
    assert_valid(text, schema)


@pytest.mark.parametrize(
    ("pattern", "says"),
    [
        ("a(", "unclosed group, at character 1 of the pattern 'a('"),
        ("a/b\n(c", "unclosed group, at character 4"),
        (r"\/a(", "unclosed group, at character 3"),
        ("x" * 3000 + "(", "unclosed group, at character 3000 of the pattern, near"),
        (r"(a)\1", "backreferences are not supported, at character 3"),
        ("(?=a)b", "look-around, including look-ahead and look-behind, is not supported, at character 0"),
        (r"ab\b", r"\b is not supported there, at character 2"),
        ("a^b", "^ is not supported there, at character 1"),
        ("a{2,1}", "start must be <= the end, at character 1"),
        ("[a&&b]", "no text satisfies the grammar"),
    ],
)
def test_a_refused_pattern_names_the_position(compiler: GrammarCompiler, pattern: str, says: str) -> None:
    with pytest.raises(GrammarError, match=re.escape(says)) as caught:
        compiler.compile(Grammar.regex(pattern))
    assert len(str(caught.value)) < 400


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ('start: "a" b\nb: x', 'line 2, column 4: unknown name: "x"'),
        ("start: /a(/", "line 1, column 8: unclosed group, at character 1"),
        ('rule: "a"', "no start rule"),
        ('start: %json {"type": "foo"}', "line 1, column 8: failed to compile JSON schema"),
        ('start: %json {"x-guidance": {"lenient": true}, "not": {}}', "followed in part only"),
        ("start: start", "no text satisfies the grammar"),
        ("start: " + "(" * 10_000 + '"a"' + ")" * 10_000, "too deeply nested"),
        ("", "Empty grammar"),
    ],
)
def test_a_refused_lark_grammar_names_line_and_column(
    compiler: GrammarCompiler, text: str, says: str
) -> None:
    with pytest.raises(GrammarError, match=re.escape(says)):
        compiler.compile(Grammar.lark(text))


def test_a_tokenizer_without_an_end_is_refused(byte_tokenizer: Tokenizer, tmp_path: Path) -> None:
    write_byte_tokenizer(tmp_path)
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    del config["eos_token"]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    endless = GrammarCompiler(Tokenizer.from_directory(tmp_path), VOCAB_SIZE)
    with pytest.raises(GrammarError, match="no end-of-text token"):
        endless.compile(Grammar.regex("a"))


# What comes out


@pytest.mark.parametrize("name", SCHEMAS)
def test_twenty_texts_drawn_from_the_masks_validate(
    compiler: GrammarCompiler, byte_tokenizer: Tokenizer, name: str
) -> None:
    texts = set()
    for seed in range(20):
        text = draw_text(compiler.compile(Grammar.json_schema(SCHEMAS[name])), byte_tokenizer, seed)
        assert_valid(text, SCHEMAS[name])
        texts.add(text)
    assert len(texts) > 10 or name in ("const", "enums", "scalars"), "the masks should leave a choice"


@pytest.mark.model
@pytest.mark.parametrize("name", SCHEMAS)
def test_twenty_texts_drawn_from_a_real_vocabulary_validate(
    real_compiler: GrammarCompiler, real_tokenizer: Tokenizer, name: str
) -> None:
    for seed in range(20):
        constraint = real_compiler.compile(Grammar.json_schema(SCHEMAS[name]))
        assert_valid(draw_text(constraint, real_tokenizer, seed), SCHEMAS[name])


def test_flexible_whitespace_is_bounded_and_json_all_the_same(
    compiler: GrammarCompiler, byte_tokenizer: Tokenizer
) -> None:
    grammar = Grammar.json_schema(SCHEMAS["nested"], flexible_whitespace=True)
    texts = [draw_text(compiler.compile(grammar), byte_tokenizer, seed) for seed in range(10)]
    assert any(re.search(r"[\n\t]", text) for text in texts)
    for text in texts:
        assert_valid(text, SCHEMAS["nested"])
    constraint = compiler.compile(grammar)
    write(constraint, "{" + " " * 64)
    with pytest.raises(GrammarError):
        constraint.advance(ord(" "))


def test_any_json_object(compiler: GrammarCompiler, byte_tokenizer: Tokenizer) -> None:
    for seed in range(10):
        text = draw_text(compiler.compile(Grammar.json_object()), byte_tokenizer, seed)
        assert isinstance(json.loads(text), dict)


@pytest.mark.parametrize(
    "pattern",
    [
        r"[a-f0-9]{4}(-[a-f0-9]{2}){1,3}",
        r"(?i)yes|no/maybe",
        "é+|[à-ÿ]{2}",
        "a\nb?",
        r"^[0-9]{2}\.\s$",
        "(?s).[^a-z]{3}",
    ],
)
def test_texts_under_a_pattern_match_it(
    compiler: GrammarCompiler, byte_tokenizer: Tokenizer, pattern: str
) -> None:
    for seed in range(20):
        text = draw_text(compiler.compile(Grammar.regex(pattern)), byte_tokenizer, seed, num_free=12)
        assert re.fullmatch(pattern, text), text


def test_every_option_of_a_choice_comes_and_nothing_else(
    compiler: GrammarCompiler, byte_tokenizer: Tokenizer
) -> None:
    options = ["yes", "yes!", "no", "4", "42", "a|b", "(", "日本", " x", "new\nline", "\\", "a/b", "\t\r\x00"]
    texts = {
        draw_text(compiler.compile(Grammar.choice(options)), byte_tokenizer, seed) for seed in range(150)
    }
    assert texts == set(options)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.text(min_size=1, max_size=6), min_size=1, max_size=4))
def test_any_texts_can_be_options(compiler: GrammarCompiler, options: list[str]) -> None:
    if any(0xD800 <= ord(char) < 0xE000 for option in options for char in option):
        return
    for option in options:
        constraint = compiler.compile(Grammar.choice(options))
        write(constraint, option)
        assert constraint.may_end
    constraint = compiler.compile(Grammar.choice(options))
    assert {i for i in allowed_ids(constraint) if i < 256} == {option.encode()[0] for option in options}


def test_texts_under_a_lark_grammar_parse(compiler: GrammarCompiler, byte_tokenizer: Tokenizer) -> None:
    sums = 'start: term (op term)*\nop: "+" | "*"\nterm: /[1-9][0-9]?/ | "(" start ")"'
    values = set()
    for seed in range(30):
        text = draw_text(compiler.compile(Grammar.lark(sums)), byte_tokenizer, seed, num_free=10_000)
        assert re.fullmatch(r"[0-9+*()]+", text)
        values.add(eval(text))
    assert len(values) > 5


def test_a_lark_grammar_may_name_special_tokens(compiler: GrammarCompiler) -> None:
    constraint = compiler.compile(Grammar.lark('start: "a" <|im_start|> "b" <|im_end|>'))
    assert constraint.forced_ids() == [ord("a"), IM_START_ID, ord("b"), IM_END_ID]
    for token_id in constraint.forced_ids():
        assert not constraint.is_finished
        assert allowed_ids(constraint) == [token_id]
        constraint.advance(token_id)
    assert constraint.is_finished
    unmasked = compiler.compile(Grammar.lark('start: "a" <|im_end|>'))
    for token_id in unmasked.forced_ids():
        unmasked.advance(token_id)
    assert unmasked.is_finished


# The state


@pytest.mark.parametrize("name", SCHEMAS)
def test_a_token_is_allowed_by_the_mask_exactly_if_advance_takes_it(
    compiler: GrammarCompiler, name: str
) -> None:
    rng = random.Random(5)
    constraint = compiler.compile(Grammar.json_schema(SCHEMAS[name]))
    for step in range(60):
        if constraint.is_finished:
            break
        if step % 6 == 0:
            unseen = constraint.fork()
            unseen._blocked = None  # so that advance asks the parser, not the mask
            taken = []
            for token_id in range(-2, PADDED_SIZE + 2):
                child = unseen.fork()
                try:
                    child.advance(token_id)
                except GrammarError:
                    continue
                taken.append(token_id)
            assert taken == allowed_ids(constraint)
            assert (IM_END_ID in taken) == constraint.may_end
        constraint.advance(rng.choice(allowed_ids(constraint)))


def test_a_refused_token_changes_nothing(compiler: GrammarCompiler) -> None:
    constraint = compiler.compile(Grammar.regex("ab+"))
    constraint.advance(ord("a"))
    before = allowed_ids(constraint)
    for token_id in (ord("x"), IM_END_ID, PAD_ID, 280, PADDED_SIZE, 10**12, -1):
        with pytest.raises(GrammarError, match=f"token {token_id} .* after 1 tokens"):
            constraint.advance(token_id)
    assert allowed_ids(constraint) == before == [ord("b")]
    constraint.advance(ord("b"))
    assert constraint.may_end


def test_rows_that_pad_the_vocabulary_are_never_allowed(byte_tokenizer: Tokenizer) -> None:
    for vocab_size in (VOCAB_SIZE, VOCAB_SIZE + 1, 288, 289, 1000):
        constraint = GrammarCompiler(byte_tokenizer, vocab_size).compile(Grammar.regex("(?s).*"))
        assert constraint.mask().shape == (vocab_size,)
        assert constraint.mask().dtype == torch.bool
        assert max(allowed_ids(constraint)) == IM_END_ID
        assert not {256, IM_START_ID, PAD_ID} & set(allowed_ids(constraint)), "special tokens are no text"


def test_logits_narrower_than_the_tokenizer_get_a_mask_of_their_width(byte_tokenizer: Tokenizer) -> None:
    constraint = GrammarCompiler(byte_tokenizer, PAD_ID).compile(Grammar.regex("[ab]"))
    assert constraint.mask().shape == (PAD_ID,)
    assert allowed_ids(constraint) == [ord("a"), ord("b")]


def test_apply_sets_what_the_mask_forbids_to_minus_infinity(compiler: GrammarCompiler) -> None:
    constraint = compiler.compile(Grammar.regex("[a-e]+"))
    for _ in range(3):
        for dtype in (torch.float32, torch.bfloat16):
            logits = torch.randn(PADDED_SIZE).to(dtype)
            expected = torch.where(constraint.mask(), logits, float("-inf"))
            rows = torch.stack([logits, logits + 1])
            constraint.apply(logits)
            constraint.apply(rows)
            assert torch.equal(logits, expected)
            assert torch.equal(rows[1].isinf(), expected.isinf())
        constraint.advance(ord("c"))


def test_a_mask_belongs_to_its_caller(compiler: GrammarCompiler) -> None:
    constraint = compiler.compile(Grammar.regex("[ab]"))
    constraint.mask().fill_(True)
    assert allowed_ids(constraint) == [ord("a"), ord("b")]


def test_forks_are_independent(compiler: GrammarCompiler, byte_tokenizer: Tokenizer) -> None:
    parent = compiler.compile(Grammar.json_schema(SCHEMAS["unions"]))
    write(parent, '{"kind": "')
    one, two = parent.fork(), parent.fork()
    write(one, 'circle", "radius": 1')
    write(two, 'text", "body": "x')
    assert allowed_ids(parent) == [ord("c"), ord("t")]
    assert ord("}") in allowed_ids(one)
    grandchild = two.fork()
    write(two, '"}')
    assert two.is_finished
    assert not grandchild.is_finished
    seeds = range(4)
    texts = {'{"kind": "' + draw_text(parent.fork(), byte_tokenizer, seed) for seed in seeds}
    for text in texts:
        assert_valid(text, SCHEMAS["unions"])
    assert allowed_ids(parent) == [ord("c"), ord("t")]


def test_a_failed_fork_leaves_its_siblings_alone(compiler: GrammarCompiler) -> None:
    parent = compiler.compile(Grammar.lark("start: /a/ /[b&&c]/ | /a/ /d/ | /e/"))
    dead_end = compiler.compile(Grammar.lark("start: /a/ /[b&&c]/"))
    spare = dead_end.fork()
    dead_end.advance(ord("a"))
    for ask in (dead_end.mask, dead_end.mask, dead_end.fork().mask, dead_end.forced_ids):
        with pytest.raises(GrammarError, match="dead end, reached after 1 tokens"):
            ask()
    for name in ("is_finished", "may_end"):
        with pytest.raises(GrammarError, match="dead end"):
            getattr(dead_end, name)
    assert allowed_ids(spare) == [ord("a")]
    assert allowed_ids(parent) == [ord("a"), ord("e")]


def test_a_grammar_too_ambiguous_for_the_parser_ends_with_an_error(compiler: GrammarCompiler) -> None:
    rules = [f'r{index}: "a" "{index}"' for index in range(2100)]
    text = "\n".join([f'start: "x" ({" | ".join(rule.split(":")[0] for rule in rules)})', *rules])
    constraint = compiler.compile(Grammar.lark(text))
    with pytest.raises(GrammarError, match=r"gave up after 1 tokens .*: make the grammar simpler") as caught:
        write(constraint, "xa")
    assert len(str(caught.value)) < 400
    for ask in (
        constraint.mask,
        constraint.forced_ids,
        lambda: constraint.advance(IM_END_ID),
        lambda: constraint.advance(ord("1")),
    ):
        with pytest.raises(GrammarError, match="gave up"):
            ask()


# The end


def test_the_text_ends_where_the_grammar_lets_it(compiler: GrammarCompiler) -> None:
    constraint = compiler.compile(Grammar.regex("ab?"))
    assert not constraint.may_end
    constraint.advance(ord("a"))
    assert constraint.may_end
    assert not constraint.is_finished
    by_eos = constraint.fork()
    by_eos.advance(IM_END_ID)
    constraint.advance(ord("b"))
    for done in (by_eos, constraint):
        assert done.is_finished
        assert done.may_end
        assert allowed_ids(done) == [IM_END_ID]
        assert done.forced_ids() == []
        for _ in range(3):
            done.advance(IM_END_ID)
            assert done.is_finished
            assert allowed_ids(done) == [IM_END_ID]
        with pytest.raises(GrammarError, match="may not come next"):
            done.advance(ord("b"))


def test_each_end_token_of_the_model_ends_the_text(byte_tokenizer: Tokenizer) -> None:
    two_ends = Tokenizer(byte_tokenizer.hf, eos_token_ids=[PAD_ID, IM_END_ID])
    compiler = GrammarCompiler(two_ends, VOCAB_SIZE)
    for token_id in (PAD_ID, IM_END_ID):
        constraint = compiler.compile(Grammar.regex("a*"))
        assert allowed_ids(constraint) == [ord("a"), IM_END_ID, PAD_ID]
        constraint.advance(token_id)
        assert constraint.is_finished


# Forced tokens


@pytest.mark.parametrize("name", SCHEMAS)
def test_forced_tokens_write_what_stepping_would(
    compiler: GrammarCompiler, byte_tokenizer: Tokenizer, name: str
) -> None:
    rng = random.Random(11)
    constraint = compiler.compile(Grammar.json_schema(SCHEMAS[name]))
    num_forced = 0
    for _ in range(80):
        if constraint.is_finished:
            break
        forced = constraint.forced_ids()
        assert constraint.forced_ids(max_tokens=1) == forced[:1]
        stepped = constraint.fork()
        for token_id in forced:
            assert allowed_ids(stepped) == [token_id], "a byte is forced if and only if it is the only one"
            stepped.advance(token_id)
        for token_id in forced:
            constraint.advance(token_id)
        assert allowed_ids(constraint) == allowed_ids(stepped)
        num_forced += len(forced)
        if not constraint.is_finished:
            assert constraint.forced_ids() == []
            assert len(allowed_ids(constraint)) > 1
            constraint.advance(rng.choice(allowed_ids(constraint)))
    assert num_forced or name == "arrays"


@pytest.mark.model
def test_forced_text_is_cut_as_the_tokenizer_cuts_it(
    real_compiler: GrammarCompiler, real_tokenizer: Tokenizer
) -> None:
    schema = closed(
        {"first name": {"const": "Ada Lovelace"}, "born": {"const": 1815}, "é": {"enum": ["x", "y"]}}
    )
    constraint = real_compiler.compile(Grammar.json_schema(schema))
    forced = constraint.forced_ids()
    text = '{"first name": "Ada Lovelace", "born": 1815, "é": "'
    ids = real_tokenizer.encode(text + 'x"}', add_special_tokens=False)
    assert ids[: len(forced)] == forced
    assert len(forced) > 15
    for token_id in forced:
        assert token_id in allowed_ids(constraint)
        constraint.advance(token_id)
    # what is left open is only what the next characters may be joined with
    assert len(text) - len(real_tokenizer.decode(forced)) <= 2
    rest = draw_text(constraint, real_tokenizer, seed=0)
    assert_valid(real_tokenizer.decode(forced) + rest, schema)


@pytest.mark.model
def test_forced_tokens_and_tokens_drawn_one_by_one_give_the_same_text(
    real_compiler: GrammarCompiler, real_tokenizer: Tokenizer
) -> None:
    for name in ("const", "scalars", "enums"):
        constraint = real_compiler.compile(Grammar.json_schema(SCHEMAS[name]))
        text = real_tokenizer.decode(constraint.forced_ids())
        assert text
        for seed in range(5):
            assert draw_text(constraint.fork(), real_tokenizer, seed).startswith(text)


# The compiler


def test_a_grammar_is_compiled_once_and_copied(
    compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    num_built: list[Grammar] = []
    build = GrammarCompiler._build
    monkeypatch.setattr(
        GrammarCompiler,
        "_build",
        lambda self, grammar, after: num_built.append(grammar) or build(self, grammar, after),
    )
    small = GrammarCompiler(compiler._tokenizer, PADDED_SIZE, max_cached=2)
    a, b, c = (Grammar.regex(pattern) for pattern in "abc")
    first, again = small.compile(a), small.compile(Grammar.regex("a"))
    first.advance(ord("a"))
    assert allowed_ids(again) == [ord("a")]
    assert num_built == [a]
    for grammar in (b, a, c, a, b):  # c pushes out b, the one used longest ago
        small.compile(grammar)
    assert num_built == [a, b, c, b]


@pytest.mark.parametrize(("vocab_size", "max_cached"), [(0, 1), (10, 0)])
def test_a_compiler_of_no_size_is_refused(
    byte_tokenizer: Tokenizer, vocab_size: int, max_cached: int
) -> None:
    with pytest.raises(ValueError, match="at least 1"):
        GrammarCompiler(byte_tokenizer, vocab_size, max_cached=max_cached)


def test_masks_of_many_constraints_can_be_computed_at_once(byte_tokenizer: Tokenizer) -> None:
    fresh = GrammarCompiler(byte_tokenizer, PADDED_SIZE)

    def walk(seed: int) -> tuple[str, np.ndarray]:
        constraint = fresh.compile(Grammar.json_schema(SCHEMAS[list(SCHEMAS)[seed % 3]]))
        rng, masks = random.Random(seed), []
        for _ in range(30):
            if constraint.is_finished:
                break
            masks.append(constraint.mask().numpy())
            constraint.advance(rng.choice(allowed_ids(constraint)))
        return threading.current_thread().name, np.stack(masks)

    with ThreadPoolExecutor(8) as pool:
        together = list(pool.map(walk, range(48)))
    alone = [walk(seed) for seed in range(48)]
    assert len({name for name, _ in together}) > 1
    for (_, one), (_, other) in zip(together, alone, strict=True):
        np.testing.assert_array_equal(one, other)


AFTERS = ("://", '"', "\\", "\n", "é", "a\tb", "/", "\x7f", "日本", " ", "\x00", '"\\n', "#")
AFTER_CASES = [
    (None, " anything"),
    (Grammar.regex("[a-z]+"), "abc"),
    (Grammar.json_schema({"type": "integer"}), "42"),
    (Grammar.choice(["ab", "//x"]), "//x"),
    (Grammar.lark('start: "x" NAME\nNAME: /[a-z]+/'), "xab"),
]


@pytest.mark.parametrize("after", AFTERS)
@pytest.mark.parametrize(
    ("grammar", "text"), AFTER_CASES, ids=lambda value: getattr(value, "kind", str(value))
)
def test_a_text_can_come_before_what_a_grammar_describes(
    compiler: GrammarCompiler, after: str, grammar: Grammar | None, text: str
) -> None:
    constraint = compiler.compile(grammar, after=after)
    assert allowed_ids(constraint) == [after.encode()[0]]
    assert not constraint.may_end
    write(constraint, after)
    assert constraint.may_end is (grammar is None)
    write(constraint.fork(), text)
    write(constraint, text)
    assert constraint.may_end


def test_behind_a_text_without_a_grammar_everything_is_allowed(compiler: GrammarCompiler) -> None:
    constraint = compiler.compile(None, after="ab")
    write(constraint, "a")
    fork = constraint.fork()
    for each in (constraint, fork):
        assert allowed_ids(each) == [ord("b")]
        each.advance(ord("b"))
        for token_id in (255, PADDED_SIZE - 1, 0):  # no UTF-8, no text, the end of a string
            assert each.mask()[token_id]
            each.advance(token_id)
        assert each.forced_ids() == []
        assert not each.is_finished


def test_a_grammar_behind_a_text_is_checked_as_alone(compiler: GrammarCompiler) -> None:
    for after in ("", "x"):
        with pytest.raises(GrammarError, match="at #/properties/a"):
            compiler.compile(
                Grammar.json_schema(
                    {"type": "object", "properties": {"a": {"type": "integer", "not": {}}}, "required": ["a"]}
                ),
                after=after,
            )


def test_a_grammar_that_waited_too_long_for_its_turn_is_told_to_come_later(
    byte_tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grammar_module, "_MAX_WAIT_S", 0.05)
    compiler = GrammarCompiler(byte_tokenizer, PADDED_SIZE)
    compiler.compile(Grammar.regex("a"))
    slow = {"type": "integer", "multipleOf": 49999}

    async def ask_all() -> list[BaseException | None]:
        schemas = [Grammar.json_schema({**slow, "description": str(index)}) for index in range(3)]
        waiting = asyncio.gather(*(compiler.prepare(each) for each in schemas), return_exceptions=True)
        await compiler.prepare(Grammar.regex("a"))  # it is there, and waits for none
        assert not waiting.done()
        return await waiting

    first, second, third = asyncio.run(ask_all())
    assert first is second is None
    assert isinstance(third, QueueFull)
