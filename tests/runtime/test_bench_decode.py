"""`phloem bench decode`: its rows, by name, comparison and aim. Whether the aims are met is for quiet machines."""

import json
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

from phloem.kernels.cpu import make_cpu_linear
from phloem.runtime.cli import bench_decode
from phloem.runtime.cli.bench_common import Outputs
from phloem.runtime.cli.bench_decode import DecodeRow, DecodeSizes, run_bench_decode
from phloem.runtime.cli.machine_limits import LimitSizes
from phloem.runtime.cli.main import app

SIZES = DecodeSizes(short=8, shared=20, long=100, new=5, batch=3, wide=6, compared=2, output=4)
TINY_LIMITS = LimitSizes(read_bytes=1 << 16, rows=(4,), repeats=1)


def test_each_row_is_set_against_a_limit_or_another_row(tiny_path: Path, tmp_path: Path) -> None:
    path, trace = tmp_path / "found.json", tmp_path / "trace.json"
    run_bench_decode(
        str(tiny_path), Console(quiet=True), Outputs(path, profile_path=trace), rounds=2, sizes=SIZES,
        limit_sizes=TINY_LIMITS,
    )  # fmt: skip
    found = json.loads(path.read_text())
    assert [(row["name"], row["compared_to"], row["aim"], row["is_share"]) for row in found["rows"]] == [
        ("decode step, batch 1", "memory reads", 0.75, True),
        ("decode step, batch 3 over 20 shared tokens", "the floor of one", 2.0, False),
        ("decode step, 6 branches over 100 shared tokens", "over 8", 1.5, False),
        ("first token of 100 cached and 5 new tokens", "a decode step", 1.5, False),
        ("prefill of 100 tokens", "matrix rate", 0.6, True),
        ("decode step, batch 2, deterministic", "not deterministic", 1.15, False),
        *(
            []
            if make_cpu_linear() is None
            else [("decode step, batch 1, int8 weights", "as they are", 1.0, False)]
        ),
    ]
    for row in found["rows"]:
        assert min(row["seconds"], row["other_s"], row["ratio"]) > 0
    assert found["limits"]
    assert json.loads(trace.read_text())["traceEvents"]


@pytest.mark.parametrize(
    ("ratio", "is_share", "met"),
    [(0.76, True, True), (0.74, True, False), (0.7, False, True), (0.8, False, False)],
)
def test_a_share_is_to_be_large_and_a_multiple_small(ratio: float, is_share: bool, met: bool) -> None:
    assert DecodeRow("a", 1.0, "b", ratio, ratio, 0.75, is_share).met is met


def test_sizes_fit_the_context_of_the_model() -> None:
    fitted = DecodeSizes().fitted(1024)
    assert fitted.long + fitted.new + fitted.output < 1024
    assert (fitted.short, fitted.shared, fitted.batch, fitted.wide) == (64, 512, 16, 64)
    assert DecodeSizes().fitted(8192) == DecodeSizes()


def test_it_is_a_command(tiny_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_decode, "DEFAULT_SIZES", SIZES)
    monkeypatch.setattr(bench_decode, "LimitSizes", lambda: TINY_LIMITS)
    result = CliRunner().invoke(app, ["bench", "decode", "--model", str(tiny_path), "--rounds", "1"])
    assert result.exit_code == 0, result.output
    assert "prefill" in result.output
