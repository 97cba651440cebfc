"""A ``.gguf`` file becomes a model directory in the Hugging Face format, once.

transformers reads the config and the tokenizer out of the file; the weights are dequantised by the ``gguf`` package
and renamed here, since transformers would need one more package (accelerate) for that, and then refuse to save
what it loaded. What the file says and neither of them reads is mended here, and marked so: the size of
heads, how SmolLM's tokenizer splits digits, and stretched rope.

A directory appears under its final name only when it is complete (it is made beside it and renamed), and a
lock keeps two processes from making the same one.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from phloem.runtime.errors import ModelCorrupted, ModelError, ModelUnsupported
from phloem.runtime.models.progress import show_progress

if TYPE_CHECKING:
    import torch
    from gguf import GGUFReader, ReaderTensor
    from transformers import TokenizersBackend

SUPPORTED_GGUF_ARCHITECTURES = ("llama", "mistral", "qwen2", "qwen3")

_CONVERSION = 1
"""Raise this when the conversion changes: older results are not used then."""

_TENSORS = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
"""GGUF's names and ours, without ``blk.0.`` and ``model.layers.0.``."""

_SHARD_BYTES = 2 << 30
_SAMPLE_BYTES = 1 << 20
_NUM_SAMPLES = 16
_COMPLETE = ("config.json", "tokenizer.json", "tokenizer_config.json")


def convert_to_cache(gguf_file: Path, cache: Path) -> Path:
    """Return the converted directory of a file, converting it if that was not done before.

    Raises:
        ModelCorrupted: The file is no GGUF file, or is cut short.
        ModelUnsupported: Its architecture or one of its features has no code here.
        ModelError: The cache can't be written.
    """
    target = cache / "converted" / f"{gguf_file.stem}-{_file_key(gguf_file)}"
    make_once(target, lambda directory: convert_gguf(gguf_file, directory))
    return target


def make_once(target: Path, make: Callable[[Path], None]) -> None:
    """Make a model directory unless it is there: whole or not at all, by one process at a time.

    Args:
        target: The directory to be made.
        make: Fills the empty directory that it is given, which is then renamed.

    Raises:
        ModelError: The directory can't be written, or what `make` raises.
    """
    if is_complete(target):
        return
    try:
        with _locked(target):
            if is_complete(target):
                return
            unfinished = target.with_name(f".{target.name}.unfinished")
            for leftover in (unfinished, target):
                shutil.rmtree(leftover, ignore_errors=True)
            unfinished.mkdir()
            try:
                make(unfinished)
                os.replace(unfinished, target)
            finally:
                shutil.rmtree(unfinished, ignore_errors=True)
    except OSError as error:
        raise ModelError(
            f"{target} can't be written ({error}); free some space there, or set PHLOEM_CACHE to another directory"
        ) from error


def is_complete(directory: Path) -> bool:
    """Whether a directory of the cache has all that a model needs."""
    return all((directory / name).is_file() for name in _COMPLETE) and any(directory.glob("*.safetensors"))


def convert_gguf(gguf_file: Path, directory: Path) -> None:
    """Write config, tokenizer and safetensors of a GGUF file to an existing directory.

    Quantised tensors become bfloat16, which the quantisation's own error exceeds many times; others keep their type.

    Raises:
        ModelCorrupted: The file is no GGUF file, or is cut short.
        ModelUnsupported: Its architecture or one of its features has no code here.
    """
    reader = _open(gguf_file)
    architecture = str(_field(reader, "general.architecture"))
    if architecture not in SUPPORTED_GGUF_ARCHITECTURES:
        raise ModelUnsupported(
            f"{gguf_file} is of architecture {architecture!r}; supported are {', '.join(SUPPORTED_GGUF_ARCHITECTURES)}"
        )
    with show_progress(f"Converting {gguf_file.name} (once)", total=len(reader.tensors)) as advance:
        _write_configs(reader, gguf_file, directory)
        _write_tokenizer(reader, gguf_file, directory)
        _write_weights(_converted(reader, architecture, advance), directory)


@contextmanager
def _locked(target: Path) -> Iterator[None]:
    from filelock import FileLock

    target.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(target.with_name(f".{target.name}.lock")):
        yield


def _file_key(path: Path) -> str:
    """A digest over size and samples of the content, so that a moved file is known again without reading all."""
    size = path.stat().st_size
    digest = hashlib.sha256(f"{_CONVERSION} {size}".encode())
    with path.open("rb") as file:
        for index in range(_NUM_SAMPLES):
            file.seek(index * size // _NUM_SAMPLES)
            digest.update(file.read(_SAMPLE_BYTES))
    return digest.hexdigest()[:16]


def _open(gguf_file: Path) -> GGUFReader:
    from gguf import GGUFReader

    try:
        return GGUFReader(gguf_file)
    except Exception as error:  # numpy's and struct's own errors, depending on where the file ends
        raise ModelCorrupted(
            f"{gguf_file} ({gguf_file.stat().st_size} bytes) is no GGUF file or is cut short ({error}); delete it and "
            "download it again"
        ) from error


def _field(reader: GGUFReader, name: str) -> Any:
    """The value of a metadata field, None where the file has it not."""
    field = reader.get_field(name)
    return None if field is None else field.contents()


def _write_configs(reader: GGUFReader, gguf_file: Path, directory: Path) -> None:
    from transformers import AutoConfig

    from phloem.runtime.models.config import parse_model_config

    try:
        config = AutoConfig.from_pretrained(str(gguf_file.parent), gguf_file=gguf_file.name).to_dict()
    except Exception as error:  # the parser's own errors have no common base class
        raise ModelCorrupted(
            f"the metadata of {gguf_file} can't be read ({error}); download it again"
        ) from error
    for name in ("quantization_config", "_name_or_path", "_model_name_or_path"):
        config.pop(name, None)
    config["dtype"] = "bfloat16"
    classes = {"llama": "Llama", "mistral": "Mistral", "qwen2": "Qwen2", "qwen3": "Qwen3"}
    config["architectures"] = [f"{classes.get(config['model_type'], config['model_type'])}ForCausalLM"]
    if (
        head_dim := _field(reader, f"{_field(reader, 'general.architecture')}.attention.key_length")
    ) is not None:
        config["head_dim"] = head_dim
    config["rope_parameters"] = {**(config.get("rope_parameters") or {}), **_rope_scaling(reader, config)}
    ids = {name: _field(reader, f"tokenizer.ggml.{name}") for name in ("eos_token_id", "eot_token_id")}
    generation = {
        "eos_token_id": list(dict.fromkeys(index for index in ids.values() if index is not None)),
        "bos_token_id": _field(reader, "tokenizer.ggml.bos_token_id"),
        "pad_token_id": _field(reader, "tokenizer.ggml.padding_token_id"),
    }
    parse_model_config(config, generation=generation)
    _write_json(directory / "config.json", config)
    _write_json(directory / "generation_config.json", {k: v for k, v in generation.items() if v is not None})


def _rope_scaling(reader: GGUFReader, config: dict[str, Any]) -> dict[str, Any]:
    """The rope settings that transformers leaves in the file, under its own names."""
    factors = next((tensor for tensor in reader.tensors if tensor.name == "rope_freqs.weight"), None)
    if factors is not None:
        return _llama3_scaling(factors, config)
    prefix = f"{_field(reader, 'general.architecture')}.rope.scaling"
    kind = _field(reader, f"{prefix}.type")
    if kind in (None, "none"):
        return {}
    if kind not in ("linear", "yarn"):
        raise ModelUnsupported(
            f"rope scaling {kind!r} of a GGUF file is not supported; supported are linear, yarn"
        )
    original = _field(reader, f"{prefix}.original_context_length")
    scaling = {"rope_type": kind, "factor": _field(reader, f"{prefix}.factor")}
    return scaling if original is None else {**scaling, "original_max_position_embeddings": original}


def _llama3_scaling(factors: ReaderTensor, config: dict[str, Any]) -> dict[str, Any]:
    """Llama 3.1 and later store the quotient of each frequency instead of the settings that it comes from.

    The settings are always the same but for the largest quotient. What they give is compared with the file.
    """
    import torch

    from phloem.kernels.rope import RopeScaling, inverse_frequencies

    stored = torch.tensor(factors.data)
    scaling = RopeScaling(kind="llama3", factor=float(stored.max()), original_max_position=8192)
    theta = config["rope_parameters"]["rope_theta"]
    plain, stretched = (
        inverse_frequencies(2 * len(stored), theta=theta, scaling=kind, max_position=8192)
        for kind in (RopeScaling(), scaling)
    )
    if not torch.allclose(plain / stretched, stored, rtol=1e-3):
        raise ModelUnsupported(
            "the file's rope_freqs.weight is not Llama 3's scaling; nothing else is supported"
        )
    return {
        "rope_type": "llama3",
        "factor": scaling.factor,
        "low_freq_factor": scaling.low_freq_factor,
        "high_freq_factor": scaling.high_freq_factor,
        "original_max_position_embeddings": scaling.original_max_position,
    }


def _write_tokenizer(reader: GGUFReader, gguf_file: Path, directory: Path) -> None:
    from transformers import AutoTokenizer, TokenizersBackend

    try:
        tokenizer = AutoTokenizer.from_pretrained(str(gguf_file.parent), gguf_file=gguf_file.name)
    except Exception as error:  # whatever the many converters raise
        raise ModelUnsupported(f"the tokenizer of {gguf_file} can't be converted: {error}") from error
    assert isinstance(tokenizer, TokenizersBackend)
    if _field(reader, "tokenizer.ggml.pre") == "smollm":
        _split_digits(tokenizer)
    tokenizer.save_pretrained(str(directory))


def _split_digits(tokenizer: TokenizersBackend) -> None:
    """SmolLM's tokenizer takes every digit apart first; without that, "a  1" gets other tokens than in training."""
    from tokenizers import pre_tokenizers

    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )


def _converted(
    reader: GGUFReader, architecture: str, advance: Callable[[int], None]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Name and value of each tensor, in our terms."""
    heads = {
        "attn_q": int(_field(reader, f"{architecture}.attention.head_count")),
        "attn_k": int(_field(reader, f"{architecture}.attention.head_count_kv")),
    }
    for tensor in reader.tensors:
        advance(1)
        if tensor.name == "rope_freqs.weight":
            continue
        *block, kind, suffix = tensor.name.split(".")
        if kind not in _TENSORS:
            raise ModelUnsupported(
                f"tensor {tensor.name} of the GGUF file has no place in a {architecture} model"
            )
        value = _dequantised(tensor)
        if architecture == "llama" and kind in heads:
            value = _unpermuted(value, heads[kind])
        prefix = f"model.layers.{block[1]}." if block else ""
        yield f"{prefix}{_TENSORS[kind]}.{suffix}", value


def _dequantised(tensor: ReaderTensor) -> torch.Tensor:
    import torch
    from gguf import GGMLQuantizationType as Kind
    from gguf import dequantize

    kept = {Kind.F32: torch.float32, Kind.F16: torch.float16}
    try:
        values = dequantize(tensor.data, tensor.tensor_type)
    except NotImplementedError as error:
        raise ModelUnsupported(f"tensor {tensor.name} has type {tensor.tensor_type.name}: {error}") from error
    return torch.tensor(values).to(kept.get(tensor.tensor_type, torch.bfloat16))


def _unpermuted(value: torch.Tensor, num_heads: int) -> torch.Tensor:
    """Undo llama.cpp's order of the rows of q and k, where pairs that rotate together are neighbours."""
    pairs = value.reshape(num_heads, -1, 2, *value.shape[1:])
    return pairs.transpose(1, 2).reshape(value.shape).contiguous()


def _write_weights(tensors: Iterator[tuple[str, torch.Tensor]], directory: Path) -> None:
    """Write shards of about 2 GiB as they fill up, so that a large model is never in memory whole."""
    weight_map: dict[str, str] = {}
    shard: dict[str, torch.Tensor] = {}
    num_bytes = num_shards = 0
    for name, tensor in tensors:
        shard[name] = tensor
        num_bytes += tensor.nbytes
        if num_bytes >= _SHARD_BYTES:
            num_shards += 1
            weight_map |= _write_shard(shard, directory / f"model-{num_shards:05}.safetensors")
            shard, num_bytes = {}, 0
    if num_shards == 0:
        _write_shard(shard, directory / "model.safetensors")
        return
    if shard:
        weight_map |= _write_shard(shard, directory / f"model-{num_shards + 1:05}.safetensors")
    _write_json(directory / "model.safetensors.index.json", {"metadata": {}, "weight_map": weight_map})


def _write_shard(shard: dict[str, torch.Tensor], path: Path) -> dict[str, str]:
    from safetensors.torch import save_file

    save_file(shard, str(path), metadata={"format": "pt"})
    # save_file makes files that only their owner may read; a cache may be shared
    path.chmod((path.parent / "config.json").stat().st_mode)
    return dict.fromkeys(shard, path.name)


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
