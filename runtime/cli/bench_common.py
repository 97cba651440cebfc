"""What several benchmarks do alike: prompts without a hit, parameters, verdicts, the machine's limits, and results as files."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.progress import Progress

from phloem.runtime.cli.machine_limits import Limit, LimitSizes, measure_limits, num_limits
from phloem.runtime.cli.plots import Bars, check_plot_path, write_plot
from phloem.runtime.engine import Engine
from phloem.runtime.models.config import ModelConfig
from phloem.runtime.sampling_params import SamplingParams


@dataclass(frozen=True, slots=True)
class Outputs:
    """Where a benchmark's results go, besides the console.

    Raises:
        InvalidRequest: A plot can't be written there.
    """

    json_path: Path | None = None
    plot_path: Path | None = None
    profile_path: Path | None = None

    def __post_init__(self) -> None:
        check_plot_path(self.plot_path)

    def write(self, title: str, results: object, charts: Sequence[Bars]) -> None:
        """Write the results and the charts, when files were asked for."""
        write_json(self.json_path, results)
        write_plot(self.plot_path, title, charts)


@dataclass(frozen=True, slots=True)
class DecodeStep:
    """What a step took, on average over a generation."""

    seconds: float
    scheduler_s: float
    """Of these: choosing, allocating, committing."""


def decode_step(engine: Engine, prompt: list[int], count: int, *, num_tokens: int) -> DecodeStep:
    """Decode `count` children of one prompt, which is computed before, by `num_tokens` tokens."""
    with engine.branch(prompt) as root:
        root.next_token_logprobs(top=1)
        before = engine.stats()
        started = time.perf_counter()
        kids = root.expand(count, greedy(num_tokens))
        seconds = time.perf_counter() - started
        after = engine.stats()
        for kid in kids:
            kid.release()
    steps = after.steps - before.steps
    return DecodeStep(seconds / steps, (after.scheduler_s - before.scheduler_s) / steps)


def greedy(max_tokens: int) -> SamplingParams:
    """Return parameters for so many tokens, whatever they are."""
    return SamplingParams(max_tokens=max_tokens, temperature=0, ignore_eos=True)


def random_ids(engine: Engine, draw: random.Random, length: int) -> list[int]:
    """Return a prompt that nobody has sent before, in all likelihood."""
    return [draw.randrange(engine.tokenizer.vocab_size) for _ in range(length)]


def limits_with_progress(model: ModelConfig, sizes: LimitSizes, console: Console) -> list[Limit]:
    """Measure the machine's limits, with a progress bar."""
    with Progress(console=console, transient=True) as progress:
        task = progress.add_task("Measuring the machine", total=num_limits())
        return measure_limits(model, sizes, advance=lambda: progress.advance(task))


def verdict(aim: str, *, met: bool | None) -> str:
    """Return an aim for a cell of a table, with a mark that says whether it was reached."""
    return f"{aim} {'[green]ok' if met else '[red]missed'}"


def write_json(path: Path | None, results: object) -> None:
    """Write results to a file, when one was asked for."""
    if path is not None:
        path.write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")
