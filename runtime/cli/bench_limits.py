"""`phloem bench limits`: what this machine can do at best, and what an engine's steps need of it at least."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict

from rich.console import Console
from rich.table import Table

from phloem.runtime.cli.bench_common import Outputs, limits_with_progress
from phloem.runtime.cli.floors import FloorModel
from phloem.runtime.cli.machine_limits import Limit, LimitSizes, floor_model
from phloem.runtime.cli.plots import Bars
from phloem.runtime.config import EngineConfig
from phloem.runtime.models.config import read_model_config
from phloem.runtime.models.resolve import resolve_model

NAMES = {
    "read": "memory read",
    "bfloat16": "matrix products, bfloat16",
    "float32": "matrix products, float32",
}
PREFILL_LEN, SHARED_LEN, SHARED_ROWS = 2048, 512, 16


def run_bench_limits(
    model: str, console: Console, outputs: Outputs, *, sizes: LimitSizes | None = None
) -> None:
    """Measure and print.

    Raises:
        ModelError: There is no such model.
    """
    config = read_model_config(resolve_model(model).path)
    limits = limits_with_progress(config, sizes or LimitSizes(), console)
    floors = floor_model(config, EngineConfig(device="cpu"), limits)
    console.print(limits_table(limits))
    console.print(_floors_table(floors))
    results = {"limits": [asdict(limit) for limit in limits], "floors": floors_of(floors)}
    outputs.write("What this machine can do", results, charts_of(limits))


def limits_table(limits: Sequence[Limit]) -> Table:
    """Return the rates as a table, a column for each number of threads."""
    table = Table(title="What this machine was measured to do at best", title_justify="left")
    table.add_column("what")
    threads = sorted({limit.num_threads for limit in limits})
    for count in threads:
        table.add_column(f"{count} thread{'s' if count > 1 else ''}", justify="right", no_wrap=True)
    for what, name in NAMES.items():
        rates = {limit.num_threads: limit.per_s for limit in limits if limit.what == what}
        unit = "GB/s" if what == "read" else "GFLOP/s"
        table.add_row(name, *(f"{rates[count] / 1e9:,.1f} {unit}" for count in threads))
    return table


def floors_of(floors: FloorModel) -> dict[str, float]:
    """Return seconds that steps of common sizes take at least."""
    return {
        "decode_1_s": floors.decode_step_s(rows=1, kv_tokens=1),
        "decode_16_s": floors.decode_step_s(rows=SHARED_ROWS, kv_tokens=SHARED_LEN),
        "prefill_s": floors.prefill_s(PREFILL_LEN),
    }


def charts_of(limits: Sequence[Limit]) -> list[Bars]:
    """Return the rates as charts."""
    threads = sorted({limit.num_threads for limit in limits})

    def bars(title: str, unit: str, names: list[str]) -> Bars:
        rates = {(limit.what, limit.num_threads): limit.per_s / 1e9 for limit in limits}
        series = {f"{count} threads": [rates[name, count] for name in names] for count in threads}
        return Bars(title, unit, [NAMES[name] for name in names], series)

    return [
        bars("Reading", "GB/s", ["read"]),
        bars("Multiplying", "GFLOP/s", ["bfloat16", "float32"]),
    ]


def _floors_table(floors: FloorModel) -> Table:
    seconds = floors_of(floors)
    dtype = str(floors.dtype).removeprefix("torch.")
    table = Table(title=f"So a model of this shape in {dtype} takes at least", title_justify="left")
    table.add_column("what")
    table.add_column("time", justify="right", no_wrap=True)
    for what, name in (
        ("a decode step, batch 1", "decode_1_s"),
        (f"a decode step, batch {SHARED_ROWS} over a shared prompt of {SHARED_LEN} tokens", "decode_16_s"),
        (f"a prefill of {PREFILL_LEN:,} tokens", "prefill_s"),
    ):
        table.add_row(what, f"{seconds[name] * 1e3:,.1f} ms")
    return table
