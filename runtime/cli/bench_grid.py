"""`phloem bench grid`: what a cached prefix saves, by prefix, output and interference; and three prompts that must not hit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from functools import partial

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
    console.print(table_of(cells, floors))
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


def table_of(cells: Sequence[Cell], floors: FloorModel) -> Table:
    """Return the cells as a table; times are median / p95 / p99."""
    table = Table(
        title=f"{cells[0].samples} samples each; ms as median / p95 / p99; counters over all samples",
        title_justify="left",
    )
    for heading in (
        "prefix", "out", "others", "cache", "cached", "first token", "next token", "total", "computed", "evicted", "of the limit",
    ):  # fmt: skip
        table.add_column(heading, justify="right")
    for cell in cells:
        table.add_row(
            f"{cell.prefix:,}",
            str(cell.output),
            cell.interference,
            "on" if cell.cache else "off",
            f"{cell.cached_tokens:,}",
            _cell(cell.first_token),
            "" if cell.next_token is None else _cell(cell.next_token),
            _cell(cell.total),
            f"{cell.counters['computed_tokens']:,}",
            f"{cell.counters['evictions']:,}",
            f"{limit_share(cell, floors):.0%}",
            end_section=not cell.cache and cell.output == max(each.output for each in cells),
        )
    return table


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


def _cell(spread: Spread) -> str:
    return " / ".join(f"{value * 1e3:,.1f}" for value in (spread.median_s, spread.p95_s, spread.p99_s))


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
