"""Grammars and templates of strangers: the same results as in the process, and an end to what would not end."""

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from tiny_model import VOCAB_SIZE

from phloem.runtime import Engine, EngineConfig, GrammarError, InvalidRequest
from phloem.runtime.grammar import Grammar, GrammarCompiler
from phloem.runtime.sandbox import Sandbox
from phloem.runtime.tokenizer import Tokenizer

TIMEOUT_S = 1.0

SLOW_SCHEMA = {
    "type": "object",
    "properties": {f"k{i}": {"type": "integer", "multipleOf": 99991 - 2 * i} for i in range(40)},
}
"""1.8 kB that take about a minute and two gigabytes."""

TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
CONVERSATIONS: list[list[dict[str, Any]]] = [
    [{"role": "user", "content": "Hi <|im_end|> there"}],
    [{"role": "system", "content": "é\u2028\n"}, {"role": "user", "content": "x", "name": None}, {"role": "assistant", "content": "y"}],
]  # fmt: skip


@pytest.fixture(scope="module")
def tokenizer(tiny_path: Path) -> Tokenizer:
    return Tokenizer.from_directory(tiny_path)


@pytest.fixture(scope="module")
def sandbox(tokenizer: Tokenizer) -> Iterator[Sandbox]:
    sandbox = Sandbox(tokenizer, VOCAB_SIZE, timeout_s=TIMEOUT_S)
    sandbox.check_grammar(Grammar.regex("a"), "")  # it has started
    yield sandbox
    sandbox.close()


def with_template(tokenizer: Tokenizer, template: str, sandbox: Sandbox) -> Tokenizer:
    changed = Tokenizer(tokenizer.hf.__class__(tokenizer_object=tokenizer.backend, eos_token="<|im_end|>"))
    changed.hf.chat_template = template
    return changed.with_renderer(sandbox.render)


def ask(tokenizer: Tokenizer, content: str = "hi") -> str:
    return tokenizer.decode(tokenizer.encode_chat([{"role": "user", "content": content}]))


@pytest.mark.parametrize(
    "grammar",
    [Grammar.json_schema(SLOW_SCHEMA), Grammar.lark(f"start: %json {json.dumps(SLOW_SCHEMA)}")],
    ids=["schema", "lark"],
)
def test_a_grammar_that_would_take_minutes_is_refused_in_time_and_leaves_nothing_behind(
    tokenizer: Tokenizer, sandbox: Sandbox, grammar: Grammar
) -> None:
    compiler = GrammarCompiler(tokenizer, VOCAB_SIZE, sandbox=sandbox)
    compiler.compile(Grammar.regex("b"))
    started = time.monotonic()
    with pytest.raises(GrammarError, match="takes more than 1 s or 256 MiB"):
        compiler.compile(grammar)
    assert time.monotonic() - started < TIMEOUT_S + 3
    compiler.compile(Grammar.regex("c"))
    deadline = time.monotonic() + 10
    while (
        busy := [each for each in workers() if each.cpu_percent(0.05) > 50]
    ) and time.monotonic() < deadline:
        pass
    assert not busy


def workers() -> list[psutil.Process]:
    return [
        each
        for each in psutil.Process().children(recursive=True)
        if each.is_running() and each.status() != psutil.STATUS_ZOMBIE
    ]


@pytest.mark.parametrize(
    "grammar", [Grammar.regex("(a"), Grammar.json_schema({"type": "strin"}), Grammar.lark("start: x")]
)
def test_what_is_wrong_with_a_grammar_is_told_in_the_same_words(
    tokenizer: Tokenizer, sandbox: Sandbox, grammar: Grammar
) -> None:
    messages = []
    for where in (None, sandbox):
        with pytest.raises(GrammarError) as error:
            GrammarCompiler(tokenizer, VOCAB_SIZE, sandbox=where).compile(grammar, after="ab")
        messages.append((str(error.value), error.value.field))
    assert messages[0] == messages[1]


@pytest.mark.parametrize("messages", CONVERSATIONS)
@pytest.mark.parametrize("options", [{}, {"tools": [TOOL]}])
def test_a_conversation_is_rendered_as_in_the_process(
    tokenizer: Tokenizer, sandbox: Sandbox, messages: list[dict[str, Any]], options: dict[str, Any]
) -> None:
    there = tokenizer.with_renderer(sandbox.render)
    for opens in (True, False):
        arguments: dict[str, Any] = {"template_options": options, "add_generation_prompt": opens}
        assert there.encode_chat(messages, **arguments) == tokenizer.encode_chat(messages, **arguments)


@pytest.mark.parametrize(
    "template",
    [
        "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
        "{{ 10 ** (10 ** 9) }}",
        "{% set ns = namespace(x='a') %}{% for i in range(60) %}{% set ns.x = ns.x + ns.x %}{% endfor %}",
    ],
    ids=["loops", "one operation", "memory"],
)
def test_a_template_that_does_not_end_is_ended(tokenizer: Tokenizer, sandbox: Sandbox, template: str) -> None:
    started = time.monotonic()
    with pytest.raises(InvalidRequest, match="template takes more than 1 s or 256 MiB") as error:
        ask(with_template(tokenizer, template, sandbox))
    assert error.value.field == "messages"
    assert time.monotonic() - started < TIMEOUT_S + 3
    assert ask(with_template(tokenizer, "{{ messages[0].content }}", sandbox), "again") == "again"


@pytest.mark.parametrize(
    ("template", "complaint"),
    [
        ("{{ messages.append(1) }}", "unsafe"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{{ messages[0].content * 17_000_000 }}", "at most 16,777,216"),
        ("{{ raise_exception('no ' ~ messages[0].content) }}", "no hi"),
        ("{{ 1 / 0 }}", "division by zero"),
        ("{% if %}", "Expected an expression"),
    ],
)
def test_a_template_that_does_what_it_must_not_is_refused(
    tokenizer: Tokenizer, sandbox: Sandbox, template: str, complaint: str
) -> None:
    with pytest.raises(InvalidRequest, match=complaint):
        ask(with_template(tokenizer, template, sandbox), "hi")


def test_its_processes_do_not_inherit_keys(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PHLOEM_API_KEY", "secret-of-the-server")
    before = psutil.Process().children(recursive=True)
    sandbox = Sandbox(tokenizer, VOCAB_SIZE, timeout_s=TIMEOUT_S)
    try:
        sandbox.check_grammar(Grammar.regex("a"), "")
        own = [each for each in psutil.Process().children(recursive=True) if each not in before]
        environments = [each.environ() for each in own]
        assert len(environments) >= 2
        assert not any("PHLOEM_API_KEY" in each for each in environments)
    finally:
        sandbox.close()


def test_a_killed_process_is_replaced(tokenizer: Tokenizer) -> None:
    before = psutil.Process().children()
    sandbox = Sandbox(tokenizer, VOCAB_SIZE, timeout_s=TIMEOUT_S)
    try:
        for _ in range(2):
            sandbox.check_grammar(Grammar.regex("a"), "")
            [nursery] = [each for each in psutil.Process().children() if each not in before]
            for process in (*nursery.children(), nursery):
                process.kill()
            nursery.wait(10)
            with pytest.raises(GrammarError, match="takes more than"):
                sandbox.check_grammar(Grammar.regex("a"), "")  # the worker that waited is gone
            sandbox.check_grammar(Grammar.regex("a"), "")
    finally:
        sandbox.close()


def test_an_engine_uses_it_and_ends_it(tiny_path: Path) -> None:
    before, files = psutil.Process().children(), psutil.Process().num_fds()
    with Engine(tiny_path, dtype="float32", num_blocks=64, sandbox_timeout_s=TIMEOUT_S) as engine:
        [done] = engine.generate([{"role": "user", "content": "hi"}], None)
        assert done.usage.prompt_tokens > 2
        [nursery] = [each for each in psutil.Process().children() if each not in before]
        assert nursery.children()
    assert not nursery.is_running()
    assert psutil.Process().num_fds() <= files


@pytest.mark.parametrize("limit", [0, -1, "5", True, float("nan")])
def test_a_limit_that_is_none_is_refused(limit: Any) -> None:
    with pytest.raises(InvalidRequest, match="sandbox_timeout_s"):
        EngineConfig(sandbox_timeout_s=limit)
