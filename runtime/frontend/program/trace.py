"""What a run did, step by step: for a person as a tree, for Chrome's and Perfetto's viewers as JSON."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType, TracebackType
from typing import Any

from phloem.runtime.frontend.program.where import line_of, locate, program_frame
from phloem.runtime.outputs import Usage

_NUM_OURS = 2
"""Callers of `Trace.step` below the program's own: it and `State._step`."""


@dataclass(slots=True)
class Step:
    """One operation of a program. Written by the operation, then left alone."""

    operation: str
    """Its method's name; "text" for `+=`."""

    name: str
    """Of the capture, or of the sub-program; empty where there is none."""

    state: str
    """Which state it was on: "0" is the run's, "0.1" the second child that it forked."""

    code: CodeType | None
    """Where the program says so; None for work that a fork handed to a thread. Its line is looked up when somebody asks for it."""

    instruction: int
    """In the code, by its offset in bytes."""

    start_s: float
    """Since the run began."""

    duration_s: float = 0.0
    tokens_in: int = 0
    """Of the prompts that the operation sent, or of the text that it appended."""

    cached: int = 0
    """Those of `tokens_in` that were not computed, because their KV was there. 0 for text, which is not computed yet."""

    out: int = 0
    """Generated tokens."""

    error: str | None = None
    """The type of the error that ended it."""

    @property
    def line(self) -> str | None:
        """Of the program, as ``file:line, in function``; None where there is no code."""
        return None if self.code is None else line_of(self.code, self.instruction)

    def add(self, usage: Usage) -> None:
        """Count a request of the operation."""
        self.tokens_in += usage.prompt_tokens
        self.cached += usage.cached_tokens
        self.out += usage.completion_tokens


class Recording:
    """The context of one step. A class, since a generator would cost as much again as the rest of the trace."""

    __slots__ = ("_began_s", "_step")

    def __init__(self, step: Step, began_s: float) -> None:
        self._step = step
        self._began_s = began_s

    def __enter__(self) -> Step:
        return self._step

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._step.duration_s = time.perf_counter() - self._began_s
        if error is not None:
            self._step.error = type(error).__name__
            locate(error)


@dataclass(slots=True)
class Trace:
    """The steps of one run, in the order in which they began. Its states append to it, from any thread: a list's append is atomic."""

    program: str
    steps: list[Step] = field(default_factory=list)
    _began_s: float = field(default_factory=time.perf_counter)

    def step(self, operation: str, name: str, state: str) -> Recording:
        """Record what happens inside of the returned context as one step, and locate the error that ends it, if any."""
        began_s = time.perf_counter()
        frame = program_frame(_NUM_OURS)
        code, instruction = (None, 0) if frame is None else (frame.f_code, frame.f_lasti)
        step = Step(operation, name, state, code, instruction, began_s - self._began_s)
        self.steps.append(step)
        return Recording(step, began_s)

    @property
    def usage(self) -> Usage:
        """The sums over all requests of the run."""
        sent = [step for step in self.steps if step.operation != "text"]
        return Usage(
            prompt_tokens=sum(step.tokens_in for step in sent),
            cached_tokens=sum(step.cached for step in sent),
            completion_tokens=sum(step.out for step in sent),
        )

    def to_chrome(self) -> dict[str, Any]:
        """Return the trace in Chrome's trace event format, which Perfetto reads too: a row per state."""
        rows = {state: row for row, state in enumerate(dict.fromkeys(step.state for step in self.steps))}
        names = [
            {"ph": "M", "name": "thread_name", "pid": 1, "tid": row, "args": {"name": f"state {state}"}}
            for state, row in rows.items()
        ]
        return {"traceEvents": names + [_event(step, rows[step.state]) for step in self.steps]}

    def save(self, path: str | Path) -> None:
        """Write `to_chrome` to a file; open it in chrome://tracing or ui.perfetto.dev."""
        Path(path).write_text(json.dumps(self.to_chrome()), encoding="utf-8")

    def to_tree(self) -> str:
        """Return the trace as text, a line per step, forked states indented below their parent's steps."""
        usage = self.usage
        head = (
            f"{self.program}: {usage.prompt_tokens} tokens in, {usage.cached_tokens} cached, "
            f"{usage.completion_tokens} out"
        )
        return "\n".join([head, *(_line(step) for step in self.steps)])

    def __str__(self) -> str:
        return self.to_tree()


def _event(step: Step, row: int) -> dict[str, Any]:
    details = {"in": step.tokens_in, "cached": step.cached, "out": step.out, "line": step.line}
    return {
        "ph": "X",
        "name": f"{step.operation} {step.name}".rstrip(),
        "pid": 1,
        "tid": row,
        "ts": step.start_s * 1e6,
        "dur": step.duration_s * 1e6,
        "args": {key: value for key, value in details.items() if value is not None}
        | ({"error": step.error} if step.error else {}),
    }


def _line(step: Step) -> str:
    depth = step.state.count(".")
    title = f"{'  ' * (depth + 1)}[{step.state}] {step.operation} {step.name}".rstrip()
    counts = f"{step.tokens_in:6} in {step.cached:6} cached {step.out:5} out {step.duration_s * 1e3:9.1f} ms"
    return f"{title:40}{counts}" + (f"  {step.error}" if step.error else "")
