"""Where an engine computes: on which device, with which attention, in which types, and why not elsewhere."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from phloem.kernels.attention import AttentionSpec
from phloem.kernels.cpu import make_cpu_linear
from phloem.kernels.flashinfer_library import why_unavailable, why_unsupported
from phloem.runtime.config import EngineConfig
from phloem.runtime.errors import InvalidRequest
from phloem.runtime.models.config import ModelConfig
from phloem.runtime.models.loading import preferred_dtype

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
KV_DTYPES = {**DTYPES, "fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}

CPU_LIMITS = (64, 512)
"""Rows, and tokens, of a step on a CPU: beyond, a step takes longer in proportion."""
GPU_LIMITS = (256, 8192)
"""On a GPU, which needs that many to be busy."""


@dataclass(frozen=True, slots=True)
class Placement:
    """What an engine runs on, with every "auto" decided."""

    device: torch.device
    backend: str
    """A name that `make_backend` knows."""
    dtype: torch.dtype
    """Of weights and hidden states."""
    kv_dtype: torch.dtype
    deterministic: bool
    max_running: int
    max_step_tokens: int
    uses_graphs: bool
    """Whether decode steps run as CUDA graphs."""
    why_no_gpu: str | None = None
    """What keeps this model off a GPU here; None on one."""


def place(config: EngineConfig, model: ModelConfig) -> Placement:
    """Decide where to compute. A GPU is taken if FlashInfer runs there and has code for the model, unless told otherwise.

    Raises:
        InvalidRequest: What was asked for can't be had on this machine, or not together; the message says why.
    """
    if config.backend in ("cpu", "reference") or config.device == "cpu":
        _refuse_mixture(config)
        return _on_cpu(config, "the CPU was asked for")
    reason = why_unavailable() or _why_unsupported(config, model)
    insists = config.backend == "flashinfer" or config.device != "auto"
    if reason is None:
        return _on_gpu(config)
    if insists:
        name = "backend" if config.backend == "flashinfer" else "device"
        raise InvalidRequest(
            f"{name}={getattr(config, name)!r} can't be had: {reason}; `phloem doctor` tells more", field=name
        )
    return _on_cpu(config, reason)


def attention_spec(model: ModelConfig) -> AttentionSpec:
    """Return the attention's part of a model's shape."""
    return AttentionSpec(
        num_q_heads=model.num_q_heads,
        num_kv_heads=model.num_kv_heads,
        head_dim=model.head_dim,
        num_layers=model.num_layers,
        logits_soft_cap=model.attn_logits_soft_cap,
        windows=model.windows,
    )


def _refuse_mixture(config: EngineConfig) -> None:
    if config.backend == "flashinfer" or config.device not in ("auto", "cpu"):
        raise InvalidRequest(
            f"device={config.device!r} and backend={config.backend!r} don't go together: flashinfer runs on a GPU, the others "
            "on the CPU",
            field="device",
        )


def _on_cpu(config: EngineConfig, reason: str) -> Placement:
    if config.dtype == "float16":
        raise InvalidRequest(
            f"dtype=float16 is for GPUs, and this engine runs on the CPU ({reason}); use bfloat16 or float32",
            field="dtype",
        )
    if config.quantization == "int8" and make_cpu_linear() is None:
        raise InvalidRequest(
            "quantization=int8 needs compiled linear layers: install a C++ compiler (g++ or clang++), or leave it at none",
            field="quantization",
        )
    dtype = preferred_dtype() if config.dtype == "auto" else DTYPES[config.dtype]
    if config.kv_dtype not in ("auto", str(dtype).removeprefix("torch.")):
        raise InvalidRequest(
            f"kv_dtype={config.kv_dtype}: on the CPU KV has the model's dtype, {dtype}; other types are for GPUs ({reason})",
            field="kv_dtype",
        )
    deterministic = config.deterministic is not False
    return Placement(
        torch.device("cpu"),
        "cpu" if config.backend == "auto" else config.backend,
        dtype,
        dtype,
        deterministic,
        config.max_running or CPU_LIMITS[0],
        config.max_step_tokens or CPU_LIMITS[1],
        uses_graphs=False,
        why_no_gpu=reason,
    )


def _on_gpu(config: EngineConfig) -> Placement:
    if config.quantization == "int8":
        raise InvalidRequest(
            "quantization=int8 is for the CPU, and this engine would run on a GPU: leave it at none, or set device=cpu",
            field="quantization",
        )
    dtype, kv_dtype = _gpu_dtypes(config)
    return Placement(
        torch.device("cuda" if config.device == "auto" else config.device),
        "flashinfer",
        dtype,
        kv_dtype,
        config.deterministic is True,
        config.max_running or GPU_LIMITS[0],
        config.max_step_tokens or GPU_LIMITS[1],
        uses_graphs=config.cuda_graphs,
    )


def _gpu_dtypes(config: EngineConfig) -> tuple[torch.dtype, torch.dtype]:
    dtype = torch.bfloat16 if config.dtype == "auto" else DTYPES[config.dtype]
    return dtype, dtype if config.kv_dtype == "auto" else KV_DTYPES[config.kv_dtype]


def _why_unsupported(config: EngineConfig, model: ModelConfig) -> str | None:
    dtype, kv_dtype = _gpu_dtypes(config)
    return why_unsupported(
        attention_spec(model), q_dtype=dtype, kv_dtype=kv_dtype, block_size=config.block_size
    )
