"""`phloem bench limits`, the floors that follow from it, and the files that all benchmarks write."""

import json
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from rich.console import Console

from phloem.runtime import EngineConfig, InvalidRequest
from phloem.runtime.cli import plots
from phloem.runtime.cli.bench_common import Outputs
from phloem.runtime.cli.bench_limits import run_bench_limits
from phloem.runtime.cli.floors import DecodeStage, FloorModel, Rates, linear_shapes, prefill_flops
from phloem.runtime.cli.machine_limits import Limit, LimitSizes, best, floor_model, num_limits
from phloem.runtime.cli.plots import Bars, write_plot
from phloem.runtime.cli.profiles import chrome_trace
from phloem.runtime.cli.random_model import llama_1b
from phloem.runtime.models.config import read_model_config

TINY = LimitSizes(read_bytes=1 << 16, rows=(4,), repeats=2)
CHARTS = [
    Bars("first", "ms", ["a", "b"], {"one": [1.0, None], "two": [2.0, 3.0]}),
    Bars("second", "µs", ["c"], {"one": [5.0]}, is_log=True),
]
needs_matplotlib = pytest.mark.skipif(find_spec("matplotlib") is None, reason="the extra `bench` is not here")


@needs_matplotlib
def test_it_measures_writes_json_and_draws(tiny_path: Path, tmp_path: Path) -> None:
    console = Console(record=True, width=120)
    outputs = Outputs(tmp_path / "limits.json", tmp_path / "limits.html")
    run_bench_limits(str(tiny_path), console, outputs, sizes=TINY)
    text = console.export_text()
    assert "memory read" in text
    assert "a decode step, batch 16" in text
    found = json.loads((tmp_path / "limits.json").read_text())
    assert len(found["limits"]) == num_limits()
    assert {limit["what"] for limit in found["limits"]} == {"read", "bfloat16", "float32"}
    assert all(limit["per_s"] > 0 for limit in found["limits"])
    assert found["floors"]["prefill_s"] > found["floors"]["decode_1_s"] > 0
    assert "Multiplying" in (tmp_path / "limits.html").read_text()


def test_threads_are_as_before(tiny_path: Path) -> None:
    before = torch.get_num_threads()
    run_bench_limits(str(tiny_path), Console(quiet=True), Outputs(), sizes=TINY)
    assert torch.get_num_threads() == before


def test_the_floor_of_a_step_is_its_reads_or_its_products() -> None:
    model, bf16 = llama_1b(), torch.bfloat16
    weights = sum(16 * a * b for a, b in linear_shapes(model)) + 128256 * 2048
    slow_memory = FloorModel(model, bf16, bf16, Rates(1e9, 1e30))
    assert slow_memory.decode_step_s(rows=9, kv_tokens=100) == (2 * weights + 100 * 32768) / 1e9
    slow_products = FloorModel(model, bf16, bf16, Rates(1e30, 1e9))
    assert slow_products.decode_step_s(rows=9, kv_tokens=100) == 2 * 9 * weights / 1e9


def test_what_is_cached_of_a_prompt_takes_no_time_and_the_parts_add_up() -> None:
    model = llama_1b()
    head = 2 * model.vocab_size * model.hidden_size
    assert prefill_flops(model, 100) + prefill_flops(model, 300, cached=100) - head == prefill_flops(
        model, 300
    )
    floors = FloorModel(model, torch.bfloat16, torch.bfloat16, Rates(1e9, 1e9))
    stages = [DecodeStage(3, 4, 100.0), DecodeStage(2, 1, 10.0)]
    assert floors.total_s([(300, 100), (50, 0)], stages) == pytest.approx(
        floors.prefill_s(300, cached=100)
        + floors.prefill_s(50)
        + 3 * floors.decode_step_s(rows=4, kv_tokens=100)
        + 2 * floors.decode_step_s(rows=1, kv_tokens=10)
    )


def test_the_highest_rate_of_the_engines_dtype_counts(tiny_path: Path) -> None:
    limits = [
        Limit("read", 1, 10.0),
        Limit("read", 2, 18.0),
        Limit("float32", 1, 130.0),
        Limit("float32", 2, 120.0),
    ]
    assert best(limits, "read") == 18.0
    floors = floor_model(read_model_config(tiny_path), EngineConfig(dtype="float32", device="cpu"), limits)
    assert floors.rates == Rates(18.0, 130.0)
    assert (floors.dtype, floors.kv_dtype) == (torch.float32, torch.float32)


@needs_matplotlib
def test_plots_are_png_or_a_page_of_their_own(tmp_path: Path) -> None:
    write_plot(tmp_path / "plot.png", "Both", CHARTS)
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")
    write_plot(tmp_path / "plot.html", "A < B", CHARTS)
    page = (tmp_path / "plot.html").read_text()
    assert page.startswith("<!doctype html>")
    assert "A &lt; B" in page
    assert page.count("<svg") == 1
    assert "<script" not in page


def test_another_kind_of_plot_is_refused_before_measuring(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match=r"\.png or \.html, not plot\.pdf"):
        Outputs(plot_path=tmp_path / "plot.pdf")


def test_without_matplotlib_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plots, "find_spec", lambda name: None)
    with pytest.raises(InvalidRequest, match=r"phloem\[bench\]"):
        Outputs(plot_path=tmp_path / "plot.png")


def test_a_profile_shows_what_other_threads_computed(tmp_path: Path, tiny_engine) -> None:
    with chrome_trace(tmp_path / "trace.json"):
        tiny_engine.generate("Hello there")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert any(event.get("name", "").startswith("aten::embedding") for event in events)
