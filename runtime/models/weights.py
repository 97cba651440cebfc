"""A model's weights on disk: safetensors files, checked against the config before a single weight is used.

Every tensor that the config calls for must be there, with its shape, and no other: a tensor nobody asked for is a
feature that the decoder would drop in silence.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch

from phloem.runtime.errors import ModelCorrupted, ModelUnsupported
from phloem.runtime.models.config import ModelConfig
from phloem.runtime.models.files import weight_files

_DTYPES = frozenset({"F64", "F32", "F16", "BF16"})
_MAX_NAMED = 4


class Checkpoint:
    """The open safetensors files of one model. Made by `open_checkpoint`, which owns the file handles."""

    def __init__(self, shards: dict[str, Any], config: ModelConfig) -> None:
        """Take open files by tensor name and check them.

        Raises:
            ModelCorrupted: A tensor is missing, unexpected, or of another shape.
            ModelUnsupported: A tensor is quantised.
        """
        self._shards = shards
        _check_names(set(shards), expected_shapes(config), config)
        for name, shape in expected_shapes(config).items():
            self._check_tensor(name, shape)

    def tensor(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        """Read one tensor, as a copy in memory of its own, converted to `dtype`."""
        tensor: torch.Tensor = self._shards[name].get_tensor(name)
        return tensor.to(dtype, copy=True)

    def _check_tensor(self, name: str, shape: tuple[int, ...]) -> None:
        piece = self._shards[name].get_slice(name)
        found = tuple(piece.get_shape())
        if found != shape:
            raise ModelCorrupted(
                f"tensor {name} has shape {list(found)}, but config.json asks for {list(shape)}; config.json and the "
                "weights are not of the same model: download both again"
            )
        if piece.get_dtype() not in _DTYPES:
            raise ModelUnsupported(
                f"tensor {name} is of type {piece.get_dtype()}; quantised safetensors are not supported: use the "
                "unquantised model or a .gguf file of it"
            )


@contextmanager
def open_checkpoint(directory: Path, config: ModelConfig) -> Iterator[Checkpoint]:
    """Open and check the weights of a model directory; they are mapped, not read, until asked for.

    Raises:
        ModelCorrupted: A file or tensor is missing, cut short, unexpected, or of another shape.
        ModelUnsupported: The weights are not safetensors, or quantised.
    """
    from safetensors import SafetensorError, safe_open

    shards: dict[str, Any] = {}
    with ExitStack() as stack:
        for path in weight_files(directory):
            try:
                handle = stack.enter_context(safe_open(str(path), framework="pt"))
            except (SafetensorError, OSError) as error:
                raise ModelCorrupted(
                    f"{path} ({path.stat().st_size} bytes) is damaged or cut short ({error}); delete it and download it again"
                ) from error
            shards |= dict.fromkeys(handle.keys(), handle)
        yield Checkpoint(shards, config)


def expected_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Return name and shape of every tensor that a model of this config has."""
    hidden = config.hidden_size
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (config.vocab_size, hidden)}
    for layer in range(config.num_layers):
        for name, shape in _layer_shapes(config).items():
            shapes[f"model.layers.{layer}.{name}"] = shape
    shapes["model.norm.weight"] = (hidden,)
    if not config.tie_word_embeddings:
        shapes["lm_head.weight"] = (config.vocab_size, hidden)
    return shapes


def _layer_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    hidden, intermediate = config.hidden_size, config.intermediate_size
    q_size, kv_size = config.num_q_heads * config.head_dim, config.num_kv_heads * config.head_dim
    shapes: dict[str, tuple[int, ...]] = {
        "input_layernorm.weight": (hidden,),
        "post_attention_layernorm.weight": (hidden,),
    }
    for name, rows, columns, has_bias in (
        ("self_attn.q_proj", q_size, hidden, config.qkv_bias),
        ("self_attn.k_proj", kv_size, hidden, config.qkv_bias),
        ("self_attn.v_proj", kv_size, hidden, config.qkv_bias),
        ("self_attn.o_proj", hidden, q_size, config.o_bias),
        ("mlp.gate_proj", intermediate, hidden, config.mlp_bias),
        ("mlp.up_proj", intermediate, hidden, config.mlp_bias),
        ("mlp.down_proj", hidden, intermediate, config.mlp_bias),
    ):
        shapes[f"{name}.weight"] = (rows, columns)
        if has_bias:
            shapes[f"{name}.bias"] = (rows,)
    if config.qk_norm:
        shapes["self_attn.q_norm.weight"] = (config.head_dim,)
        shapes["self_attn.k_norm.weight"] = (config.head_dim,)
    return shapes


def _check_names(found: set[str], shapes: dict[str, tuple[int, ...]], config: ModelConfig) -> None:
    missing = [name for name in shapes if name not in found]
    if missing:
        raise ModelCorrupted(
            f"the weights lack {_some(missing)}, which config.json calls for; the download is incomplete or config.json "
            "is of another model: download both again"
        )
    unexpected = sorted(name for name in found if name not in shapes and not _is_redundant(name, config))
    if unexpected:
        raise ModelCorrupted(
            f"the weights have {_some(unexpected)}, which a {config.architecture} of this config.json has not; "
            "config.json is of another model, or the model has parts that phloem doesn't know"
        )


def _is_redundant(name: str, config: ModelConfig) -> bool:
    """Tensors that some checkpoints store although they follow from others."""
    return name.endswith("rotary_emb.inv_freq") or (name == "lm_head.weight" and config.tie_word_embeddings)


def _some(names: list[str]) -> str:
    shown = ", ".join(names[:_MAX_NAMED])
    return shown if len(names) <= _MAX_NAMED else f"{shown} and {len(names) - _MAX_NAMED} more tensors"
