"""`phloem bench reuse`: what a cached prefix saves, and what the cache costs where there is nothing to share."""

from __future__ import annotations

import random
import statistics
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.progress import track
from rich.table import Table

from phloem.runtime import Engine, SamplingParams
from phloem.runtime.cli.bench_common import greedy, random_ids, write_json

PROMPT_LEN = 2048
NUM_UNSHARED = 8
UNSHARED_LEN = 256
OUTPUT_LEN = 16


@dataclass(frozen=True, slots=True)
class ReuseResult:
    """Medians over the rounds, in seconds, and their ratios."""

    rounds: int
    prompt_tokens: int
    first_s: float
    """Time to first token of a prompt seen for the first time."""

    second_s: float
    """And of the same prompt again."""

    second_to_first: float
    cached_tokens: int
    unshared_on_s: float
    """Total time of prompts that share nothing, cache on."""

    unshared_off_s: float
    on_to_off: float
    """Median over the rounds of on / off, each measured next to the other."""


def run_bench_reuse(model: str, console: Console, *, rounds: int, json_path: Path | None) -> None:
    """Measure and print. Cache on and off alternate within each round, and so does which of them goes first."""
    with console.status(f"Loading {escape(model)} twice: cache on, cache off"):
        warm, cold = Engine(model), Engine(model, prefix_cache=False)
    with warm, cold:
        result = _measure(warm, cold, rounds, console)
    console.print(_table(result))
    write_json(json_path, asdict(result))


def _measure(warm: Engine, cold: Engine, rounds: int, console: Console) -> ReuseResult:
    draw = random.Random(0)
    once, several = greedy(1), greedy(OUTPUT_LEN)
    length = min(PROMPT_LEN, warm.max_model_len - 1)
    first, second, on, off, cached = [], [], [], [], 0
    # One round more: the first one warms up and is not counted.
    for number in track(range(rounds + 1), "Measuring", console=console, transient=True):
        prompt = random_ids(warm, draw, length)
        one, two = (warm.generate(prompt, once)[0] for _ in range(2))
        unshared = [random_ids(warm, draw, UNSHARED_LEN) for _ in range(NUM_UNSHARED)]
        engines = [warm, cold] if number % 2 else [cold, warm]
        seconds = {engine.config.prefix_cache: _total_s(engine, unshared, several) for engine in engines}
        if number > 0:
            first.append(one.first_token_s)
            second.append(two.first_token_s)
            cached = two.usage.cached_tokens
            on.append(seconds[True])
            off.append(seconds[False])
    return ReuseResult(
        rounds=rounds,
        prompt_tokens=length,
        first_s=statistics.median(first),
        second_s=statistics.median(second),
        second_to_first=statistics.median(b / a for a, b in zip(first, second, strict=True)),
        cached_tokens=cached,
        unshared_on_s=statistics.median(on),
        unshared_off_s=statistics.median(off),
        on_to_off=statistics.median(a / b for a, b in zip(on, off, strict=True)),
    )


def _total_s(engine: Engine, prompts: list[list[int]], params: SamplingParams) -> float:
    started = time.perf_counter()
    engine.generate(prompts, params)
    return time.perf_counter() - started


def _table(result: ReuseResult) -> Table:
    table = Table(title=f"Medians of {result.rounds} rounds", title_justify="left")
    for heading in ("", "a", "b", "b / a", "aim"):
        table.add_column(heading, justify="left" if not heading else "right")
    table.add_row(
        f"first token of {result.prompt_tokens:,} tokens: first time (a), again (b; {result.cached_tokens:,} cached)",
        f"{result.first_s * 1e3:,.0f} ms",
        f"{result.second_s * 1e3:,.0f} ms",
        f"{result.second_to_first:.3f}",
        "0.1 at most",
    )
    table.add_row(
        f"{NUM_UNSHARED} prompts of {UNSHARED_LEN} tokens that share nothing, {OUTPUT_LEN} out: cache off (a), on (b)",
        f"{result.unshared_off_s:.2f} s",
        f"{result.unshared_on_s:.2f} s",
        f"{result.on_to_off:.3f}",
        "1.02 at most",
    )
    return table
