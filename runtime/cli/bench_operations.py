"""What a program's operations cost in Python, beside the calls of tokenizer and branch that each of them is made of."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TypeVar

from phloem.runtime import Branch, Engine
from phloem.runtime.cli.bench_common import greedy
from phloem.runtime.frontend.program import State, program
from phloem.runtime.tokenizer import Tokenizer

Subject = TypeVar("Subject", State, Branch)

ONE_TOKEN = greedy(1)
START = "A text that goes on for some time, as texts do, and"
TEXT = " a few more words,"
CUT_TEXT = " a few more wor"
MESSAGE = "What are the colours of the rainbow, and why?"
OPTIONS = (" yes", " no", " perhaps", " I do not know")
NUM_CHILDREN = 4


@dataclass(frozen=True, slots=True)
class Operation:
    """A program's operation, and what it cannot do without."""

    name: str
    program: Callable[[State], object]
    base: Callable[[Branch], object]
    """The calls of tokenizer and branch that do the same work."""

    base_name: str
    text: str = ""
    """Appended before, unmeasured. It has not reached the branch when the operation begins."""


@dataclass(frozen=True, slots=True)
class OperationTime:
    """Processor time of the calling thread, which waits for the model: lower quartiles of the rounds, in seconds."""

    name: str
    program_s: float
    base_s: float
    """Of the calls of tokenizer and branch that do the same work."""

    base_name: str
    overhead_s: float
    """What the program adds to them."""


def measure_operations(engine: Engine, *, rounds: int) -> list[OperationTime]:
    """Measure each operation `rounds` times, always right after a step of the model, as programs meet it: caches are cold.

    From an operation's time is subtracted that of the calls in its `base`, measured in turn with it: the tokenizer's own encoding of
    its texts, and the branch's own call with parameters and tokens at hand. What is left is the program's: arguments and their checks,
    the trace, captures, the path, token healing's seam. From `select`'s no encoding is subtracted, since a program
    tokenises a list of options once, in the first round here.
    """
    found: list[OperationTime] = []

    @program
    def measure(state: State) -> None:
        state += START
        state.gen(max_tokens=1, temperature=0, ignore_eos=True)
        with engine.branch(state.token_ids) as root:
            root.next_token_logprobs(top=1)
            found.extend(_measure(engine, state, root, each, rounds) for each in _operations(engine))

    measure.run(engine)
    return found


def _measure(engine: Engine, state: State, root: Branch, operation: Operation, rounds: int) -> OperationTime:
    program_s, base_s = [], []
    start = state.mark()
    for number in range(rounds + 1):
        state.explain()  # brings its branch in line
        state += operation.text
        _step(engine, number)
        program_s.append(_timed(operation.program, state))
        state.rewind(start)
        [branch] = root.fork()
        _step(engine, number)
        base_s.append(_timed(operation.base, branch))
        branch.release()
    # The first round warms up: it compiles a grammar, and looks at the chat template.
    with_program, without = _quartile(program_s[1:]), _quartile(base_s[1:])
    return OperationTime(operation.name, with_program, without, operation.base_name, with_program - without)


def _step(engine: Engine, number: int) -> None:
    with engine.branch([number]) as branch:
        branch.generate(ONE_TOKEN)


def _timed(action: Callable[[Subject], object], subject: Subject) -> float:
    started = time.thread_time()
    action(subject)
    return time.thread_time() - started


def _quartile(values: list[float]) -> float:
    return sorted(values)[len(values) // 4]


def _operations(engine: Engine) -> list[Operation]:
    tokenizer = engine.tokenizer
    text_ids = _encoded(tokenizer, TEXT)
    option_ids = [_encoded(tokenizer, each) for each in OPTIONS]

    def score(branch: Branch) -> object:
        return branch.score([_encoded(tokenizer, each) for each in OPTIONS])

    return [
        Operation("s += text", lambda s: s.__iadd__(TEXT), lambda _: _encoded(tokenizer, TEXT), "encode"),
        *(_chat_operations(engine) if tokenizer.has_chat_template else ()),
        Operation(
            "gen",
            lambda s: s.gen("x", max_tokens=1, temperature=0, ignore_eos=True, heal=False),
            lambda b: b.append(text_ids).generate(ONE_TOKEN),
            "append, generate",
            text=TEXT,
        ),
        _healed_gen(tokenizer),
        Operation(
            "score",
            lambda s: s.score(OPTIONS),
            score,
            "encode, score",
        ),
        Operation("select", lambda s: s.select("x", OPTIONS), lambda b: b.score(option_ids), "score"),
        Operation(f"fork of {NUM_CHILDREN}", _fork, _fork_branch, "score, fork, release"),
        Operation("mark and rewind", lambda s: s.rewind(s.mark()), lambda _: None, ""),
        Operation("capture", _capture, lambda _: None, ""),
    ]


def _chat_operations(engine: Engine) -> list[Operation]:
    @program
    def message(state: State) -> None:
        state.user(MESSAGE)

    text = message.run(engine).text
    return [
        Operation(
            "s.user(text)", lambda s: s.user(MESSAGE), lambda _: _encoded(engine.tokenizer, text), "encode"
        ),
        Operation("with s.assistant()", _turn, lambda _: None, ""),
    ]


def _healed_gen(tokenizer: Tokenizer) -> Operation:
    ids = _encoded(tokenizer, CUT_TEXT)
    count = tokenizer.num_joinable(ids)
    kept, healed = ids[: len(ids) - count], tokenizer.decode(ids[len(ids) - count :])
    params = replace(ONE_TOKEN, heal=healed, max_tokens=1 + count)
    return Operation(
        "healed gen",
        lambda s: s.gen("x", max_tokens=1, temperature=0, ignore_eos=True),
        lambda b: b.append(kept).generate(params),
        "append, generate",
        text=CUT_TEXT,
    )


def _encoded(tokenizer: Tokenizer, text: str) -> list[int]:
    ids: list[int] = tokenizer.backend.encode(text, add_special_tokens=False).ids
    return ids


def _turn(state: State) -> None:
    with state.assistant():
        pass


def _fork(state: State) -> None:
    with state.fork(NUM_CHILDREN):
        pass


def _fork_branch(branch: Branch) -> None:
    branch.score([[0]])
    for child in branch.fork(NUM_CHILDREN):
        child.release()


def _capture(state: State) -> object:
    state["x"] = 1
    return state["x"]
