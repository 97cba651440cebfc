"""What the tests of SGLang's programs have in common. Importing it skips the module where SGLang is not installed."""

from __future__ import annotations

import pytest

from phloem.runtime import Engine, SamplingParams

sgl = pytest.importorskip("sglang", reason="needs SGLang's frontend (requirements-sglang.txt)")
PhloemBackend = pytest.importorskip("phloem.runtime.frontend.sglang").PhloemBackend

GREEDY = {"temperature": 0, "max_tokens": 8, "ignore_eos": True}
TEXT = "the quick brown fox jumps over the lazy dog"


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
