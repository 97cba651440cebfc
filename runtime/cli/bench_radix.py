"""`phloem bench radix`: the tree alone, beside a memory compare and the plain alternatives."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from phloem.radix.bench import OTHERS, Row, as_json, run
from phloem.runtime.cli.bench_common import Outputs, verdict
from phloem.runtime.cli.plots import Bars


def run_bench_radix(console: Console, outputs: Outputs, *, quick: bool) -> None:
    """Measure and print."""
    with console.status("Measuring") as status:
        rows = run(quick=quick, progress=lambda message: status.update(f"Measuring: {message}"))
    console.print(table_of(rows))
    outputs.write("The prefix cache", as_json(rows), charts_of(rows))


def table_of(rows: Sequence[Row]) -> Table:
    """Return the results as a table, under a line for each group."""
    table = Table(title="The prefix cache: medians", title_justify="left")
    table.add_column("what")
    table.add_column("measured", justify="right", no_wrap=True)
    table.add_column("aim", justify="right", no_wrap=True)
    table.add_column("note", min_width=14)
    group = None
    for row in rows:
        if row.group != group:
            group = row.group
            table.add_row(f"[bold]{group}[/]")
        aim = "" if row.target is None else verdict(f"{row.target:,.1f}", met=row.met)
        table.add_row(f"  {row.name}", f"{row.value:,.1f} {row.unit}", aim, row.note)
    return table


def charts_of(rows: Sequence[Row]) -> list[Bars]:
    """Return the tree beside the plain alternatives as a chart."""
    beside = [row for row in rows if row.group.endswith(OTHERS) and row.unit == "µs"]
    title = "Match: this tree and the plain alternatives"
    return [
        Bars(title, "µs", [row.name for row in beside], {"time": [row.value for row in beside]}, is_log=True)
    ]
