"""What an engine is built with. One frozen object, passed down; there is no global configuration."""

from __future__ import annotations

import dataclasses
import os
import re
from dataclasses import dataclass
from typing import Any, Literal

from phloem.radix import EvictionPolicy, UnknownPolicy
from phloem.radix.policy import policy_named
from phloem.runtime.errors import InvalidRequest

MAX_THREADS = 1024
DTYPES = ("auto", "bfloat16", "float16", "float32")
KV_DTYPES = (*DTYPES, "fp8_e4m3", "fp8_e5m2")
QUANTIZATIONS = ("none", "int8")
BACKENDS = ("auto", "cpu", "flashinfer", "reference")
_DEVICE = re.compile(r"auto|cpu|cuda(:\d+)?")

_COUNTS = (
    "max_running", "max_step_tokens", "max_waiting", "num_blocks", "kv_memory_bytes", "max_model_len", "num_threads"
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """The settings of an :class:`~phloem.runtime.engine.Engine`; every one has a default that works.

    Raises:
        InvalidRequest: A field is out of its range; the message names the field and the limit.
    """

    device: str = "auto"
    """`cpu`, `cuda` or `cuda:1`. `auto`: a GPU where FlashInfer runs and has code for the model, else the CPU."""

    dtype: Literal["auto", "bfloat16", "float16", "float32"] = "auto"
    """Of the weights. `auto`: bfloat16 on a GPU, on a CPU that multiplies it natively (AMX, AVX512-BF16), and where a compiler
    is; else float32."""

    kv_dtype: Literal["auto", "bfloat16", "float16", "float32", "fp8_e4m3", "fp8_e5m2"] = "auto"
    """Of the KV. `auto`: the weights'. The 8-bit types are for GPUs: half the memory, and some loss."""

    quantization: Literal["none", "int8"] = "none"
    """Of the weights of linear layers, in memory. `int8`: a scale per output, half of bfloat16's bytes and about its quality; for the
    CPU, where a compiler is."""

    block_size: int = 16
    """Tokens per KV block: a power of two up to 64."""

    num_blocks: int | None = None
    """Size of the pool. None: as many as `kv_memory_bytes` holds."""

    kv_memory_bytes: int | None = None
    """Memory for KV. None: on a CPU a quarter of what is available now, 4 GiB at most; on a GPU nine tenths of what is free
    beside the weights and the largest step."""

    max_model_len: int | None = None
    """Longest path, prompt and output together. None: the model's context, or the pool where that is smaller."""

    max_running: int | None = None
    """Requests computed in one step. None: 64 on a CPU, 256 on a GPU."""

    max_step_tokens: int | None = None
    """Tokens computed in one step: longer prompts are prefilled in chunks, between the decodes of the others. None: 512 on a
    CPU, 8,192 on a GPU."""

    max_waiting: int | None = None
    """Requests that may wait; one more is refused with `QueueFull`. None: no limit."""

    prefix_cache: bool = True
    """Off: every prompt is computed from its first token, and nothing is kept. For comparisons."""

    eviction_policy: str | EvictionPolicy = "lru"
    """`lru`, `lfu`, `fifo`, `priority`, or a policy object."""

    backend: Literal["auto", "cpu", "flashinfer", "reference"] = "auto"
    """Attention: `cpu`, or `flashinfer` on a GPU; `reference` is a slow dense one in float64, to compare with."""

    deterministic: bool | None = None
    """Keep a token's logits the same bits whatever was cached, batched or chunked. None: yes on a CPU, where it costs next to
    nothing; no on a GPU, where it costs cascades and speed."""

    cuda_graphs: bool = True
    """On a GPU, run decode steps as captured graphs."""

    cascades: bool = True
    """On a GPU, read a long prefix that many rows of a step share once, not once per row. Not with `deterministic`."""

    num_threads: int | None = None
    """Threads for tensor work. None: what torch chooses (OMP_NUM_THREADS is respected)."""

    sandbox_timeout_s: float | None = None
    """Compile grammars and render chat templates in processes of their own, that are killed after so many seconds, or when they take
    much memory: for requests of strangers. None: in this process, without a limit."""

    def __post_init__(self) -> None:
        _require(self.dtype in DTYPES, f"dtype must be one of {', '.join(DTYPES)}, not {self.dtype!r}")
        choices = (("kv_dtype", KV_DTYPES), ("quantization", QUANTIZATIONS), ("backend", BACKENDS))
        for name, known in choices:
            value = getattr(self, name)
            _require(value in known, f"{name} must be one of {', '.join(known)}, not {value!r}")
        _require(
            isinstance(self.device, str) and _DEVICE.fullmatch(self.device) is not None,
            f"device must be auto, cpu, cuda or cuda:N, not {self.device!r}",
        )
        _require(
            type(self.block_size) is int and self.block_size in (1, 2, 4, 8, 16, 32, 64),
            f"block_size must be a power of two from 1 to 64, not {self.block_size!r}",
        )
        for name in _COUNTS:
            if getattr(self, name) is not None:
                _require_positive(name, getattr(self, name))
        for name in ("prefix_cache", "cuda_graphs", "cascades", "deterministic"):
            value = getattr(self, name)
            is_right = isinstance(value, bool) or (name == "deterministic" and value is None)
            _require(is_right, f"{name} must be True or False, not {value!r}")
        _require(
            self.num_threads is None or self.num_threads <= MAX_THREADS,
            f"num_threads must be at most {MAX_THREADS}, not {self.num_threads!r}",
        )
        limit = self.sandbox_timeout_s
        good = isinstance(limit, int | float) and not isinstance(limit, bool) and 0 < limit < 1e6
        _require(
            limit is None or good, f"sandbox_timeout_s must be a number of seconds above 0, not {limit!r}"
        )
        _require(
            limit is None or hasattr(os, "fork"),
            "sandbox_timeout_s needs a system that can fork: leave it at None on this one",
        )
        _check_policy(self.eviction_policy)

    def replace(self, **changes: Any) -> EngineConfig:
        """Return a copy with some fields changed.

        Raises:
            InvalidRequest: There is no field of that name, or its value is out of range.
        """
        known = [field.name for field in dataclasses.fields(self)]
        for name in changes:
            _require(name in known, f"unknown engine option {name!r}; there are {', '.join(known)}")
        return dataclasses.replace(self, **changes)


def _check_policy(policy: object) -> None:
    if isinstance(policy, str):
        try:
            policy_named(policy)
        except UnknownPolicy as error:
            raise InvalidRequest(f"eviction_policy: {error}", field="eviction_policy") from error
    else:
        _require(
            callable(getattr(policy, "key", None)),
            f"eviction_policy must be a name or a policy with a key method, not {policy!r}",
        )


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise InvalidRequest(message)


def _require_positive(name: str, value: object) -> None:
    good = isinstance(value, int) and not isinstance(value, bool) and value >= 1
    _require(good, f"{name} must be a whole number of at least 1, not {value!r}")
