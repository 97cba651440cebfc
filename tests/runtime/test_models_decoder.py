"""The decoder gives the numbers of transformers' own models, and the same bits in any company."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from path_runner import PathRunner
from tiny_model import ARCHITECTURES, make_tiny_model

from phloem.kernels.cpu import make_cpu_linear
from phloem.runtime.models.loading import LoadedModel, load_model, preferred_dtype

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
}

DYNAMIC_ROPE = {"rope_type": "dynamic", "factor": 2.0, "original_max_position_embeddings": 64}

VARIANTS: dict[str, dict[str, Any]] = {
    **{name: {"architecture": name} for name in ARCHITECTURES},
    "tied embeddings": {"tie_word_embeddings": True},
    "one kv head": {"num_kv_heads": 1},
    "as many kv heads as q heads": {"num_kv_heads": 4},
    "wide heads": {"head_dim": 40},
    "biases everywhere": {"config_overrides": {"attention_bias": True}},
    "windows in upper layers": {
        "architecture": "qwen2",
        "config_overrides": {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 1},
    },
    "old rope spelling": {
        "config_overrides": {"rope_theta": 500.0, "rope_scaling": {"type": "linear", "factor": 2.0}}
    },
    "llama3 rope": {"config_overrides": {"rope_parameters": LLAMA3_ROPE}},
    "yarn rope": {"config_overrides": {"rope_parameters": YARN_ROPE}},
    "dynamic rope": {"config_overrides": {"rope_scaling": DYNAMIC_ROPE}},
}


def random_ids(count: int, seed: int = 0) -> list[int]:
    return random.Random(seed).choices(range(256), k=count)


def reference_logits(path: Path, token_ids: list[int]) -> torch.Tensor:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager")
    with torch.inference_mode():
        logits: torch.Tensor = model(torch.tensor([token_ids])).logits[0]
    return logits


@pytest.fixture(params=[torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def loaded(request: pytest.FixtureRequest, tmp_path: Path) -> LoadedModel:
    path = make_tiny_model(tmp_path / "model", architecture="mistral", num_layers=2)
    return load_model(path, dtype=request.param)


@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_are_those_of_transformers(variant: str, tmp_path: Path) -> None:
    path = make_tiny_model(tmp_path, **VARIANTS[variant])
    token_ids = random_ids(90)
    logits = PathRunner(load_model(path, dtype=torch.float32)).run(0, token_ids, chunk_sizes=[50, 1, 1])
    difference = (logits - reference_logits(path, token_ids)).abs().max()
    assert logits.dtype == torch.float32
    assert difference < 1e-3


def test_the_reference_backend_agrees_with_transformers_too(tmp_path: Path) -> None:
    path = make_tiny_model(tmp_path, architecture="qwen3")
    token_ids = random_ids(40)
    logits = PathRunner(load_model(path, dtype=torch.float32), backend="reference").run(0, token_ids)
    assert (logits - reference_logits(path, token_ids)).abs().max() < 1e-3


def test_bfloat16_is_close_to_float32(tmp_path: Path) -> None:
    path = make_tiny_model(tmp_path, dtype=torch.bfloat16)
    token_ids = random_ids(60)
    logits = PathRunner(load_model(path, dtype=torch.bfloat16)).run(0, token_ids)
    reference = reference_logits(path, token_ids)
    assert torch.linalg.norm(logits - reference) < 0.05 * torch.linalg.norm(reference)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_greedy_decoding_gives_the_tokens_of_transformers(architecture: str, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    path = make_tiny_model(tmp_path, architecture=architecture)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    model.generation_config.eos_token_id = None
    prompt = random_ids(20)
    inputs = torch.tensor([prompt])
    mask = torch.ones_like(inputs)
    wanted = model.generate(inputs, attention_mask=mask, max_new_tokens=48, do_sample=False)[0, 20:].tolist()
    assert PathRunner(load_model(path, dtype=torch.float32)).greedy(0, prompt, 48) == wanted
    assert len(set(wanted)) > 10, "the model repeats itself: the test would see little"


@pytest.mark.parametrize("chunk_sizes", [[1] * 150, [7] * 20, [16] * 9, [33, 33, 64], [100, 1, 1, 1]])
def test_b31_chunking_changes_no_bit(loaded: LoadedModel, chunk_sizes: list[int]) -> None:
    token_ids = random_ids(150)
    runner = PathRunner(loaded)
    at_once = runner.run(0, token_ids)
    assert torch.equal(runner.run(1, token_ids, chunk_sizes=chunk_sizes), at_once)


def test_b31_company_changes_no_bit(loaded: LoadedModel) -> None:
    token_ids, runner = random_ids(60), PathRunner(loaded)
    alone = runner.run(0, token_ids)
    first = runner.step({1: random_ids(33, 1), 2: token_ids[:40], 3: random_ids(5, 2)})
    second = runner.step({3: random_ids(1, 3), 4: random_ids(90, 4), 2: token_ids[40:], 1: random_ids(1, 5)})
    assert torch.equal(torch.cat([first[2], second[2]]), alone)


def test_b31_the_number_of_threads_changes_no_bit(loaded: LoadedModel) -> None:
    token_ids = random_ids(100)
    before = torch.get_num_threads()
    try:
        results = []
        for num_threads in (1, 2):
            torch.set_num_threads(num_threads)
            results.append(PathRunner(loaded).run(0, token_ids, chunk_sizes=[60, 1]))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(*results)


def test_without_determinism_the_numbers_are_close(tmp_path: Path) -> None:
    path, token_ids = make_tiny_model(tmp_path), random_ids(50)
    exact, quick = (
        PathRunner(load_model(path, dtype=torch.float32, deterministic=kind)).run(0, token_ids)
        for kind in (True, False)
    )
    assert (exact - quick).abs().max() < 1e-3


def test_a_head_gives_logits_for_the_rows_asked_for(loaded: LoadedModel) -> None:
    hidden = torch.randn(5, loaded.config.hidden_size).to(loaded.dtype)
    logits = loaded.decoder.logits(hidden)
    assert logits.shape == (5, loaded.config.vocab_size)
    assert torch.equal(loaded.decoder.logits(hidden[3:4]), logits[3:4])
    assert loaded.decoder.logits(hidden[:0]).shape == (0, loaded.config.vocab_size)


def test_the_dtype_is_bfloat16_where_linear_layers_are_compiled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if make_cpu_linear() is not None:
        assert load_model(make_tiny_model(tmp_path)).dtype == torch.bfloat16
    monkeypatch.setenv("PHLOEM_CPU_KERNEL", "torch")
    for name in ("_is_amx_tile_supported", "_is_avx512_bf16_supported"):
        monkeypatch.setattr(torch.cpu, name, lambda: False, raising=False)
    assert preferred_dtype() == torch.float32


def test_without_a_compiler_the_dtype_is_chosen_by_what_the_cpu_multiplies_natively(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = make_tiny_model(tmp_path)
    monkeypatch.setenv("PHLOEM_CPU_KERNEL", "torch")
    assert load_model(path).dtype == preferred_dtype()
    for name in ("_is_amx_tile_supported", "_is_avx512_bf16_supported"):
        monkeypatch.setattr(torch.cpu, name, lambda: False, raising=False)
    assert load_model(path).dtype == torch.float32
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: True, raising=False)
    assert load_model(path).decoder.dtype == torch.bfloat16
    monkeypatch.delattr(torch.cpu, "_is_amx_tile_supported")
    monkeypatch.delattr(torch.cpu, "_is_avx512_bf16_supported")
    assert preferred_dtype() == torch.float32
