"""Writes tiny random models in the Hugging Face format: real files, loaded by the same code as any model.

The tokenizer is byte-level: ids 0..255 are the bytes themselves, then come the special tokens. So any text is
valid input, token counts can be done in the head, and a random model's output holds broken UTF-8 to cope with.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

BOS_ID, IM_START_ID, IM_END_ID, PAD_ID = 256, 257, 258, 259
SPECIAL_TOKENS = ("<|bos|>", "<|im_start|>", "<|im_end|>", "<|pad|>")
VOCAB_SIZE = 256 + len(SPECIAL_TOKENS)
ARCHITECTURES = ("llama", "mistral", "qwen2", "qwen3")

CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

_CLASSES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}


def make_tiny_model(
    directory: str | Path,
    *,
    architecture: str = "llama",
    num_layers: int = 2,
    hidden: int = 64,
    intermediate: int = 128,
    num_q_heads: int = 4,
    num_kv_heads: int = 2,
    head_dim: int | None = None,
    max_position: int = 4096,
    sliding_window: int | None = None,
    tie_word_embeddings: bool = False,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    config_overrides: dict[str, Any] | None = None,
) -> Path:
    """Write a random model of `architecture` to `directory` (made if missing) and return its path.

    `head_dim` defaults to hidden / num_q_heads, for qwen3 to twice that. `sliding_window` defaults to 24 for
    mistral. The same arguments give the same bytes. Takes some 30 ms.
    """
    path = Path(directory)
    path.mkdir(parents=True, exist_ok=True)
    if head_dim is None:
        head_dim = hidden // num_q_heads * (2 if architecture == "qwen3" else 1)
    if sliding_window is None and architecture == "mistral":
        sliding_window = 24
    config: dict[str, Any] = {
        "architectures": [_CLASSES[architecture]],
        "model_type": architecture,
        "vocab_size": VOCAB_SIZE,
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": num_layers,
        "num_attention_heads": num_q_heads,
        "num_key_value_heads": num_kv_heads,
        "head_dim": head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "max_position_embeddings": max_position,
        "tie_word_embeddings": tie_word_embeddings,
        "attention_bias": False,
        "bos_token_id": BOS_ID,
        "eos_token_id": IM_END_ID,
        "pad_token_id": PAD_ID,
        "torch_dtype": str(dtype).removeprefix("torch."),
    }
    if sliding_window is not None:
        config["sliding_window"] = sliding_window
    config.update(config_overrides or {})
    _write_json(path / "config.json", config)
    _write_json(
        path / "generation_config.json",
        {"bos_token_id": BOS_ID, "eos_token_id": [IM_END_ID], "pad_token_id": PAD_ID},
    )
    weights = _random_weights(config, torch.Generator().manual_seed(seed))
    save_file(
        {name: tensor.to(dtype) for name, tensor in weights.items()},
        str(path / "model.safetensors"),
        metadata={"format": "pt"},
    )
    write_byte_tokenizer(path)
    return path


def write_byte_tokenizer(path: Path) -> None:
    """Write tokenizer.json and tokenizer_config.json: one token a byte, BOS in front, a ChatML template."""
    tokenizer = Tokenizer(models.BPE(vocab=_byte_vocab(), merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL_TOKENS])
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<|bos|> $A", pair="<|bos|> $A $B", special_tokens=[("<|bos|>", BOS_ID)]
    )
    tokenizer.save(str(path / "tokenizer.json"))
    _write_json(
        path / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": "<|bos|>",
            "eos_token": "<|im_end|>",
            "pad_token": "<|pad|>",
            "clean_up_tokenization_spaces": False,
            "chat_template": CHAT_TEMPLATE,
        },
    )


def _byte_vocab() -> dict[str, int]:
    """GPT-2's printable stand-in for each byte, with the byte's own value as id."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = (byte for byte in range(256) if byte not in printable)
    stand_in = {byte: chr(byte) for byte in printable}
    stand_in |= {byte: chr(256 + index) for index, byte in enumerate(others)}
    return {stand_in[byte]: byte for byte in range(256)}


def _random_weights(config: dict[str, Any], generator: torch.Generator) -> dict[str, torch.Tensor]:
    """Weights whose layers matter: with the usual 0.02 a random model repeats its last token for ever."""
    hidden, intermediate, head_dim = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    q_size, kv_size = config["num_attention_heads"] * head_dim, config["num_key_value_heads"] * head_dim
    qkv = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    biased = (*qkv, "self_attn.o_proj") if config["attention_bias"] else ()
    if config["model_type"] == "qwen2":
        biased = qkv

    def draw(*shape: int, std: float) -> torch.Tensor:
        return torch.randn(shape, generator=generator) * std

    def norm(size: int) -> torch.Tensor:
        return 1 + draw(size, std=0.1)

    weights = {"model.embed_tokens.weight": draw(config["vocab_size"], hidden, std=0.5)}
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}."
        for name, rows, columns in (
            ("self_attn.q_proj", q_size, hidden),
            ("self_attn.k_proj", kv_size, hidden),
            ("self_attn.v_proj", kv_size, hidden),
            ("self_attn.o_proj", hidden, q_size),
            ("mlp.gate_proj", intermediate, hidden),
            ("mlp.up_proj", intermediate, hidden),
            ("mlp.down_proj", hidden, intermediate),
        ):
            weights[f"{prefix}{name}.weight"] = draw(rows, columns, std=1.5 * columns**-0.5)
            if name in biased:
                weights[f"{prefix}{name}.bias"] = draw(rows, std=0.3)
        weights[f"{prefix}input_layernorm.weight"] = norm(hidden)
        weights[f"{prefix}post_attention_layernorm.weight"] = norm(hidden)
        if config["model_type"] == "qwen3":
            weights[f"{prefix}self_attn.q_norm.weight"] = norm(head_dim)
            weights[f"{prefix}self_attn.k_norm.weight"] = norm(head_dim)
    weights["model.norm.weight"] = norm(hidden)
    if not config["tie_word_embeddings"]:
        weights["lm_head.weight"] = draw(config["vocab_size"], hidden, std=0.5)
    return weights


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2), encoding="utf-8")
