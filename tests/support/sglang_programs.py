"""What the tests of SGLang's programs have in common. Importing it skips the module where SGLang is not installed."""

from __future__ import annotations

import re

import pytest

from phloem.runtime import Engine, SamplingParams

sgl = pytest.importorskip("sglang", reason="needs SGLang's frontend (requirements-sglang.txt)")
PhloemBackend = pytest.importorskip("phloem.runtime.frontend.sglang").PhloemBackend

GREEDY = {"temperature": 0, "max_tokens": 8, "ignore_eos": True}
TEXT = "the quick brown fox jumps over the lazy dog"
CHOICES = [" yes, always", " no, never", " no, never again"]
METHODS = {
    "mean": sgl.token_length_normalized,
    "greedy": sgl.greedy_token_selection,
    "unconditional": sgl.unconditional_likelihood_normalized,
}


def run(backend, function, *args, **options):
    """Run a program to its end in this thread, where its errors are raised."""
    return sgl.function(function).run(*args, backend=backend, use_thread=False, **options)


def alone(engine: Engine, prompt, **options) -> str:
    """What a cold engine answers to a prompt."""
    engine.clear_cache()
    [done] = engine.generate(prompt, SamplingParams(**{**GREEDY, **options}))
    return done.text


@sgl.function
def plain(s, text=TEXT):
    s += text + sgl.gen("answer", **GREEDY)


@sgl.function
def typed(s):
    """Every way to say what a text must look like; see `check_typed`."""
    schema = '{"type": "object", "properties": {"n": {"enum": [1, 2]}}, "required": ["n"]}'
    s += TEXT
    s += sgl.gen("regex", temperature=0, max_tokens=20, regex="[a-c]{2,4}-[0-9]{3}")
    s += sgl.gen("int", temperature=0, max_tokens=4, dtype=int)
    s += sgl.gen_int("same_int", temperature=0, max_tokens=4)
    s += sgl.gen("float", temperature=0, max_tokens=4, dtype="float")
    s += sgl.gen("bool", temperature=0, max_tokens=8, dtype=bool)
    s += sgl.gen_string("str", temperature=0, max_tokens=8)
    s += sgl.gen("json", temperature=0, max_tokens=30, json_schema=schema)


def check_typed(state) -> None:
    assert re.fullmatch("[a-c]{2,4}-[0-9]{3}", state["regex"])
    assert re.fullmatch("[-+]?[0-9]+", state["int"])
    assert re.fullmatch("[-+]?[0-9]+", state["same_int"])
    assert re.fullmatch(r"[-+]?[0-9]*\.?[0-9]*", state["float"])
    assert state["bool"] in ("True", "False")
    assert state["str"].startswith('"')
    assert state["json"] in ('{"n": 1}', '{"n": 2}')
