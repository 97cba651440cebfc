"""Constrained output through the engine, on a random model that left alone would write nothing of the kind."""

import json
import re
from enum import Enum
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from phloem.runtime import Engine, Grammar, GrammarError, InvalidRequest, SamplingParams

TEXT = "the quick brown fox"
SHORT = {"type": "string", "maxLength": 6}
SCHEMAS: list[dict[str, Any]] = [
    {"type": "object", "properties": {"name": SHORT, "age": {"type": "integer", "minimum": 0, "maximum": 120}},
     "required": ["name", "age"], "additionalProperties": False},
    {"enum": ["red", "green", "blue"]},
    {"type": "array", "items": {"type": "integer", "minimum": 1, "maximum": 99}, "minItems": 1, "maxItems": 4},
    {"type": "number", "minimum": -1, "maximum": 1, "multipleOf": 0.25},
    {"type": "object", "properties": {"lines": {"type": "array", "minItems": 1, "maxItems": 2, "items": {"type": "object",
     "properties": {"item": {"enum": ["tea", "cake"]}, "price": {"type": "number", "minimum": 0.5, "exclusiveMaximum": 20,
     "multipleOf": 0.5}}, "required": ["item", "price"], "additionalProperties": False}}}, "required": ["lines"],
     "additionalProperties": False},
    {"anyOf": [{"type": "null"}, {"type": "boolean"}]},
    {"type": "object", "properties": {"kind": {"const": "point"}, "x": {"type": "integer", "minimum": 0, "maximum": 9}},
     "required": ["kind", "x"], "additionalProperties": False},
    {"type": "string", "pattern": "^[a-c]{2,5}$"},
    {"type": "array", "items": {"enum": ["x", "y"]}, "minItems": 2, "maxItems": 2},
    {"type": "object", "properties": {"tags": {"type": "array", "items": SHORT, "maxItems": 2}, "ok": {"type": "boolean"}},
     "required": ["tags", "ok"], "additionalProperties": False},
]  # fmt: skip


def generate(engine: Engine, grammar: Grammar, **options: Any) -> list[str]:
    params = SamplingParams(grammar=grammar, **{"max_tokens": 400, "seed": 1, **options})
    done = engine.generate(TEXT, params)
    assert {each.finish_reason for each in done} == {"stop"}
    return [each.text for each in done]


def check(texts: list[str], schema: dict[str, Any]) -> None:
    validator = jsonschema.Draft202012Validator(schema)
    for text in texts:
        validator.validate(json.loads(text))


@pytest.mark.parametrize("schema", SCHEMAS, ids=lambda schema: json.dumps(schema)[:40])
def test_twenty_draws_at_temperature_1_all_fit_the_schema(
    tiny_engine: Engine, schema: dict[str, Any]
) -> None:
    texts = generate(tiny_engine, Grammar.json_schema(schema), n=20)
    assert len(texts) == 20
    check(texts, schema)
    # This model is sure of itself at temperature 1; flattened, it tries more.
    varied = generate(tiny_engine, Grammar.json_schema(schema), n=20, temperature=50.0, max_tokens=3000)
    check(varied, schema)
    assert len(set(varied)) > 1


@pytest.mark.model
@pytest.mark.parametrize("n", [2, pytest.param(20, marks=pytest.mark.slow)])
def test_draws_of_the_real_model_at_temperature_1_all_fit_their_schemas(smollm2_path: Path, n: int) -> None:
    prompts = [
        [{"role": "user", "content": f"Give an example of JSON that fits this schema: {json.dumps(schema)}"}]
        for schema in SCHEMAS
    ]
    params = [
        SamplingParams(grammar=Grammar.json_schema(schema), n=n, seed=1, max_tokens=400) for schema in SCHEMAS
    ]
    with Engine(smollm2_path) as engine:
        done = engine.generate(prompts, params)
    assert len(done) == n * len(SCHEMAS)
    assert {each.finish_reason for each in done} == {"stop"}
    for index, schema in enumerate(SCHEMAS):
        check([each.text for each in done[n * index : n * (index + 1)]], schema)


def test_regex_and_choice(tiny_engine: Engine) -> None:
    for text in generate(tiny_engine, Grammar.regex(r"[0-9]{3}-[a-f]+x"), n=5, max_tokens=300):
        assert re.fullmatch(r"[0-9]{3}-[a-f]+x", text)
    assert set(generate(tiny_engine, Grammar.choice(["yes", "no", "maybe"]), n=30, temperature=50.0)) == {
        "yes",
        "no",
        "maybe",
    }


def test_lark(tiny_engine: Engine) -> None:
    grammar = Grammar.lark('start: "(" start ")" | DIGIT\nDIGIT: /[0-9]/')
    for text in generate(tiny_engine, grammar, n=5, temperature=0.1):
        assert re.fullmatch(r"(\()*[0-9](\))*", text)
        assert text.count("(") == text.count(")")


def test_forced_tokens_take_no_step_and_change_nothing(tiny_engine: Engine) -> None:
    grammar = Grammar.regex(r"a fixed beginning [xy]{3} and a fixed end")
    before = tiny_engine.stats()
    [text] = generate(tiny_engine, grammar)
    after = tiny_engine.stats()
    assert re.fullmatch(r"a fixed beginning [xy]{3} and a fixed end", text)
    assert after.forced_tokens - before.forced_tokens > 25
    assert after.steps - before.steps <= 5
    # Asked for the log-probability of each token, the engine samples each one; the text is the same.
    params = SamplingParams(grammar=grammar, max_tokens=400, seed=1, logprobs=0)
    [slow] = tiny_engine.generate(TEXT, params)
    assert slow.text == text
    assert len(slow.logprobs or []) == len(slow.token_ids)


def test_the_next_turn_finds_forced_tokens_in_the_cache(tiny_engine: Engine) -> None:
    with tiny_engine.branch(TEXT) as branch:
        done = branch.generate(
            SamplingParams(grammar=Grammar.choice(["the one and only choice that there is"]), max_tokens=100)
        )
        assert done.text == "the one and only choice that there is"
        assert done.usage.completion_tokens == len(done.text)
        again = branch.append("!").generate(SamplingParams(max_tokens=1))
        assert again.usage.prompt_tokens == len(branch) - 1


def test_what_a_grammar_forces_at_once_is_no_part_of_the_prompt(tiny_engine: Engine) -> None:
    grammar = Grammar.lark('start: "exactly like this: " /[ab]/')
    for n in (1, 2):
        for _ in range(2):
            *_, done = tiny_engine.generate(TEXT, SamplingParams(grammar=grammar, seed=1, n=n))
            usage, explanation = done.usage, done.explanation
            assert usage.prompt_tokens == len(TEXT) + 1
            assert usage.cached_tokens <= usage.prompt_tokens
            assert explanation is not None
            assert explanation.num_tokens == usage.prompt_tokens
            assert all(miss.start < miss.end <= usage.prompt_tokens for miss in explanation.misses)
        assert usage.cached_tokens == usage.prompt_tokens


def test_children_of_a_branch_each_follow_the_grammar(tiny_engine: Engine) -> None:
    with tiny_engine.branch(TEXT) as root:
        kids = root.expand(8, SamplingParams(grammar=Grammar.regex("[a-z]{4}"), max_tokens=10, seed=2))
        assert all(re.fullmatch("[a-z]{4}", kid.completion.text) for kid in kids)
        assert len({kid.completion.text for kid in kids}) > 1
        for kid in kids:
            kid.release()


def test_a_type_gives_its_schema(tiny_engine: Engine) -> None:
    class Model:
        @classmethod
        def model_json_schema(cls) -> dict[str, Any]:
            return SCHEMAS[0]

    check(generate(tiny_engine, Grammar.json_schema(Model)), SCHEMAS[0])


class Bad(Enum):
    UNSATISFIABLE = Grammar.json_schema({"type": "integer", "minimum": 5, "maximum": 4})
    NOT_A_REGEX = Grammar.regex("(")
    UNSUPPORTED = Grammar.json_schema({"type": "object", "properties": {"a": {"not": {"type": "string"}}}})
    NOT_LARK = Grammar.lark("start: nothing")


@pytest.mark.parametrize("bad", list(Bad))
def test_a_grammar_that_cannot_be_is_refused_and_the_engine_lives(tiny_engine: Engine, bad: Bad) -> None:
    with pytest.raises(GrammarError):
        tiny_engine.generate(TEXT, SamplingParams(grammar=bad.value))
    with tiny_engine.branch(TEXT) as branch:
        with pytest.raises(GrammarError):
            branch.generate(SamplingParams(grammar=bad.value))
        with pytest.raises(GrammarError):
            branch.expand(2, SamplingParams(grammar=bad.value))
    with pytest.raises(InvalidRequest, match="must be a Grammar"):
        SamplingParams(grammar="[a-z]+")
    assert generate(tiny_engine, Grammar.choice(["a"])) == ["a"]


def test_min_tokens_does_not_leave_a_complete_text_without_a_way_out(tiny_engine: Engine) -> None:
    assert generate(tiny_engine, Grammar.choice(["ab"]), min_tokens=50) == ["ab"]
