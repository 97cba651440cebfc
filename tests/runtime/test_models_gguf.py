"""A GGUF file is converted once, whole or not at all, into the model that it was made from."""

from __future__ import annotations

import logging
import multiprocessing
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from path_runner import PathRunner
from safetensors.torch import load_file
from tiny_gguf import IM_END_ID, IM_START_ID, make_tiny_gguf

from phloem.kernels.rope import RopeScaling, inverse_frequencies
from phloem.runtime.errors import ModelCorrupted, ModelError, ModelUnsupported
from phloem.runtime.models.config import read_model_config
from phloem.runtime.models.gguf import convert_to_cache, make_once
from phloem.runtime.models.loading import load_model


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3"])
def test_the_weights_are_those_that_went_in(architecture: str, tmp_path: Path) -> None:
    original = make_tiny_gguf(tmp_path / "tiny.gguf", architecture=architecture)
    converted = convert_to_cache(tmp_path / "tiny.gguf", tmp_path / "cache")
    wanted, found = (load_file(path / "model.safetensors") for path in (original, converted))
    assert wanted.keys() == found.keys()
    assert all(torch.equal(wanted[name], found[name]) for name in wanted)
    a, b = (
        PathRunner(load_model(path, dtype=torch.float32)).run(0, [5, 6, 7]) for path in (original, converted)
    )
    assert torch.equal(a, b)


@pytest.mark.parametrize(
    ("kind", "dtype"), [(Kind.F16, torch.float16), (Kind.BF16, torch.bfloat16), (Kind.Q8_0, torch.bfloat16)]
)
def test_quantised_weights_become_bfloat16(kind: Kind, dtype: torch.dtype, tmp_path: Path) -> None:
    original = make_tiny_gguf(tmp_path / "tiny.gguf", quantisation=kind)
    converted = convert_to_cache(tmp_path / "tiny.gguf", tmp_path / "cache")
    wanted, found = (load_file(path / "model.safetensors") for path in (original, converted))
    for name, tensor in wanted.items():
        assert found[name].dtype == (dtype if tensor.dim() == 2 else torch.float32)
        assert torch.linalg.norm(found[name].float() - tensor) < 0.01 * torch.linalg.norm(tensor)
    load_model(converted)


def test_config_and_tokenizer_come_along(tmp_path: Path) -> None:
    make_tiny_gguf(tmp_path / "tiny.gguf")
    loaded = load_model(convert_to_cache(tmp_path / "tiny.gguf", tmp_path / "cache"), dtype=torch.float32)
    assert loaded.config.eos_token_ids == (IM_END_ID,)
    assert (loaded.config.num_layers, loaded.config.rope_theta) == (2, 10000.0)
    assert loaded.tokenizer.encode("he  12", add_special_tokens=False) == [256, 32, 32, 49, 50]
    ids = loaded.tokenizer.encode_chat([{"role": "user", "content": "a"}])
    assert ids == [IM_START_ID, 97, IM_END_ID]


def test_it_is_converted_once_and_known_again_elsewhere(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="phloem")
    make_tiny_gguf(tmp_path / "tiny.gguf")
    first = convert_to_cache(tmp_path / "tiny.gguf", tmp_path / "cache")
    (tmp_path / "other").mkdir()
    moved = shutil.copy(tmp_path / "tiny.gguf", tmp_path / "other")
    assert convert_to_cache(Path(moved), tmp_path / "cache") == first
    assert [record.message for record in caplog.records] == ["Converting tiny.gguf (once)"]
    make_tiny_gguf(tmp_path / "tiny.gguf", quantisation=Kind.Q8_0)
    assert convert_to_cache(tmp_path / "tiny.gguf", tmp_path / "cache") != first


def test_a_converted_model_that_lost_a_file_is_made_again(tmp_path: Path) -> None:
    make_tiny_gguf(tmp_path / "tiny.gguf")
    converted = convert_to_cache(tmp_path / "tiny.gguf", tmp_path / "cache")
    (converted / "model.safetensors").unlink()
    load_model(convert_to_cache(tmp_path / "tiny.gguf", tmp_path / "cache"))


def test_linear_and_yarn_scaling_are_read(tmp_path: Path) -> None:
    metadata = {"rope.scaling.type": "linear", "rope.scaling.factor": 4.0}
    make_tiny_gguf(tmp_path / "tiny.gguf", metadata=metadata)
    config = read_model_config(convert_to_cache(tmp_path / "tiny.gguf", tmp_path))
    assert config.rope_scaling is not None
    assert (config.rope_scaling.kind, config.rope_scaling.factor) == ("linear", 4.0)


def rope_factors(scaling: RopeScaling) -> np.ndarray[Any, Any]:
    plain, stretched = (
        inverse_frequencies(16, theta=10000.0, scaling=kind, max_position=8192)
        for kind in (RopeScaling(), scaling)
    )
    factors: np.ndarray[Any, Any] = (plain / stretched).numpy()
    return factors


def test_llama_3s_frequencies_are_recognised(tmp_path: Path) -> None:
    scaling = RopeScaling(kind="llama3", factor=32.0, original_max_position=8192)
    make_tiny_gguf(tmp_path / "tiny.gguf", extra_tensors={"rope_freqs.weight": rope_factors(scaling)})
    config = read_model_config(convert_to_cache(tmp_path / "tiny.gguf", tmp_path))
    assert config.rope_scaling is not None
    assert (config.rope_scaling.kind, config.rope_scaling.original_max_position) == ("llama3", 8192)
    assert config.rope_scaling.factor == pytest.approx(32.0)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (
            {"extra_tensors": {"rope_freqs.weight": np.linspace(1, 9, 8, dtype=np.float32)}},
            "not Llama 3's scaling",
        ),
        (
            {"extra_tensors": {"blk.0.ffn_gate_exps.weight": np.zeros((4, 4), np.float32)}},
            "ffn_gate_exps.weight .* no place",
        ),
        ({"metadata": {"rope.scaling.type": "longrope"}}, "'longrope'"),
    ],
)
def test_what_is_not_supported_is_named(options: dict[str, Any], words: str, tmp_path: Path) -> None:
    make_tiny_gguf(tmp_path / "tiny.gguf", **options)
    with pytest.raises(ModelUnsupported, match=words):
        convert_to_cache(tmp_path / "tiny.gguf", tmp_path / "cache")
    assert not [*(tmp_path / "cache").rglob("config.json")], "a failed conversion left something behind"


def test_another_architecture_is_named(tmp_path: Path) -> None:
    from gguf import GGUFWriter

    writer = GGUFWriter(str(tmp_path / "bert.gguf"), "bert")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with pytest.raises(ModelUnsupported, match="'bert'; supported are llama, mistral, qwen2, qwen3"):
        convert_to_cache(tmp_path / "bert.gguf", tmp_path / "cache")


@pytest.mark.parametrize("keep", [0.0, 0.001, 0.05, 0.5, 0.99])
def test_a_file_cut_short_says_to_download_it_again(keep: float, tmp_path: Path) -> None:
    file = tmp_path / "tiny.gguf"
    make_tiny_gguf(file)
    content = file.read_bytes()
    file.write_bytes(content[: int(keep * len(content))])
    with pytest.raises(
        ModelCorrupted, match=r"tiny.gguf \(\d+ bytes\) is no GGUF file or is cut short .* again"
    ):
        convert_to_cache(file, tmp_path / "cache")


def test_a_file_of_something_else_says_so(tmp_path: Path) -> None:
    file = tmp_path / "page.gguf"
    file.write_bytes(b"<html>not found</html>" * 1000)
    with pytest.raises(ModelCorrupted, match="is no GGUF file"):
        convert_to_cache(file, tmp_path / "cache")


def test_a_cache_that_cannot_be_written_names_the_variable(tmp_path: Path) -> None:
    make_tiny_gguf(tmp_path / "tiny.gguf")
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(ModelError, match="PHLOEM_CACHE"):
        convert_to_cache(tmp_path / "tiny.gguf", tmp_path / "file")


def test_a_killed_conversion_does_not_stop_the_next(tmp_path: Path) -> None:
    make_tiny_gguf(tmp_path / "tiny.gguf")
    target = convert_to_cache(tmp_path / "tiny.gguf", tmp_path / "cache")
    # what a kill in the middle leaves: the unfinished directory, and not the real one
    unfinished = target.with_name(f".{target.name}.unfinished")
    os.rename(target, unfinished)
    (unfinished / "model.safetensors").write_bytes(b"half")
    load_model(convert_to_cache(tmp_path / "tiny.gguf", tmp_path / "cache"))
    assert not unfinished.exists()


def test_a_model_appears_in_one_step(tmp_path: Path) -> None:
    made = []

    def make(directory: Path) -> None:
        assert directory != tmp_path / "model", "half a model would stand under its final name"
        made.append(directory.stat().st_ino)

    make_once(tmp_path / "model", make)
    assert [(tmp_path / "model").stat().st_ino] == made, "it was copied, which takes time, not renamed"


def test_an_interrupted_conversion_leaves_nothing(tmp_path: Path) -> None:
    def interrupted(directory: Path) -> None:
        (directory / "config.json").write_text("{}")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        make_once(tmp_path / "model", interrupted)
    assert [path.name for path in tmp_path.iterdir() if path.is_dir()] == []


def _convert_in_a_process(file: Path, cache: Path, results: multiprocessing.Queue[str]) -> None:
    try:
        results.put(load_model(convert_to_cache(file, cache), dtype=torch.float32).fingerprint)
    except BaseException as error:
        results.put(repr(error))
        raise


@pytest.mark.slow
def test_two_processes_at_once_do_not_disturb_each_other(tmp_path: Path) -> None:
    make_tiny_gguf(tmp_path / "tiny.gguf")
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    arguments = (tmp_path / "tiny.gguf", tmp_path / "cache", results)
    workers = [context.Process(target=_convert_in_a_process, args=arguments) for _ in range(3)]
    for worker in workers:
        worker.start()
    found = {results.get(timeout=120) for _ in workers}
    for worker in workers:
        worker.join()
    assert len(found) == 1
    assert [
        path.name for path in (tmp_path / "cache" / "converted").iterdir() if not path.name.startswith(".")
    ]
