"""config.json becomes a ModelConfig, or an error that says what is wrong or not supported."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tiny_model import IM_END_ID, make_tiny_model

from phloem.runtime.errors import ModelCorrupted, ModelUnsupported, PhloemError
from phloem.runtime.models.config import ModelConfig, read_model_config


def config_of(path: Path, **overrides: Any) -> ModelConfig:
    return read_model_config(make_tiny_model(path, config_overrides=overrides))


def test_every_number_is_read(tmp_path: Path) -> None:
    config = read_model_config(make_tiny_model(tmp_path, architecture="qwen3", num_layers=3, head_dim=48))
    assert (config.architecture, config.num_layers, config.head_dim) == ("qwen3", 3, 48)
    assert (config.hidden_size, config.intermediate_size, config.vocab_size) == (64, 128, 260)
    assert (config.num_q_heads, config.num_kv_heads, config.max_position) == (4, 2, 4096)
    assert config.qk_norm
    assert not config.qkv_bias
    assert config.windows == (None, None, None)
    assert config.eos_token_ids == (IM_END_ID,)


def test_qwen2_has_biases_on_qkv_only(tmp_path: Path) -> None:
    config = read_model_config(make_tiny_model(tmp_path, architecture="qwen2"))
    assert (config.qkv_bias, config.o_bias, config.mlp_bias) == (True, False, False)


def test_mistral_has_its_window_in_every_layer(tmp_path: Path) -> None:
    assert read_model_config(make_tiny_model(tmp_path, architecture="mistral")).windows == (24, 24)


def test_missing_fields_get_the_architectures_defaults(tmp_path: Path) -> None:
    path = make_tiny_model(tmp_path)
    file = path / "config.json"
    content = json.loads(file.read_text())
    for name in ("num_key_value_heads", "head_dim", "rms_norm_eps", "rope_theta", "tie_word_embeddings"):
        del content[name]
    file.write_text(json.dumps(content))
    config = read_model_config(path)
    assert (config.num_kv_heads, config.head_dim, config.rms_norm_eps) == (4, 16, 1e-6)
    assert (config.rope_theta, config.tie_word_embeddings) == (10000.0, False)


def test_the_generation_configs_end_ids_win(tmp_path: Path) -> None:
    path = make_tiny_model(tmp_path)
    (path / "generation_config.json").write_text('{"eos_token_id": [3, 5, 3]}')
    assert read_model_config(path).eos_token_ids == (3, 5)
    (path / "generation_config.json").unlink()
    assert read_model_config(path).eos_token_ids == (IM_END_ID,)


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_theta": 77.0, "rope_scaling": {"type": "linear", "factor": 2.0}},
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 77.0, "factor": 2.0}},
    ],
)
def test_both_spellings_of_rope_are_read(rope: dict[str, Any], tmp_path: Path) -> None:
    path = make_tiny_model(tmp_path)
    content = json.loads((path / "config.json").read_text())
    del content["rope_theta"]
    (path / "config.json").write_text(json.dumps({**content, **rope}))
    config = read_model_config(path)
    assert config.rope_theta == 77.0
    assert config.rope_scaling is not None
    assert (config.rope_scaling.kind, config.rope_scaling.factor) == ("linear", 2.0)


def test_yarn_extends_the_context(tmp_path: Path) -> None:
    rope = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 4096}
    assert config_of(tmp_path, rope_parameters=rope).max_position == 16384


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        ({"model_type": "mamba"}, "'mamba' is not supported; supported are llama, mistral, qwen2, qwen3"),
        (
            {"architectures": ["LlamaForSequenceClassification"]},
            "LlamaForSequenceClassification is not a causal",
        ),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5"),
        ({"quantization_config": {"quant_method": "awq", "bits": 4}}, "quantised with 'awq'"),
        (
            {
                "rope_parameters": {
                    "rope_type": "longrope",
                    "rope_theta": 1e4,
                    "short_factor": [1.0] * 8,
                    "long_factor": [1.0] * 8,
                    "factor": 2.0,
                    "original_max_position_embeddings": 2048,
                }
            },
            "rope type 'longrope' is not supported; supported are default, linear",
        ),
    ],
)
def test_what_is_not_supported_is_named(overrides: dict[str, Any], words: str, tmp_path: Path) -> None:
    with pytest.raises(ModelUnsupported, match=words):
        config_of(tmp_path, **overrides)


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        ({"model_type": 7}, "model_type 7"),
        ({"hidden_size": 0}, "hidden_size 0"),
        ({"num_hidden_layers": "two"}, "num_hidden_layers"),
        ({"num_key_value_heads": 3}, "4 is not a multiple of num_key_value_heads 3"),
        ({"head_dim": 15}, "head_dim.*15"),
        ({"eos_token_id": "end"}, "eos_token_id"),
    ],
)
def test_impossible_numbers_are_named(overrides: dict[str, Any], words: str, tmp_path: Path) -> None:
    path = make_tiny_model(tmp_path)
    (path / "generation_config.json").unlink()
    content = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**content, **overrides}))
    with pytest.raises(ModelCorrupted, match=words):
        read_model_config(path)


@pytest.mark.parametrize("content", ["", "{", "[1, 2]", '"text"', "\x00\x01"])
@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
def test_a_file_that_is_no_json_object_is_named(name: str, content: str, tmp_path: Path) -> None:
    path = make_tiny_model(tmp_path)
    (path / name).write_text(content)
    with pytest.raises(ModelCorrupted, match=name) as caught:
        read_model_config(path)
    assert "download" in str(caught.value)
    assert isinstance(caught.value, ValueError)
    assert isinstance(caught.value, PhloemError)


def test_an_empty_directory_says_what_it_needs(tmp_path: Path) -> None:
    with pytest.raises(ModelCorrupted, match=r"has no config.json; a model directory needs"):
        read_model_config(tmp_path)
