"""`phloem bench decode`: decode steps, first tokens and prefills beside what the machine's limits allow."""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.progress import Progress
from rich.table import Table

from phloem.runtime import Engine, EngineConfig, InvalidRequest
from phloem.runtime.cli.bench_common import (
    Outputs,
    decode_step,
    greedy,
    limits_with_progress,
    random_ids,
    verdict,
)
from phloem.runtime.cli.bench_limits import limits_table
from phloem.runtime.cli.floors import FloorModel
from phloem.runtime.cli.machine_limits import Limit, LimitSizes, floor_model
from phloem.runtime.cli.plots import Bars
from phloem.runtime.cli.profiles import chrome_trace

_BLOCK_SIZE = 16


@dataclass(frozen=True, slots=True)
class DecodeSizes:
    """How much is measured."""

    short: int = 64
    """Tokens of the prompt at batch 1, and of the shorter of two shared ones."""

    shared: int = 512
    """Of the prompt that a batch shares."""

    long: int = 2048
    """Of the longer shared prompt, of the cached one and of the one that is prefilled."""

    new: int = 16
    """Behind the cached prompt."""

    batch: int = 16
    wide: int = 64
    """Branches over the shorter and the longer prompt."""

    compared: int = 8
    """Batch at which deterministic mode is switched off."""

    output: int = 32
    """Tokens that each row decodes."""

    @property
    def num_blocks(self) -> int:
        """KV blocks for the largest of the measurements, and for what the others leave behind."""
        tokens = 3 * (self.long + self.new) + self.wide * (self.output + 2 * _BLOCK_SIZE)
        return -(-tokens // _BLOCK_SIZE)

    def fitted(self, context: int) -> DecodeSizes:
        """Return sizes for a model of this context."""
        room = context - self.new - self.output - 1
        return replace(
            self, short=min(self.short, room), shared=min(self.shared, room), long=min(self.long, room)
        )


DEFAULT_SIZES = DecodeSizes()


@dataclass(frozen=True, slots=True)
class DecodeRow:
    """A line of the table: medians over the rounds."""

    name: str
    seconds: float
    compared_to: str
    other_s: float
    ratio: float
    """Of the two, as the aim is meant: a share of the limit, or how many times as long."""

    aim: float
    is_share: bool
    """Whether the ratio should be the aim at least, as a share of the limit; else at most."""

    @property
    def met(self) -> bool:
        """Whether the aim was reached."""
        return self.ratio >= self.aim if self.is_share else self.ratio <= self.aim

    def to_dict(self) -> dict[str, Any]:
        """Return it as plain data."""
        return {**asdict(self), "met": self.met}


@dataclass(frozen=True, slots=True)
class DecodeResult:
    """What was measured, and the machine's limits in the same run."""

    limits: list[Limit]
    rows: list[DecodeRow]

    def to_dict(self) -> dict[str, Any]:
        """Return it as plain data."""
        return {
            "limits": [asdict(limit) for limit in self.limits],
            "rows": [row.to_dict() for row in self.rows],
        }


@dataclass(frozen=True, slots=True)
class _Times:
    """Of one round, in seconds."""

    alone: float
    shared: float
    wide_short: float
    wide_long: float
    first_token: float
    prefill: float
    exact: float
    """A step of the compared batch in deterministic mode."""

    inexact: float
    """And without it."""

    rounded: float | None
    """As `alone`, with weights in int8; None where they can't be had."""


def run_bench_decode(
    model: str, console: Console, outputs: Outputs, *, rounds: int, sizes: DecodeSizes | None = None,
    limit_sizes: LimitSizes | None = None,
) -> None:  # fmt: skip
    """Measure and print."""
    result = measure_decode(
        model, console, outputs, rounds=rounds, sizes=sizes or DEFAULT_SIZES, limit_sizes=limit_sizes or LimitSizes()
    )  # fmt: skip
    console.print(limits_table(result.limits))
    console.print(table_of(result.rows, rounds))
    outputs.write("Decode steps, first tokens and prefills", result.to_dict(), charts_of(result.rows))


def measure_decode(
    model: str, console: Console, outputs: Outputs, *, rounds: int, sizes: DecodeSizes, limit_sizes: LimitSizes
) -> DecodeResult:  # fmt: skip
    """Do as `run_bench_decode`, but return what was measured. Only a profile is written.

    Deterministic mode on and off alternate within each round, and so does which of them goes first.
    """
    with ExitStack() as stack:
        with console.status(f"Loading {escape(model)}: deterministic mode on, off; int8 weights"):
            exact, inexact = (
                stack.enter_context(Engine(model, deterministic=mode, num_blocks=sizes.num_blocks))
                for mode in (True, False)
            )
            rounded = _rounded_engine(model, stack, sizes)
        sizes = sizes.fitted(exact.max_model_len)
        limits = limits_with_progress(exact.model, limit_sizes, console)
        floors = floor_model(exact.model, EngineConfig(), limits)
        progress = stack.enter_context(Progress(console=console, transient=True))
        task = progress.add_task("Measuring", total=rounds + 1)
        draw = random.Random(0)
        # One round more: the first one warms up and is not counted.
        times = []
        for number in range(rounds + 1):
            times.append(_round(exact, inexact, rounded, sizes, draw, inexact_first=number % 2 == 1))
            progress.advance(task)
        if outputs.profile_path is not None:
            with chrome_trace(outputs.profile_path):
                _round(exact, inexact, rounded, sizes, draw, inexact_first=False)
    return DecodeResult(limits, _rows(times[1:], sizes, floors))


def table_of(rows: Sequence[DecodeRow], rounds: int) -> Table:
    """Return the results as a table."""
    table = Table(title=f"Decode steps, first tokens and prefills: medians of {rounds} rounds", title_justify="left")  # fmt: skip
    for heading in ("what", "time", "beside", "time", "ratio", "aim"):
        table.add_column(heading, justify="left" if heading in ("what", "beside") else "right")
    for row in rows:
        table.add_row(*cells_of(row)[:-1], verdict(cells_of(row)[-1], met=row.met))
    return table


def cells_of(row: DecodeRow) -> list[str]:
    """Return what, time, beside what, its time, ratio and aim as text."""

    def form(ratio: float) -> str:
        return f"{ratio:.0%}" if row.is_share else f"{ratio:.2f}x"

    return [
        row.name,
        f"{row.seconds * 1e3:,.1f} ms",
        row.compared_to,
        f"{row.other_s * 1e3:,.1f} ms",
        form(row.ratio),
        f"{form(row.aim)} {'or more' if row.is_share else 'at most'}",
    ]


def charts_of(rows: Sequence[DecodeRow]) -> list[Bars]:
    """Return the times beside what they are compared to, as a chart."""
    series = {
        "measured": [row.seconds * 1e3 for row in rows],
        "compared to": [row.other_s * 1e3 for row in rows],
    }
    return [Bars("Steps", "ms", [row.name for row in rows], series, is_log=True)]


def _rounded_engine(model: str, stack: ExitStack, sizes: DecodeSizes) -> Engine | None:
    """An engine with int8 weights, where there is one."""
    try:
        return stack.enter_context(Engine(model, quantization="int8", num_blocks=sizes.num_blocks))
    except InvalidRequest:
        return None


def _round(
    exact: Engine, inexact: Engine, rounded: Engine | None, sizes: DecodeSizes, draw: random.Random,
    *, inexact_first: bool,
) -> _Times:  # fmt: skip
    def step(engine: Engine, count: int, length: int) -> float:
        prompt = random_ids(engine, draw, length)
        return decode_step(engine, prompt, count, num_tokens=sizes.output).seconds

    engines = [inexact, exact] if inexact_first else [exact, inexact]
    compared = {engine is exact: step(engine, sizes.compared, sizes.short) for engine in engines}
    prompt = random_ids(exact, draw, sizes.long)
    prefill = _first_token_s(exact, prompt)
    return _Times(
        alone=step(exact, 1, sizes.short),
        shared=step(exact, sizes.batch, sizes.shared),
        wide_short=step(exact, sizes.wide, sizes.short),
        wide_long=step(exact, sizes.wide, sizes.long),
        first_token=_first_token_s(exact, prompt + random_ids(exact, draw, sizes.new)),
        prefill=prefill,
        exact=compared[True],
        inexact=compared[False],
        rounded=None if rounded is None else step(rounded, 1, sizes.short),
    )


def _first_token_s(engine: Engine, prompt: list[int]) -> float:
    return engine.generate(prompt, greedy(1))[0].first_token_s


def _rows(times: Sequence[_Times], sizes: DecodeSizes, floors: FloorModel) -> list[DecodeRow]:
    half = sizes.output / 2
    alone = floors.decode_step_s(rows=1, kv_tokens=sizes.short + half)
    shared = floors.decode_step_s(rows=sizes.batch, kv_tokens=sizes.shared + sizes.batch * half)
    prefill = floors.prefill_s(sizes.long)

    def row(
        name: str, measured: Callable[[_Times], float], beside: str, other: Callable[[_Times], float], aim: float,
        *, is_share: bool = False,
    ) -> DecodeRow:  # fmt: skip
        pairs = [(measured(each), other(each)) for each in times]
        ratios = [b / a if is_share else a / b for a, b in pairs]
        seconds, other_s = (statistics.median(column) for column in zip(*pairs, strict=True))
        return DecodeRow(name, seconds, beside, other_s, statistics.median(ratios), aim, is_share)

    rounded = [each.rounded for each in times if each.rounded is not None]
    int8 = [
        row("decode step, batch 1, int8 weights", lambda t: t.rounded or 0, "as they are", lambda t: t.alone, 1.0)
    ] if len(rounded) == len(times) else []  # fmt: skip
    wide = f"decode step, {sizes.wide} branches over {sizes.long:,} shared tokens"
    return [
        row("decode step, batch 1", lambda t: t.alone, "memory reads", lambda t: alone, 0.75, is_share=True),
        row(f"decode step, batch {sizes.batch} over {sizes.shared} shared tokens",
            lambda t: t.shared, "the floor of one", lambda t: shared, 2.0),
        row(wide, lambda t: t.wide_long, f"over {sizes.short}", lambda t: t.wide_short, 1.5),
        row(f"first token of {sizes.long:,} cached and {sizes.new} new tokens",
            lambda t: t.first_token, "a decode step", lambda t: t.alone, 1.5),
        row(f"prefill of {sizes.long:,} tokens", lambda t: t.prefill, "matrix rate", lambda t: prefill, 0.6, is_share=True),
        row(f"decode step, batch {sizes.compared}, deterministic",
            lambda t: t.exact, "not deterministic", lambda t: t.inexact, 1.15),
        *int8,
    ]  # fmt: skip
