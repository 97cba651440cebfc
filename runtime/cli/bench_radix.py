"""`phloem bench radix`: the tree alone, beside a memory compare and the plain alternatives."""

from __future__ import annotations

import json
from pathlib import Path

from rich.console import Console
from rich.table import Table

from phloem.radix.bench import Row, as_json, run


def run_bench_radix(console: Console, *, quick: bool, json_path: Path | None) -> None:
    """Measure and print."""
    with console.status("Measuring") as status:
        rows = run(quick=quick, progress=lambda message: status.update(f"Measuring: {message}"))
    console.print(_table(rows))
    if json_path is not None:
        json_path.write_text(json.dumps(as_json(rows), indent=2) + "\n", encoding="utf-8")


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
        aim = "" if row.target is None else f"{row.target:,.1f} {'[green]ok' if row.met else '[red]missed'}"
        table.add_row(f"  {row.name}", f"{row.value:,.1f} {row.unit}", aim, row.note)
    return table
