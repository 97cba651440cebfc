"""Writes tiny models as GGUF files, the way llama.cpp's converter lays them out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from safetensors.torch import load_file
from tiny_model import VOCAB_SIZE, _byte_vocab, make_tiny_model

BOS_ID, IM_START_ID, IM_END_ID = 257, 258, 259
_CONTROL, _NORMAL = 3, 1
_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def make_tiny_gguf(
    file: Path,
    *,
    architecture: str = "llama",
    quantisation: gguf.GGMLQuantizationType = gguf.GGMLQuantizationType.F32,
    metadata: dict[str, Any] | None = None,
    extra_tensors: dict[str, np.ndarray[Any, Any]] | None = None,
) -> Path:
    """Write `file`; return the directory of the same model in the Hugging Face format, made beside it."""
    model = make_tiny_model(file.with_suffix(""), architecture=architecture)
    writer = gguf.GGUFWriter(str(file), architecture)
    writer.add_context_length(4096)
    writer.add_embedding_length(64)
    writer.add_block_count(2)
    writer.add_feed_forward_length(128)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    if architecture == "qwen3":
        writer.add_key_length(32)
        writer.add_value_length(32)
    for name, value in (metadata or {}).items():
        (writer.add_string if isinstance(value, str) else writer.add_float32)(f"{architecture}.{name}", value)
    _add_tokenizer(writer)
    for name, tensor in load_file(model / "model.safetensors").items():
        _add_tensor(writer, name, tensor, quantisation, permute=architecture == "llama")
    for name, values in (extra_tensors or {}).items():
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return model


def _add_tokenizer(writer: gguf.GGUFWriter) -> None:
    """Bytes, one merge, and three special tokens."""
    tokens = [*_byte_vocab(), "he", "<|bos|>", "<|im_start|>", "<|im_end|>"]
    assert len(tokens) == VOCAB_SIZE
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types([_NORMAL] * 257 + [_CONTROL] * 3)
    writer.add_token_merges(["h e"])
    writer.add_bos_token_id(BOS_ID)
    writer.add_eos_token_id(IM_END_ID)
    writer.add_chat_template("{% for m in messages %}<|im_start|>{{ m['content'] }}<|im_end|>{% endfor %}")


def _add_tensor(
    writer: gguf.GGUFWriter,
    name: str,
    tensor: torch.Tensor,
    quantisation: gguf.GGMLQuantizationType,
    *,
    permute: bool,
) -> None:
    stem, suffix = name.rsplit(".", 1)
    prefix = ""
    if stem.startswith("model.layers."):
        _, _, layer, stem = stem.split(".", 3)
        prefix = f"blk.{layer}."
    values = tensor.float().numpy()
    heads = {"self_attn.q_proj": 4, "self_attn.k_proj": 2}.get(stem)
    if permute and heads:
        values = values.reshape(heads, 2, -1, *values.shape[1:]).swapaxes(1, 2).reshape(values.shape)
    kind = quantisation if values.ndim == 2 else gguf.GGMLQuantizationType.F32
    writer.add_tensor(f"{prefix}{_NAMES[stem]}.{suffix}", gguf.quantize(values, kind), raw_dtype=kind)
