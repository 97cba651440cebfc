"""A model of a common shape with random weights, for measuring: its speed is a real model's, its text is noise."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import torch

from phloem.runtime.models.config import ModelConfig, parse_model_config

LLAMA_1B: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 128256,
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "max_position_embeddings": 16384,
    "tie_word_embeddings": True,
    "attention_bias": False,
    "mlp_bias": False,
    "eos_token_id": 1,
}
"""The shape of Llama 3.2 1B, with a shorter context."""

_STD = 0.02
_NUM_DRAWN = (1 << 22) + 15
"""No multiple of a row's length, so that rows differ."""


def llama_1b() -> ModelConfig:
    """Return that shape as the engine sees it."""
    return parse_model_config(LLAMA_1B, generation={})


def write_random_model(directory: Path, config: dict[str, Any]) -> Path:
    """Write config, weights in bfloat16 and a tokenizer of bytes; return the directory. 1B takes 2.5 GB and seconds.

    Args:
        directory: Where to; it exists.
        config: Fields of a `config.json`.
    """
    from safetensors.torch import save_file

    from phloem.runtime.models.weights import expected_shapes

    (directory / "config.json").write_text(json.dumps(config), encoding="utf-8")
    noise = (torch.randn(_NUM_DRAWN, generator=torch.Generator().manual_seed(0)) * _STD).bfloat16()
    weights = {
        name: torch.ones(shape, dtype=torch.bfloat16) if len(shape) == 1 else _filled(shape, noise)
        for name, shape in expected_shapes(parse_model_config(config, generation={})).items()
    }
    save_file(weights, str(directory / "model.safetensors"), metadata={"format": "pt"})
    _byte_tokenizer().save(str(directory / "tokenizer.json"))
    kind = {"tokenizer_class": "PreTrainedTokenizerFast"}
    (directory / "tokenizer_config.json").write_text(json.dumps(kind), encoding="utf-8")
    return directory


def _filled(shape: tuple[int, ...], noise: torch.Tensor) -> torch.Tensor:
    """The noise over and over: drawing every value would take longer than all the rest."""
    size = math.prod(shape)
    return noise.repeat(-(-size // len(noise)))[:size].view(shape)


def _byte_tokenizer() -> Any:
    """One token a byte: the fewest ids that make every text valid. A model may have more."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={byte: index for index, byte in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer
