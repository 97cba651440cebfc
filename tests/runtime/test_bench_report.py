"""`phloem bench report`: Markdown in a file's place for it."""

import json
from pathlib import Path

import pytest
from rich.console import Console
from rich.table import Table
from typer.testing import CliRunner

from phloem.radix.bench import suite
from phloem.radix.bench.suite import _Sizes
from phloem.runtime import InvalidRequest
from phloem.runtime.cli import bench_report
from phloem.runtime.cli.bench_common import Outputs
from phloem.runtime.cli.bench_decode import DecodeSizes
from phloem.runtime.cli.bench_report import BEGIN, END, ReportSizes, markdown_of, run_bench_report
from phloem.runtime.cli.bench_workloads import Servers
from phloem.runtime.cli.machine_limits import LimitSizes
from phloem.runtime.cli.main import app
from phloem.runtime.cli.workloads.best_of import BestOf

SIZES = ReportSizes(
    workloads=[BestOf(samples=2, prompt_tokens=20, output_tokens=3)],
    decode=DecodeSizes(short=8, shared=20, long=40, new=5, batch=3, wide=4, compared=2, output=4),
    limits=LimitSizes(read_bytes=1 << 16, rows=(4,), repeats=1),
    rounds=1,
    quick_radix=True,
)


def test_a_report_takes_its_place_in_a_file(
    tiny_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        suite, "QUICK", _Sizes(long_tokens=2_048, long_nodes=8, small=50, large=200, samples=50)
    )
    monkeypatch.setattr(bench_report, "report_sizes", lambda rounds: SIZES)
    page, found = tmp_path / "BENCHMARKS.md", tmp_path / "found.json"
    page.write_text(f"# Before\n\n{BEGIN}\nold\n{END}\n\nAfter\n")
    result = CliRunner().invoke(
        app, ["bench", "report", "--model", str(tiny_path), "--into", str(page), "--json", str(found)]
    )
    assert result.exit_code == 0, result.output
    text = page.read_text()
    assert text.startswith(f"# Before\n\n{BEGIN}\n\ntiny on ")
    assert text.endswith(f"\n\n{END}\n\nAfter\n")
    assert "old" not in text
    for title in ("What this machine", "Decode steps", "best of 2: 20 in", "The prefix cache"):
        assert f"### {title}" in text
    assert str(tiny_path) not in text
    results = json.loads(found.read_text())
    assert set(results) == {"machine", "decode", "workloads", "radix"}
    assert results["machine"]["date"] in text


@pytest.mark.parametrize("content", [None, "no place\n", f"{BEGIN}\nno end\n"])
def test_a_file_without_a_place_is_refused_before_measuring(content: str | None, tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    if content is not None:
        page.write_text(content)
    with pytest.raises(InvalidRequest, match=r"page\.md"):
        run_bench_report("no such model", Console(), Outputs(), sizes=SIZES, servers=Servers(), into=page)


def test_a_table_becomes_markdown_with_its_title() -> None:
    table = Table(title="Numbers")
    table.add_column("what")
    table.add_column("time", justify="right")
    table.add_row("a step", "[green]2 ms")
    title, empty, *lines = markdown_of(table).splitlines()
    assert (title, empty) == ("### Numbers", "")
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    assert [cells[0], cells[2]] == [["what", "time"], ["a step", "2 ms"]]
    assert set("".join(cells[1])) <= {"-", ":"}
    assert len(cells) == 3
