"""All layers in one compiled call: the bits that the operations give one by one, at any number of threads."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from path_runner import PathRunner
from tiny_model import ARCHITECTURES, make_tiny_model

from phloem.kernels.attention import AttentionBackend
from phloem.kernels.cpu import make_cpu_linear
from phloem.kernels.plan import AttentionPlan, PlanRow
from phloem.runtime.models.loading import load_model

VARIANTS: dict[str, dict[str, Any]] = {
    **{name: {"architecture": name} for name in ARCHITECTURES},
    "one kv head": {"num_kv_heads": 1},
    "wide heads": {"head_dim": 40},
    "biases everywhere": {"config_overrides": {"attention_bias": True}},
    "windows in upper layers": {
        "architecture": "qwen2",
        "config_overrides": {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 1},
    },
}
DTYPES = [torch.float32, torch.bfloat16]

pytestmark = pytest.mark.skipif(make_cpu_linear() is None, reason="nothing is compiled here")


class OneByOne:
    """A backend that the compiled decoder does not know, so that the decoder calls it layer by layer."""

    def __init__(self, backend: AttentionBackend) -> None:
        self.plan, self.append, self.attend = backend.plan, backend.append, backend.attend


@pytest.fixture(params=[1, 2, 3])
def num_threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@pytest.fixture(params=DTYPES, ids=["fp32", "bf16"])
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    chosen: torch.dtype = request.param
    return chosen


def logits_of_some_steps(runner: PathRunner) -> list[torch.Tensor]:
    """A prefill, a step of both, and decode steps."""
    draw = random.Random(5)
    steps = [{0: 70}, {0: 1, 1: 33, 2: 5}, {0: 1, 1: 1, 2: 1}, {2: 1}]
    results = []
    for step in steps:
        chunks = {path: draw.choices(range(256), k=count) for path, count in step.items()}
        results += runner.step(chunks).values()
    return results


@pytest.mark.usefixtures("num_threads")
@pytest.mark.parametrize("variant", VARIANTS)
def test_one_call_gives_the_bits_of_many(variant: str, dtype: torch.dtype, tmp_path: Path) -> None:
    loaded = load_model(make_tiny_model(tmp_path, **VARIANTS[variant]), dtype=dtype)
    whole, parts = PathRunner(loaded), PathRunner(loaded)
    parts.attention = OneByOne(parts.attention)
    for given, wanted in zip(logits_of_some_steps(whole), logits_of_some_steps(parts), strict=True):
        assert torch.equal(given, wanted)


def test_the_kv_written_is_the_same(dtype: torch.dtype, tmp_path: Path) -> None:
    loaded = load_model(make_tiny_model(tmp_path, architecture="qwen3"), dtype=dtype)
    whole, parts = PathRunner(loaded), PathRunner(loaded)
    stores = [runner.attention.store for runner in (whole, parts)]
    parts.attention = OneByOne(parts.attention)
    for runner in (whole, parts):
        logits_of_some_steps(runner)
    written, wanted = (store.data.nan_to_num(nan=7.0) for store in stores)
    assert torch.equal(written, wanted)
    assert (written != 7.0).any()


def test_kv_of_another_type_runs_layer_by_layer(tmp_path: Path) -> None:
    loaded = load_model(make_tiny_model(tmp_path), dtype=torch.float32)
    runner = PathRunner(loaded)
    alone = runner.run(0, list(range(40)))
    mixed = PathRunner(loaded, kv_dtype=torch.bfloat16)
    assert (mixed.run(0, list(range(40))) - alone).norm() < 0.02 * alone.norm()


def test_a_step_without_tokens_gives_no_rows(dtype: torch.dtype, tmp_path: Path) -> None:
    loaded = load_model(make_tiny_model(tmp_path), dtype=dtype)
    nothing = torch.empty(0, dtype=torch.int64)
    attention = PathRunner(loaded).attention
    attention.plan(AttentionPlan.from_rows([], block_size=16))
    assert loaded.decoder.forward(nothing, nothing, attention).shape == (0, loaded.config.hidden_size)


def test_what_does_not_fit_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    loaded = load_model(make_tiny_model(tmp_path), dtype=torch.float32)
    runner = PathRunner(loaded)
    token_ids = torch.arange(3)
    runner.attention.plan(AttentionPlan.from_rows([PlanRow([5], 0, 3)], block_size=16))
    with pytest.raises(ValueError, match="hidden has 2 rows; the plan has 3 tokens"):
        loaded.decoder.forward(token_ids[:2], token_ids[:2], runner.attention)
    with pytest.raises(IndexError, match="position 1000000 is beyond the rotary table's"):
        loaded.decoder.forward(token_ids, torch.tensor([0, 1, 1_000_000]), runner.attention)
    assert runner.attention.store.data.isnan().all()


def test_the_environment_switches_it_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = make_tiny_model(tmp_path)
    monkeypatch.setenv("PHLOEM_CPU_KERNEL", "torch")
    by_torch = PathRunner(load_model(path, dtype=torch.float32)).run(0, list(range(50)))
    monkeypatch.setitem(os.environ, "PHLOEM_CPU_KERNEL", "native")
    compiled = PathRunner(load_model(path, dtype=torch.float32)).run(0, list(range(50)))
    assert (by_torch - compiled).abs().max() < 1e-4
