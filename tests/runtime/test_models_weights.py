"""Damaged, incomplete or wrong weights are refused by name; whole ones are read, and told apart."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from path_runner import PathRunner
from safetensors.torch import load_file, save_file
from tiny_model import make_tiny_model

from phloem.runtime.errors import ModelCorrupted, ModelNotFound, ModelUnsupported
from phloem.runtime.models.fingerprint import fingerprint
from phloem.runtime.models.loading import load_model

Tensors = dict[str, torch.Tensor]
Q = "model.layers.0.self_attn.q_proj.weight"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return make_tiny_model(tmp_path / "model")


def rewrite(model: Path, change: Callable[[Tensors], object]) -> None:
    tensors = load_file(model / "model.safetensors")
    change(tensors)
    save_file(tensors, str(model / "model.safetensors"))


def shard(model: Path) -> None:
    """Split the single file of a model in two, with an index."""
    tensors = load_file(model / "model.safetensors")
    (model / "model.safetensors").unlink()
    names = sorted(tensors)
    weight_map = {}
    for index, part in enumerate((names[::2], names[1::2])):
        file = f"model-0000{index}.safetensors"
        save_file({name: tensors[name] for name in part}, str(model / file))
        weight_map |= dict.fromkeys(part, file)
    (model / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def test_sharded_weights_give_the_same_model(model: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(model, tmp_path / "sharded"))
    shard(copy)
    whole, parts = (
        PathRunner(load_model(path, dtype=torch.float32)).run(0, [1, 2, 3]) for path in (model, copy)
    )
    assert torch.equal(whole, parts)


def test_a_missing_tensor_is_named(model: Path) -> None:
    rewrite(model, lambda tensors: tensors.pop(Q))
    with pytest.raises(ModelCorrupted, match=f"lack {Q}"):
        load_model(model)


def test_many_missing_tensors_are_counted(model: Path) -> None:
    rewrite(model, lambda tensors: [tensors.pop(name) for name in [*tensors] if "layers.1" in name])
    with pytest.raises(ModelCorrupted, match="and 5 more tensors"):
        load_model(model)


def test_an_unexpected_tensor_is_named(model: Path) -> None:
    rewrite(model, lambda tensors: tensors.update({"model.layers.0.self_attn.q_proj.bias": torch.zeros(64)}))
    with pytest.raises(ModelCorrupted, match=r"have model.layers.0.self_attn.q_proj.bias, which a llama"):
        load_model(model)


def test_a_wrong_shape_is_named_with_both_shapes(model: Path) -> None:
    rewrite(model, lambda tensors: tensors.update({Q: torch.zeros(64, 32)}))
    with pytest.raises(
        ModelCorrupted, match=r"q_proj.weight has shape \[64, 32\], but config.json asks for \[64, 64\]"
    ):
        load_model(model)


def test_weights_of_another_config_are_refused(model: Path, tmp_path: Path) -> None:
    other = make_tiny_model(tmp_path / "other", hidden=128)
    shutil.copy(other / "config.json", model)
    with pytest.raises(ModelCorrupted, match="download both again"):
        load_model(model)


def test_integer_weights_are_not_supported(model: Path) -> None:
    rewrite(model, lambda tensors: tensors.update({Q: torch.zeros(64, 64, dtype=torch.int8)}))
    with pytest.raises(ModelUnsupported, match="I8"):
        load_model(model)


def test_tensors_that_follow_from_others_are_ignored(tmp_path: Path) -> None:
    model = make_tiny_model(tmp_path, tie_word_embeddings=True)
    rewrite(
        model,
        lambda tensors: tensors.update(
            {
                "model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(8),
                "lm_head.weight": tensors["model.embed_tokens.weight"].clone(),
            }
        ),
    )
    load_model(model)


@pytest.mark.parametrize("keep", [0, 4, 100, 0.5, 0.999])
def test_a_file_cut_short_says_to_delete_it(model: Path, keep: float) -> None:
    file = model / "model.safetensors"
    content = file.read_bytes()
    file.write_bytes(content[: int(keep * len(content)) if isinstance(keep, float) else keep])
    with pytest.raises(
        ModelCorrupted,
        match=r"model.safetensors .* is damaged or cut short .* delete it and download it again",
    ):
        load_model(model)


def test_a_file_of_garbage_says_to_delete_it(model: Path) -> None:
    (model / "model.safetensors").write_bytes(b"<html>404</html>" * 100)
    with pytest.raises(ModelCorrupted, match="delete it"):
        load_model(model)


def test_a_directory_without_weights_says_so(model: Path) -> None:
    (model / "model.safetensors").unlink()
    with pytest.raises(ModelCorrupted, match=r"has no model.safetensors"):
        load_model(model)


def test_a_directory_with_pickled_weights_says_to_convert_them(model: Path) -> None:
    (model / "model.safetensors").rename(model / "pytorch_model.bin")
    with pytest.raises(ModelUnsupported, match=r"pytorch_model.bin but no .safetensors"):
        load_model(model)


def test_a_missing_shard_is_named(model: Path) -> None:
    shard(model)
    (model / "model-00001.safetensors").unlink()
    with pytest.raises(ModelCorrupted, match=r"model-00001.safetensors is missing"):
        load_model(model)


@pytest.mark.parametrize("content", ["", "{}", '{"weight_map": 3}', '{"weight_map": {"a": 1}}', "[]"])
def test_a_broken_index_is_named(model: Path, content: str) -> None:
    (model / "model.safetensors.index.json").write_text(content)
    with pytest.raises(ModelCorrupted, match=r"index.json"):
        load_model(model)


@pytest.mark.parametrize("name", ["tokenizer.json", "config.json"])
def test_a_missing_file_is_named(model: Path, name: str) -> None:
    (model / name).unlink()
    with pytest.raises(ModelCorrupted, match=f"has no {name}"):
        load_model(model)


@pytest.mark.parametrize("content", ["", "{", '{"version": "1.0"}'])
def test_a_damaged_tokenizer_is_named(model: Path, content: str) -> None:
    (model / "tokenizer.json").write_text(content)
    with pytest.raises(ModelCorrupted, match=r"tokenizer .* can't be loaded .* download"):
        load_model(model)


def test_a_directory_that_does_not_exist_is_not_found(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound, match="nowhere is not a directory"):
        load_model(tmp_path / "nowhere")


def test_a_fingerprint_is_of_the_model_not_of_its_place(model: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(model, tmp_path / "copy")
    assert fingerprint(Path(copy)) == fingerprint(model)
    assert load_model(model).fingerprint == fingerprint(model)


def test_models_that_differ_have_different_fingerprints(tmp_path: Path) -> None:
    variants = [
        {},
        {"seed": 1},
        {"num_layers": 1},
        {"dtype": torch.bfloat16},
        {"config_overrides": {"rope_theta": 5.0}},
    ]
    paths = [make_tiny_model(tmp_path / str(i), **variant) for i, variant in enumerate(variants)]
    assert len({fingerprint(path) for path in paths}) == len(variants)


def test_a_fine_tune_of_one_layer_has_another_fingerprint(model: Path) -> None:
    before = fingerprint(model)
    rewrite(model, lambda tensors: tensors["model.layers.1.mlp.down_proj.weight"].mul_(1.01))
    assert fingerprint(model) != before
