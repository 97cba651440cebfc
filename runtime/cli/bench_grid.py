"""`phloem bench grid`: what a cached prefix saves, by prefix, output and interference; and three prompts that must not hit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from functools import partial

from rich import box
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from phloem.runtime import Engine, EngineConfig
from phloem.runtime.cli.bench_common import Outputs, limits_with_progress
from phloem.runtime.cli.bench_limits import limits_table
from phloem.runtime.cli.floors import FloorModel
from phloem.runtime.cli.grid_measures import Cell, CounterExample, Grid, GridSizes, Spread
from phloem.runtime.cli.machine_limits import LimitSizes, floor_model
from phloem.runtime.cli.plots import Bars
from phloem.runtime.cli.profiles import chrome_trace
from phloem.runtime.models.config import read_model_config
from phloem.runtime.models.resolve import resolve_model


def run_bench_grid(
    model: str, console: Console, outputs: Outputs, *, sizes: GridSizes, limit_sizes: LimitSizes | None = None
) -> bool:
    """Measure and print. A profile is of the counter-examples, whose times do not count.

    Returns:
        Whether all counter-examples hold.

    Raises:
        ModelError: The model can't be loaded.
    """
    directory = resolve_model(model).path
    config = read_model_config(directory)
    limits = limits_with_progress(config, limit_sizes or LimitSizes(), console)
    floors = floor_model(config, EngineConfig(), limits)
    grid = Grid(partial(Engine, directory), sizes)
    cells: list[Cell] = []
    with Progress(console=console, transient=True) as progress:
        task = progress.add_task("Measuring", total=sizes.num_cells)
        for pair in grid.cells():
            cells += pair
            progress.advance(task, len(pair))
        with chrome_trace(outputs.profile_path):
            examples = grid.counter_examples()
    console.print(limits_table(limits))
    for table in tables_of(cells, floors):
        console.print(table)
    console.print(_examples_table(examples))
    results = {
        "limits": [asdict(limit) for limit in limits],
        "cells": [{**asdict(cell), "limit_share": limit_share(cell, floors)} for cell in cells],
        "counter_examples": [{**asdict(example), "holds": example.holds} for example in examples],
    }
    outputs.write("The cache experiment", results, charts_of(cells))
    return all(example.holds for example in examples)


def limit_share(cell: Cell, floors: FloorModel) -> float:
    """Return the least that the machine takes for a sample, by the median time."""
    context = cell.prompt_tokens + cell.output / 2
    decode_s = (cell.output - 1) * floors.decode_step_s(rows=1, kv_tokens=context)
    prefill_s = floors.prefill_s(cell.prompt_tokens, cached=cell.cached_tokens)
    return (prefill_s + decode_s) / cell.total.median_s


def tables_of(cells: Sequence[Cell], floors: FloorModel) -> list[Table]:
    """Return the cells' times, and what was counted, as tables."""
    samples = cells[0].samples
    times = _table(f"{samples} samples each: ms, median/p95/p99", "first token", "next token", "total")
    counts = _table(f"{samples} samples together", "cached", "computed", "evicted", "of the limit")
    for cell in cells:
        place = [f"{cell.prefix:,}", str(cell.output), cell.interference, "on" if cell.cache else "off"]
        gaps = "" if cell.next_token is None else _cell(cell.next_token)
        times.add_row(*place, _cell(cell.first_token), gaps, _cell(cell.total))
        numbers = [f"{cell.counters[name]:,}" for name in ("cached_tokens", "computed_tokens", "evictions")]
        counts.add_row(*place, *numbers, f"{limit_share(cell, floors):.0%}")
    return [times, counts]


def charts_of(cells: Sequence[Cell]) -> list[Bars]:
    """Return the medians of first tokens and of totals as charts."""
    places = list(dict.fromkeys((cell.prefix, cell.output) for cell in cells))
    groups = [f"{prefix:,} in, {output} out" for prefix, output in places]

    def bars(title: str, of: str) -> Bars:
        series: dict[str, list[float | None]] = {}
        for cell in cells:
            name = f"cache {'on' if cell.cache else 'off'}, others: {cell.interference}"
            values = series.setdefault(name, [None] * len(places))
            values[places.index((cell.prefix, cell.output))] = getattr(cell, of).median_s * 1e3
        return Bars(title, "ms", groups, series, is_log=True)

    return [bars("First token", "first_token"), bars("Whole answer", "total")]


def _table(title: str, *headings: str) -> Table:
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for heading in ("prefix", "out", "others", "cache", *headings):
        table.add_column(heading, justify="right", no_wrap=True)
    return table


def _cell(spread: Spread) -> str:
    times = [value * 1e3 for value in (spread.median_s, spread.p95_s, spread.p99_s)]
    return "/".join(f"{time:.0f}" if time >= 100 else f"{time:.3g}" for time in times)


def _examples_table(examples: Sequence[CounterExample]) -> Table:
    table = Table(title="Prompts that must not hit", title_justify="left")
    for heading in ("what", "the same prompt again hits", "this one hits", "because", ""):
        table.add_column(heading, justify="right" if "hits" in heading else "left")
    for example in examples:
        table.add_row(
            example.name,
            f"{example.control_tokens:,}",
            f"{example.cached_tokens:,}",
            example.reason,
            "[green]ok" if example.holds else "[red]wrong",
        )
    return table
