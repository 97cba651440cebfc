"""`phloem demo`: the engine's main job on a real model, with the cache on and off."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass, field
from importlib.resources import files

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from phloem.runtime import Completion, Engine, SamplingParams

TURNS = ("What is the capital of France?", "Which river flows through it?", "Name one famous building there.")
GREEDY = SamplingParams(temperature=0, max_tokens=48)
QUESTION = SamplingParams(temperature=0, max_tokens=64, stop="###")


@dataclass(slots=True)
class Pass:
    """What one engine did: the cache on, or off."""

    label: str
    chat: list[Completion] = field(default_factory=list)
    questions: list[Completion] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def completions(self) -> list[Completion]:
        """All of them, in order."""
        return [*self.chat, *self.questions]

    @property
    def mean_first_token_s(self) -> float:
        """Over all requests, in seconds."""
        return sum(completion.first_token_s for completion in self.completions) / len(self.completions)

    def total(self, name: str) -> int:
        """Sum of a field of `Usage` over all requests."""
        return sum(getattr(completion.usage, name) for completion in self.completions)


@dataclass(frozen=True, slots=True)
class Problem:
    """A question with the answer that is known to be right."""

    prompt: str
    question: str
    answer: str


def run_demo(model: str, console: Console) -> None:
    """Run and print the demo. Needs no input."""
    problems = load_problems()
    console.print(
        f"[bold]phloem[/] on [cyan]{escape(model)}[/]: a chat of three turns, then sixteen questions that share one prefix.\n"
    )
    warm = _run_pass(model, "cache on", problems, console, prefix_cache=True)
    _print_answers(warm, problems, console)
    console.print("\nThe same again with the cache off ...")
    cold = _run_pass(model, "cache off", problems, console, prefix_cache=False)
    console.print(_requests_table(warm, cold))
    console.print(_totals_table(warm, cold))
    same = sum(a.token_ids == b.token_ids for a, b in zip(warm.completions, cold.completions, strict=True))
    console.print(
        f"{same} of {len(warm.completions)} answers are the same, token for token, with the cache on and off."
    )


def load_problems() -> list[Problem]:
    """Return the sixteen problems that ship with phloem, each behind the few-shot examples that they share."""
    folder = files("phloem.examples.data.gsm8k")
    examples = folder.joinpath("fewshot.txt").read_text(encoding="utf-8")
    return [
        Problem(
            prompt=f"{examples}\n\n### Instruction:\n{entry['problem']}\n\n### Response:\nLet's think step by step.",
            question=entry["problem"],
            answer=entry["answer"],
        )
        for entry in json.loads(folder.joinpath("problems.json").read_text(encoding="utf-8"))
    ]


def _run_pass(
    model: str, label: str, problems: list[Problem], console: Console, *, prefix_cache: bool
) -> Pass:
    done = Pass(label)
    with console.status(f"Loading {escape(model)} ({label})"):
        engine = Engine(model, prefix_cache=prefix_cache)
    with engine:
        started = time.perf_counter()
        with console.status(f"Chatting ({label})"):
            done.chat = _chat(engine)
        with console.status(f"Answering {len(problems)} questions at once ({label})"):
            done.questions = engine.generate([problem.prompt for problem in problems], QUESTION)
        done.seconds = time.perf_counter() - started
    return done


def _chat(engine: Engine) -> list[Completion]:
    messages: list[dict[str, str]] = []
    completions = []
    for turn in TURNS:
        messages.append({"role": "user", "content": turn})
        [completion] = engine.generate(messages, GREEDY)
        messages.append({"role": "assistant", "content": completion.text})
        completions.append(completion)
    return completions


def _print_answers(done: Pass, problems: list[Problem], console: Console) -> None:
    for turn, completion in zip(TURNS, done.chat, strict=True):
        console.print(f"[bold green]you[/]     {turn}", highlight=False)
        console.print(f"[bold cyan]model[/]   {escape(completion.text.strip())}\n", highlight=False)
    for number, (problem, completion) in enumerate(zip(problems, done.questions, strict=True), start=1):
        console.print(
            f"[bold green]{number:2}[/] {problem.question} [dim](right: {problem.answer})[/]", highlight=False
        )
        console.print(f"   {' '.join(completion.text.split())}", highlight=False, markup=False)


def _requests_table(warm: Pass, cold: Pass) -> Table:
    table = Table(
        title="Per request: prompt tokens, and milliseconds to the first token", title_justify="left"
    )
    table.add_column("request", no_wrap=True)
    for heading in ("prompt", "cached", "computed", "first, ms", "off: computed", "off: first, ms"):
        table.add_column(heading, justify="right")
    names = [f"turn {n + 1}" for n in range(len(warm.chat))] + [
        f"question {n + 1}" for n in range(len(warm.questions))
    ]
    for name, on, off in zip(names, warm.completions, cold.completions, strict=True):
        table.add_row(
            name,
            f"{on.usage.prompt_tokens:,}",
            f"{on.usage.cached_tokens:,}",
            f"{on.usage.computed_tokens:,}",
            f"{on.first_token_s * 1e3:,.0f}",
            f"{off.usage.computed_tokens:,}",
            f"{off.first_token_s * 1e3:,.0f}",
        )
    return table


def _totals_table(warm: Pass, cold: Pass) -> Table:
    table = Table(title="Totals", title_justify="left")
    table.add_column("")
    for done in (warm, cold):
        table.add_column(done.label, justify="right")
    table.add_column("off / on", justify="right")

    def row(name: str, on: float, off: float, form: str) -> None:
        table.add_row(name, format(on, form), format(off, form), f"{off / on:.1f}x" if on else "")

    row("prompt tokens", warm.total("prompt_tokens"), cold.total("prompt_tokens"), ",")
    row("cached", warm.total("cached_tokens"), cold.total("cached_tokens"), ",")
    row("computed", warm.total("computed_tokens"), cold.total("computed_tokens"), ",")
    row("generated", warm.total("completion_tokens"), cold.total("completion_tokens"), ",")
    row("mean first token, s", warm.mean_first_token_s, cold.mean_first_token_s, ".3f")
    row("total time, s", warm.seconds, cold.seconds, ".1f")
    return table
