"""What the tests of programs have in common."""

from phloem.runtime.frontend.program import program

GREEDY = {"temperature": 0, "max_tokens": 8, "ignore_eos": True}
TEXT = "the quick brown fox jumps over the lazy dog"


@program
def plain(s, text=TEXT):
    s += text
    s.gen("answer", **GREEDY)


def run(engine, function, *args, **kwargs):
    return program(function).run(engine, *args, **kwargs)
