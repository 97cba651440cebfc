"""`phloem bench radix`: the tree alone, beside a memory compare and the plain alternatives."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console
from rich.table import Table

from phloem.radix.bench import Row, as_json, run
from phloem.runtime.cli.bench_common import verdict, write_json


def run_bench_radix(console: Console, *, quick: bool, json_path: Path | None) -> None:
    """Measure and print."""
    with console.status("Measuring") as status:
        rows = run(quick=quick, progress=lambda message: status.update(f"Measuring: {message}"))
    console.print(_table(rows))
    write_json(json_path, as_json(rows))


def _table(rows: list[Row]) -> Table:
    table = Table(title="The prefix cache: medians", title_justify="left")
    table.add_column("what", no_wrap=True)
    table.add_column("measured", justify="right", no_wrap=True)
    table.add_column("aim", justify="right", no_wrap=True)
    table.add_column("note")
    group = None
    for row in rows:
        if row.group != group:
            group = row.group
            table.add_row(f"[bold]{group}[/]")
        aim = "" if row.target is None else verdict(f"{row.target:,.1f}", met=row.met)
        table.add_row(f"  {row.name}", f"{row.value:,.1f} {row.unit}", aim, row.note)
    return table
