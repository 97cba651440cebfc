"""`phloem bench grid`: what its cells hit and count, and that its counter-examples do not hit. No times."""

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

from phloem.runtime import Engine
from phloem.runtime.cli import bench_grid
from phloem.runtime.cli.bench_common import Outputs
from phloem.runtime.cli.bench_grid import run_bench_grid
from phloem.runtime.cli.grid_measures import CounterExample, Grid, GridSizes
from phloem.runtime.cli.machine_limits import LimitSizes
from phloem.runtime.cli.main import app

SIZES = GridSizes(prefixes=(32, 70), outputs=(1, 3), own=5, samples=2, warm_ups=1)
TINY_LIMITS = LimitSizes(read_bytes=1 << 16, rows=(4,), repeats=1)


@pytest.fixture(scope="module")
def found(tiny_path: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    path = tmp_path_factory.mktemp("grid") / "found.json"
    assert run_bench_grid(
        str(tiny_path), Console(quiet=True), Outputs(path), sizes=SIZES, limit_sizes=TINY_LIMITS
    )
    return json.loads(path.read_text())


def test_all_combinations_are_there(found: dict[str, Any]) -> None:
    cells = [(c["prefix"], c["output"], c["cache"], c["interference"]) for c in found["cells"]]
    assert sorted(cells) == sorted(
        (prefix, output, cache, interference)
        for prefix in (32, 70)
        for output in (1, 3)
        for cache in (True, False)
        for interference in ("none", "evicting")
    )
    assert len(cells) == SIZES.num_cells == 16
    assert {cell["samples"] for cell in found["cells"]} == {2}


def test_the_prefix_is_hit_unless_the_cache_is_off_or_others_evict_it(found: dict[str, Any]) -> None:
    for cell in found["cells"]:
        counters, hits = cell["counters"], cell["cache"] and cell["interference"] == "none"
        assert cell["cached_tokens"] == (cell["prefix"] if hits else 0), cell
        assert counters["hit_tokens"] == (2 * (cell["prefix"] - cell["prefix"] % 16) if hits else 0)
        # With a vocabulary of bytes, two samples may have the first of their own tokens in common.
        assert 0 <= counters["cached_tokens"] - 2 * cell["cached_tokens"] <= 2
        # The last token of an answer is never computed.
        missing = 2 * cell["prompt_tokens"] - counters["cached_tokens"]
        assert counters["computed_tokens"] == missing + 2 * (cell["output"] - 1)
        assert counters["generated_tokens"] == 2 * cell["output"]
        assert counters["queries"] == 2 or not cell["cache"]
        assert (counters["evictions"] > 0) == (cell["cache"] and cell["interference"] == "evicting")


def test_times_are_spreads(found: dict[str, Any]) -> None:
    for cell in found["cells"]:
        for name in ("first_token", "total"):
            assert 0 < cell[name]["median_s"] <= cell[name]["p95_s"] <= cell[name]["p99_s"]
        assert (cell["next_token"] is None) == (cell["output"] == 1)
        assert cell["limit_share"] > 0


def test_counter_examples_do_not_hit_where_the_same_prompt_does(found: dict[str, Any]) -> None:
    assert [
        (each["name"], each["control_tokens"], each["cached_tokens"]) for each in found["counter_examples"]
    ] == [
        ("the first token differs", 31, 0),
        ("another salt", 31, 0),
        ("evicted before", 31, 0),
    ]
    reasons = [each["reason"] for each in found["counter_examples"]]
    assert reasons == ["never seen", "never seen", "evicted"]


def test_a_counter_example_fails_when_it_hits_or_proves_nothing(tiny_path: Path) -> None:
    assert not CounterExample("x", 31, 1, "").holds
    assert not CounterExample("x", 0, 0, "").holds
    off = Grid(partial(Engine, tiny_path, prefix_cache=False), SIZES)
    assert not any(example.holds for example in off.counter_examples())


def test_a_hit_in_a_counter_example_is_exit_code_1(tiny_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Salted(Grid):
        def counter_examples(self) -> list[CounterExample]:
            return [CounterExample("another salt", 31, 31, "")]

    monkeypatch.setattr(bench_grid, "LimitSizes", lambda: TINY_LIMITS)
    command = [
        "bench",
        "grid",
        "--model",
        str(tiny_path),
        "--samples",
        "1",
        "--prefix",
        "16",
        "--output",
        "1",
    ]
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 0, result.output
    assert "another salt" in result.output
    monkeypatch.setattr(bench_grid, "Grid", Salted)
    assert CliRunner().invoke(app, command).exit_code == 1
