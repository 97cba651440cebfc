"""`phloem bench report`: the limits, decode steps, workloads and the tree in one go, as Markdown for BENCHMARKS.md."""

from __future__ import annotations

import io
import os
import platform
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import psutil
import torch
from rich import box
from rich.console import Console
from rich.table import Table

from phloem.radix.bench import as_json
from phloem.radix.bench import run as run_radix
from phloem.runtime.cli import bench_decode, bench_radix, bench_workloads
from phloem.runtime.cli.bench_common import Outputs
from phloem.runtime.cli.bench_decode import DecodeSizes, measure_decode
from phloem.runtime.cli.bench_limits import limits_table
from phloem.runtime.cli.bench_workloads import WORKLOADS, Servers, measure_workloads
from phloem.runtime.cli.doctor_facts import processor_name
from phloem.runtime.cli.machine_limits import LimitSizes
from phloem.runtime.cli.plots import Bars
from phloem.runtime.cli.workloads.workload import Workload
from phloem.runtime.errors import InvalidRequest

BEGIN, END = "<!-- phloem bench report: begin -->", "<!-- phloem bench report: end -->"
"""Lines of a file between which a report goes."""


@dataclass(frozen=True, slots=True)
class ReportSizes:
    """How much is measured."""

    workloads: Sequence[Workload]
    decode: DecodeSizes
    limits: LimitSizes
    rounds: int
    quick_radix: bool = False


def report_sizes(rounds: int) -> ReportSizes:
    """Return the sizes that other engines were measured at."""
    return ReportSizes(tuple(WORKLOADS.values()), DecodeSizes(), LimitSizes(), rounds)


def run_bench_report(
    model: str, console: Console, outputs: Outputs, *, sizes: ReportSizes, servers: Servers, into: Path | None
) -> None:
    """Measure, print Markdown, and put it into a file between `BEGIN` and `END`.

    Raises:
        InvalidRequest: The file is not there or has no such lines, or a server can't be used.
        ModelError: The model can't be loaded.
    """
    if into is not None:
        _split(into)  # before minutes of measuring
    progress = Console(stderr=True)
    decode = measure_decode(
        model, progress, Outputs(), rounds=sizes.rounds, sizes=sizes.decode, limit_sizes=sizes.limits
    )
    found = measure_workloads(
        sizes.workloads, model, progress, rounds=sizes.rounds, servers=servers, in_process=True,
        limit_sizes=sizes.limits, outputs=Outputs(),
    )  # fmt: skip
    with progress.status("Measuring the tree"):
        radix = run_radix(quick=sizes.quick_radix)
    tables = [
        limits_table(found.limits),
        bench_decode.table_of(decode.rows, sizes.rounds),
        *bench_workloads.tables_of(found.results),
        bench_radix.table_of(radix),
    ]
    machine = machine_facts()
    text = "\n\n".join([_heading(model, machine), *map(markdown_of, tables)])
    console.print(text, markup=False, highlight=False, soft_wrap=True)
    if into is not None:
        before, after = _split(into)
        into.write_text(f"{before}{BEGIN}\n\n{text}\n\n{END}{after}", encoding="utf-8")
    results = {
        "machine": machine,
        "decode": decode.to_dict(),
        "workloads": found.to_dict(),
        "radix": as_json(radix),
    }
    charts: list[Bars] = [
        *bench_workloads.charts_of(found.results),
        *bench_decode.charts_of(decode.rows),
        *bench_radix.charts_of(radix),
    ]
    outputs.write("phloem beside the limits", results, charts)


def markdown_of(table: Table) -> str:
    """Return a table as Markdown, its title as a heading. It is not to be printed otherwise any more."""
    title, table.title, table.box = table.title, None, box.MARKDOWN
    table.show_edge = True
    text = io.StringIO()
    Console(file=text, width=1000, color_system=None, force_terminal=False).print(table)
    lines = [line.rstrip() for line in text.getvalue().splitlines() if line.strip()]
    return "\n".join([f"### {title}", "", *lines])


def machine_facts() -> dict[str, Any]:
    """Return what the numbers depend on."""
    return {
        "date": datetime.now(timezone.utc).date().isoformat(),
        "processor": processor_name(),
        "cores": psutil.cpu_count(logical=False) or os.cpu_count(),
        "memory_gib": round(psutil.virtual_memory().total / 2**30),
        "threads": torch.get_num_threads(),
        "load": round(psutil.getloadavg()[0], 1),
        "python": platform.python_version(),
        "torch": torch.__version__,
    }


def _heading(model: str, machine: dict[str, Any]) -> str:
    name = Path(model).name if Path(model).exists() else model
    return (
        f"{name} on {machine['processor']}, {machine['cores']} cores, {machine['memory_gib']} GiB, "
        f"torch {machine['torch']} with {machine['threads']} threads, Python {machine['python']}; {machine['date']}, "
        f"load {machine['load']} at the end. `phloem bench report` printed this."
    )


def _split(path: Path) -> tuple[str, str]:
    """Return what a file has before the report and after it.

    Raises:
        InvalidRequest: It is not there, or has no place for a report.
    """
    if not path.is_file():
        raise InvalidRequest(f"there is no file {path}", field="into")
    before, begin, rest = path.read_text(encoding="utf-8").partition(BEGIN)
    _, end, after = rest.partition(END)
    if not (begin and end):
        raise InvalidRequest(f"{path} needs the lines {BEGIN!r} and {END!r}, between which the report goes", field="into")  # fmt: skip
    return before, after
