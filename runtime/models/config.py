"""A model's shape: `ModelConfig`, made from a Hugging Face ``config.json``.

transformers parses the file (it knows each architecture's defaults and the older spellings of rope
settings); what phloem's decoder can't do is refused here, by name, before any weight is read. A feature that
is silently dropped would give wrong text, so unknown settings of importance are errors, not warnings.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from phloem.kernels.rope import RopeScaling
from phloem.runtime.errors import ModelCorrupted, ModelUnsupported

SUPPORTED_MODEL_TYPES = ("llama", "mistral", "qwen2", "qwen3")
"""``model_type`` of the configs that the decoder runs; SmolLM2 and many others are of type ``llama``."""

SUPPORTED_ROPE_TYPES = ("default", "linear", "dynamic", "yarn", "llama3")

_ROPE_FIELDS = (
    "factor",
    "low_freq_factor",
    "high_freq_factor",
    "beta_fast",
    "beta_slow",
    "attention_factor",
    "mscale",
    "mscale_all_dim",
    "truncate",
)
"""Settings that transformers and `RopeScaling` call by the same name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """What the decoder, the KV store and the engine need to know of a model."""

    architecture: str
    """The ``model_type``, one of `SUPPORTED_MODEL_TYPES`."""

    vocab_size: int
    """Rows of the embedding; may be more than the tokenizer's ids."""

    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    max_position: int
    """Longest path in tokens."""

    rope_theta: float
    rope_scaling: RopeScaling | None
    tie_word_embeddings: bool
    """The LM head is the embedding."""

    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    qk_norm: bool
    """RMSNorm on each head's q and k before the rotation (Qwen3)."""

    attn_logits_soft_cap: float | None
    """Cap of the attention scores; None in all architectures so far."""

    windows: tuple[int | None, ...]
    """One per layer: keys with query position - key position < window are seen; None sees all."""

    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None


def read_model_config(directory: Path) -> ModelConfig:
    """Read ``config.json`` (and ``generation_config.json``, where there is one) of a model directory.

    Raises:
        ModelCorrupted: A file is missing, not JSON, or contradicts itself.
        ModelUnsupported: The architecture or a feature of the model has no code here.
    """
    raw = _read_json(directory / "config.json")
    _check_model_type(raw.get("model_type"), raw.get("architectures"))
    from transformers import AutoConfig

    try:
        full = AutoConfig.from_pretrained(str(directory), local_files_only=True).to_dict()
    except Exception as error:  # the parser's own errors have no common base class
        raise ModelCorrupted(f"{directory / 'config.json'} is not a valid model config: {error}") from error
    generation_file = directory / "generation_config.json"
    generation = _read_json(generation_file) if generation_file.exists() else {}
    return parse_model_config(full, generation=generation)


def parse_model_config(config: Mapping[str, Any], *, generation: Mapping[str, Any]) -> ModelConfig:
    """Make a `ModelConfig` from the fields of a config with every default filled in.

    Args:
        config: What transformers' config object gives as ``to_dict()``.
        generation: The fields of ``generation_config.json``; its end-of-sequence ids win.

    Raises:
        ModelCorrupted: A number is missing or impossible; the message names it.
        ModelUnsupported: As for `read_model_config`.
    """
    model_type = _check_model_type(config.get("model_type"), config.get("architectures"))
    _check_features(config)
    num_q_heads = _positive(config, "num_attention_heads")
    num_kv_heads = _positive(config, "num_key_value_heads", default=num_q_heads)
    hidden_size = _positive(config, "hidden_size")
    head_dim = _positive(config, "head_dim", default=hidden_size // num_q_heads)
    _check_heads(num_q_heads, num_kv_heads, head_dim)
    num_layers = _positive(config, "num_hidden_layers")
    rope = config.get("rope_parameters") or {}
    stated_context = _positive(config, "max_position_embeddings")
    attention_bias = bool(config.get("attention_bias", False))
    eos = generation.get("eos_token_id")
    return ModelConfig(
        architecture=model_type,
        vocab_size=_positive(config, "vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=_positive(config, "intermediate_size"),
        num_layers=num_layers,
        num_q_heads=num_q_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        rms_norm_eps=float(config["rms_norm_eps"]),
        max_position=_max_position(config, rope),
        rope_theta=float(rope.get("rope_theta", 10000.0)),
        rope_scaling=_rope_scaling(rope, stated_context),
        tie_word_embeddings=bool(config.get("tie_word_embeddings", False)),
        # Qwen2 has biases on q, k and v in code, not in its config
        qkv_bias=attention_bias or model_type == "qwen2",
        o_bias=attention_bias,
        mlp_bias=bool(config.get("mlp_bias", False)),
        qk_norm=model_type == "qwen3",
        attn_logits_soft_cap=None,
        windows=_windows(config, num_layers),
        eos_token_ids=_ids(config.get("eos_token_id") if eos is None else eos),
        bos_token_id=config.get("bos_token_id"),
    )


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ModelCorrupted(
            f"{path.parent} has no {path.name}; a model directory needs config.json, *.safetensors and "
            "tokenizer.json: download it again, or pass the directory that holds them"
        ) from error
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ModelCorrupted(f"{path} can't be read as JSON ({error}); download this file again") from error
    if not isinstance(content, dict):
        raise ModelCorrupted(
            f"{path} holds a JSON {type(content).__name__}, not an object; download this file again"
        )
    return content


def _check_model_type(model_type: object, architectures: object) -> str:
    supported = ", ".join(SUPPORTED_MODEL_TYPES)
    if isinstance(model_type, str) and model_type in SUPPORTED_MODEL_TYPES:
        names = architectures if isinstance(architectures, list) else []
        if names and not any(str(name).endswith("ForCausalLM") for name in names):
            raise ModelUnsupported(
                f"{names[0]} is not a causal language model; phloem needs a ...ForCausalLM"
            )
        return model_type
    if not isinstance(model_type, str):
        raise ModelCorrupted(
            f"config.json has model_type {model_type!r}; it must be the name of an architecture ({supported})"
        )
    raise ModelUnsupported(f"architecture {model_type!r} is not supported; supported are {supported}")


def _check_features(config: Mapping[str, Any]) -> None:
    activation = config.get("hidden_act", "silu")
    if activation not in ("silu", "swish"):
        raise ModelUnsupported(f"hidden_act {activation!r} is not supported; supported is 'silu'")
    partial = (config.get("rope_parameters") or {}).get("partial_rotary_factor", 1.0)
    if partial != 1.0:
        raise ModelUnsupported(f"partial_rotary_factor {partial} is not supported; supported is 1.0")
    if config.get("quantization_config"):
        method = config["quantization_config"].get("quant_method", "unknown")
        raise ModelUnsupported(
            f"weights quantised with {method!r} are not supported; use the unquantised model or a .gguf file of it"
        )


def _check_heads(num_q_heads: int, num_kv_heads: int, head_dim: int) -> None:
    if num_q_heads % num_kv_heads:
        raise ModelCorrupted(
            f"num_attention_heads {num_q_heads} is not a multiple of num_key_value_heads {num_kv_heads}"
        )
    if head_dim % 2:
        raise ModelCorrupted(f"head_dim {head_dim} is odd, but positions rotate pairs of dimensions")


def _positive(config: Mapping[str, Any], name: str, *, default: int | None = None) -> int:
    value = config.get(name)
    if value is None and default is not None:
        return default
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ModelCorrupted(f"config.json has {name} {value!r}; it must be a whole number of at least 1")
    return value


def _rope_scaling(rope: Mapping[str, Any], max_position: int) -> RopeScaling | None:
    """The scaling part of transformers' ``rope_parameters``; None for plain rope."""
    kind = rope.get("rope_type", "default")
    if kind not in SUPPORTED_ROPE_TYPES:
        raise ModelUnsupported(
            f"rope type {kind!r} is not supported; supported are {', '.join(SUPPORTED_ROPE_TYPES)}"
        )
    if kind == "default":
        return None
    original = rope.get("original_max_position_embeddings") or max_position
    given = {name: rope[name] for name in _ROPE_FIELDS if rope.get(name) is not None}
    if kind == "yarn":
        given.setdefault("factor", max_position / original)
    # the dynamic table starts from the config's context, whatever else was written down (as transformers has it)
    trained = max_position if kind == "dynamic" else original
    try:
        return RopeScaling(kind=kind, original_max_position=trained, **given)
    except (TypeError, ValueError) as error:
        raise ModelCorrupted(f"config.json has rope settings that can't be right: {error}") from error


def _max_position(config: Mapping[str, Any], rope: Mapping[str, Any]) -> int:
    """Longest path. A yarn config may still state the context from before the extension."""
    stated = _positive(config, "max_position_embeddings")
    original, factor = rope.get("original_max_position_embeddings"), rope.get("factor")
    if rope.get("rope_type") == "yarn" and original and factor:
        return max(stated, int(original * factor))
    return stated


def _windows(config: Mapping[str, Any], num_layers: int) -> tuple[int | None, ...]:
    window = config.get("sliding_window")
    if window is None or config["model_type"] == "llama":
        return (None,) * num_layers
    window = _positive(config, "sliding_window")
    kinds = config.get("layer_types") or ["sliding_attention"] * num_layers
    unknown = sorted(set(kinds) - {"sliding_attention", "full_attention"})
    if unknown:
        raise ModelUnsupported(f"layer types {', '.join(unknown)} are not supported")
    if len(kinds) != num_layers:
        raise ModelCorrupted(f"config.json has {len(kinds)} layer_types for {num_layers} layers")
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


def _ids(value: object) -> tuple[int, ...]:
    """End-of-sequence ids, which configs spell as a number, a list, or null."""
    values = value if isinstance(value, list) else [] if value is None else [value]
    if any(not isinstance(each, int) or isinstance(each, bool) or each < 0 for each in values):
        raise ModelCorrupted(f"eos_token_id {value!r} must be a token id or a list of them")
    return tuple(dict.fromkeys(values))
