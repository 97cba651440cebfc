"""`phloem bench branch`: forks, scores, and what the scheduler costs beside the model."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.progress import Progress
from rich.table import Table

from phloem.runtime import Engine
from phloem.runtime.cli.bench_common import DecodeStep, decode_step, random_ids, verdict, write_json

FORK_LEN, NUM_FORKS = 4096, 1000
SCORE_LEN, NUM_SCORED, SCORED_LEN = 2048, 32, 4
NUM_RUNNING = 64
DECODE_LEN = 24


@dataclass(frozen=True, slots=True)
class BranchResult:
    """Medians over the rounds, in seconds, and ratios of what was measured next to each other."""

    rounds: int
    fork_s: float
    """All forks of one branch."""

    forks_copied_blocks: int
    """Blocks that the forks took for themselves."""

    score_s: float
    step_at_32_s: float
    """One decode step of as many branches as continuations were scored."""

    score_to_step: float
    step_at_64_s: float
    schedule_at_64_s: float
    """The scheduler's part of such a step: choosing, allocating, committing."""

    schedule_share: float


def run_bench_branch(model: str, console: Console, *, rounds: int, json_path: Path | None) -> None:
    """Measure and print."""
    with console.status(f"Loading {escape(model)}"):
        engine = Engine(model)
    with engine, Progress(console=console, transient=True) as progress:
        task = progress.add_task("Measuring", total=rounds + 1)
        result = _measure(engine, rounds, lambda: progress.advance(task))
    console.print(_table(result))
    write_json(json_path, asdict(result))


def _measure(engine: Engine, rounds: int, advance: Callable[[], None]) -> BranchResult:
    draw = random.Random(0)
    found: list[tuple[float, int, float, float, float, float]] = []
    # One round more: the first one warms up and is not counted.
    for _ in range(rounds + 1):
        fork_s, copied = _fork(engine, draw)
        score_s = _score(engine, draw)
        step_32 = _decode(engine, draw, NUM_SCORED, SCORE_LEN)
        step_64 = _decode(engine, draw, NUM_RUNNING, 256)
        found.append((fork_s, copied, score_s, step_32.seconds, step_64.seconds, step_64.scheduler_s))
        advance()
    columns = list(zip(*found[1:], strict=True))
    medians = [statistics.median(column) for column in columns]
    return BranchResult(
        rounds=rounds,
        fork_s=medians[0],
        forks_copied_blocks=max(columns[1]),
        score_s=medians[2],
        step_at_32_s=medians[3],
        score_to_step=statistics.median(a / b for a, b in zip(columns[2], columns[3], strict=True)),
        step_at_64_s=medians[4],
        schedule_at_64_s=medians[5],
        schedule_share=statistics.median(a / b for a, b in zip(columns[5], columns[4], strict=True)),
    )


def _fork(engine: Engine, draw: random.Random) -> tuple[float, int]:
    with engine.branch(random_ids(engine, draw, min(FORK_LEN, engine.max_model_len - 1))) as root:
        root.next_token_logprobs(top=1)
        before = engine.stats().cache.private
        started = time.perf_counter()
        kids = root.fork(NUM_FORKS)
        seconds = time.perf_counter() - started
        copied = engine.stats().cache.private - before
        for kid in kids:
            kid.release()
    return seconds, copied


def _score(engine: Engine, draw: random.Random) -> float:
    with engine.branch(random_ids(engine, draw, min(SCORE_LEN, engine.max_model_len - SCORED_LEN))) as root:
        root.next_token_logprobs(top=1)
        continuations = [random_ids(engine, draw, SCORED_LEN) for _ in range(NUM_SCORED)]
        started = time.perf_counter()
        root.score(continuations)
        return time.perf_counter() - started


def _decode(engine: Engine, draw: random.Random, count: int, length: int) -> DecodeStep:
    prompt = random_ids(engine, draw, min(length, engine.max_model_len - DECODE_LEN))
    return decode_step(engine, prompt, count, num_tokens=DECODE_LEN)


def _table(result: BranchResult) -> Table:
    table = Table(title=f"Branches: medians of {result.rounds} rounds", title_justify="left")
    table.add_column("what")
    table.add_column("measured", justify="right", no_wrap=True)
    table.add_column("aim", justify="right", no_wrap=True)

    def row(what: str, measured: str, aim: str, *, met: bool) -> None:
        table.add_row(what, measured, verdict(aim, met=met))

    row(
        f"{NUM_FORKS:,} forks of a branch of {FORK_LEN:,} tokens",
        f"{result.fork_s * 1e3:.1f} ms",
        "20 ms",
        met=result.fork_s <= 0.020,
    )
    row("blocks they copied", str(result.forks_copied_blocks), "0", met=result.forks_copied_blocks == 0)
    row(
        f"{NUM_SCORED} continuations of {SCORED_LEN} tokens scored after {SCORE_LEN:,} cached ones, beside a decode step of "
        f"{NUM_SCORED} branches",
        f"{result.score_s * 1e3:.0f} / {result.step_at_32_s * 1e3:.0f} ms = {result.score_to_step:.2f}",
        "2.5",
        met=result.score_to_step <= 2.5,
    )
    row(
        f"scheduler beside a decode step of {NUM_RUNNING} branches",
        f"{result.schedule_at_64_s * 1e3:.2f} / {result.step_at_64_s * 1e3:.0f} ms = {result.schedule_share:.1%}",
        "5 %",
        met=result.schedule_share <= 0.05,
    )
    return table
