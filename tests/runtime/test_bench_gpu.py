"""`phloem bench gpu`: its arithmetic by hand, its measurements over the emulated GPU, and what it says without one."""

import dataclasses
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from emulated_gpu import emulated_gpu, emulated_placement
from flashinfer_emulator import Emulation
from rich.console import Console
from tiny_model import make_tiny_model
from typer.testing import CliRunner

from phloem.kernels.flashinfer_library import why_unavailable
from phloem.runtime import EngineConfig
from phloem.runtime.cli.bench_gpu import table_of
from phloem.runtime.cli.floors import decode_step_bytes, kv_bytes_per_token, prefill_flops
from phloem.runtime.cli.gpu_measures import Measure, Rig, Sizes, measure_all, measure_card
from phloem.runtime.cli.main import app
from phloem.runtime.cli.random_model import llama_1b
from phloem.runtime.models.config import read_model_config

LAYER = 2048 * 2048 * 2 + 2048 * 512 * 2 + 3 * 2048 * 8192
"""Values of the matrices in one of Llama 1B's 16 layers: q and o, k and v, the three of the MLP."""
HEAD = 128256 * 2048


def test_a_decode_step_reads_the_weights_once_and_each_rows_kv() -> None:
    model, bf16 = llama_1b(), torch.bfloat16
    assert kv_bytes_per_token(model, bf16, num_layers=16) == 16 * 2 * 8 * 64 * 2 == 32768
    found = decode_step_bytes(model, bf16, bf16, num_rows=64, context=1000.5)
    assert found == 2 * (16 * LAYER + HEAD) + 64 * 1000.5 * 32768
    untied = dataclasses.replace(model, tie_word_embeddings=False)
    assert decode_step_bytes(untied, bf16, bf16, num_rows=64, context=1000.5) == found
    assert decode_step_bytes(model, bf16, torch.float8_e4m3fn, num_rows=1, context=1) == (
        2 * (16 * LAYER + HEAD) + 16384
    )


def test_a_prefill_multiplies_each_token_with_the_layers_and_with_the_tokens_before() -> None:
    attention = 16 * 4 * 32 * 64 * (100 * 100 // 2)
    assert prefill_flops(llama_1b(), 100) == 2 * 100 * 16 * LAYER + attention + 2 * HEAD


def test_sizes_fit_the_context_of_the_model() -> None:
    sizes = Sizes().fitted(2048)
    assert (sizes.prefix, sizes.decode_prompt) == (1918, 1024)
    assert sizes.prefix + 1 + sizes.new_tokens + 1 <= 2048
    assert Sizes().fitted(131072) == Sizes()


def seconds(run: Callable[[], object]) -> float:
    started = time.perf_counter()
    run()
    return time.perf_counter() - started


def test_all_is_measured_on_an_engine_as_it_is_on_a_gpu(tmp_path: Path) -> None:
    path = make_tiny_model(tmp_path, hidden=192, num_q_heads=6, num_kv_heads=2, head_dim=64)
    emulation = Emulation()
    rig = Rig(
        read_model_config(path),
        emulated_placement(EngineConfig()),
        emulation.library(),
        partial(emulated_gpu, path),
        seconds,
        Sizes(rows=9, attention_context=40, decode_prompt=20, prefix=260, new_tokens=4, copy_bytes=1 << 16, matrix=64),
    )  # fmt: skip
    card = measure_card(rig)
    assert min(card.bytes_per_s, card.flops_per_s) > 0
    measures = list(measure_all(rig, card))
    assert [each.name.split(":")[0] for each in measures] == [
        "attention of a layer", "attention of a layer", "decode step", "prefill of 260 tokens", "decode step",
    ]  # fmt: skip
    assert [each.aim for each in measures] == [0.7, None, 0.6, None, 3.0]
    assert all(each.ratio == each.other_s / each.seconds for each in measures)
    assert emulation.runs.count("merge") == 1, "one of the attentions alone is a cascade"
    console = Console(width=160, record=True)
    console.print(table_of("emulated", card, measures))
    text = console.export_text()
    assert all(each.name in text for each in measures)


@pytest.mark.parametrize(("ratio", "aim", "met"), [(0.71, 0.7, True), (0.69, 0.7, False), (0.5, None, None)])
def test_an_aim_is_met_or_not(ratio: float, aim: float | None, met: bool | None) -> None:
    assert Measure("x", 1.0, "y", ratio, ratio, aim).met is met


@pytest.mark.skipif(why_unavailable() is None, reason="there is a GPU here")
def test_without_a_gpu_it_says_why_with_exit_code_2() -> None:
    result = CliRunner().invoke(app, ["bench", "gpu"])
    assert result.exit_code == 2
    output = " ".join(result.output.split())
    assert str(why_unavailable()) in output
    assert "phloem doctor" in output
