"""Where FlashInfer comes from, and why it can't be used where it can't.

The package is imported by `load_flashinfer` only, so that a machine without it, or without a GPU, never pays for it.
"""

import importlib
import importlib.util
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Protocol

import torch

from phloem.kernels.attention import AttentionSpec

HEAD_DIMS = (64, 128, 256)
"""Head sizes that every kernel used here is instantiated for."""
Q_DTYPES = (torch.float16, torch.bfloat16)
KV_8BIT_DTYPES = (torch.float8_e4m3fn, torch.float8_e5m2)
_8BIT_BLOCK_SIZE = 16
_MIN_CAPABILITY = (8, 0)
_MIN_VERSION = (0, 6, 18)
_MAX_VERSION = (0, 7)


class FlashInferUnavailable(RuntimeError):
    """FlashInfer can't run here, or not for this model; the message says why and names the way out."""


class PagedWrapper(Protocol):
    """The part of FlashInfer's paged wrappers that is used, called with the arguments of `flashinfer_calls`."""

    def plan(self, **kwargs: Any) -> None:
        """Take the rows of a step."""

    def run(self, **kwargs: Any) -> Any:
        """Attend in one layer; returns the output, with `return_lse` a pair of it and the log-sum-exp."""

    def reset_workspace_buffer(self, **kwargs: Any) -> None:
        """Use other scratch memory."""


@dataclass(frozen=True, slots=True)
class FlashInferLibrary:
    """FlashInfer's entry points; the tests put an emulator here."""

    prefill_wrapper: Callable[..., PagedWrapper]
    decode_wrapper: Callable[..., PagedWrapper]
    merge_state_in_place: Callable[..., None]
    rmsnorm: Callable[..., Any]
    silu_and_mul: Callable[..., Any]
    apply_rope: Callable[..., Any]
    """`apply_rope_with_cos_sin_cache`."""


def load_flashinfer() -> FlashInferLibrary:
    """Import FlashInfer.

    Raises:
        FlashInferUnavailable: no package, a version without these calls, or no GPU that it runs on.
    """
    reason = why_unavailable()
    if reason is not None:
        raise FlashInferUnavailable(f'{reason}; use the "cpu" backend')
    try:
        flashinfer = importlib.import_module("flashinfer")
    except ImportError as error:
        raise FlashInferUnavailable(
            f'flashinfer-python can\'t be imported ({error}); reinstall "phloem[gpu]", or use the "cpu" backend'
        ) from error
    return FlashInferLibrary(
        prefill_wrapper=flashinfer.BatchPrefillWithPagedKVCacheWrapper,
        decode_wrapper=flashinfer.BatchDecodeWithPagedKVCacheWrapper,
        merge_state_in_place=flashinfer.merge_state_in_place,
        rmsnorm=flashinfer.rmsnorm,
        silu_and_mul=flashinfer.silu_and_mul,
        apply_rope=flashinfer.apply_rope_with_cos_sin_cache,
    )


def why_unavailable() -> str | None:
    """Tell what keeps FlashInfer from running on this machine; None if nothing is known to."""
    return why_no_package() or _why_no_gpu() or _why_no_compiler()


def why_no_package() -> str | None:
    """Tell why the package can't be used, whatever the machine. Imports nothing."""
    try:
        found = version("flashinfer-python")
    except PackageNotFoundError:
        return 'flashinfer-python is not installed (pip install "phloem[gpu]")'
    if not _MIN_VERSION <= _release(found) < _MAX_VERSION:
        return f"flashinfer-python {found} is installed; phloem is made for 0.6.18 and later 0.6"
    return None


def why_unsupported(
    spec: AttentionSpec, *, q_dtype: torch.dtype, kv_dtype: torch.dtype, block_size: int
) -> str | None:
    """Tell what about a model FlashInfer has no code for, or nobody has told us that it has; None if nothing."""
    if spec.head_dim not in HEAD_DIMS:
        return f"FlashInfer runs head_dim {', '.join(map(str, HEAD_DIMS))}; the model has {spec.head_dim}"
    if q_dtype not in Q_DTYPES:
        return f"FlashInfer computes in float16 or bfloat16; the model's dtype is {q_dtype}"
    if kv_dtype != q_dtype and kv_dtype not in KV_8BIT_DTYPES:
        return f"the KV dtype is {kv_dtype}; with a model in {q_dtype} it must be that, float8_e4m3fn or float8_e5m2"
    if kv_dtype in KV_8BIT_DTYPES and block_size != _8BIT_BLOCK_SIZE:
        return f"8-bit KV needs blocks of {_8BIT_BLOCK_SIZE} tokens; the store has {block_size}"
    return None


def _why_no_gpu() -> str | None:
    if torch.version.cuda is None:
        return f"torch {torch.__version__} is built without CUDA"
    if not torch.cuda.is_available():
        return "torch finds no CUDA device (is a driver installed?)"
    capability = torch.cuda.get_device_capability()
    if capability < _MIN_CAPABILITY:
        found, wanted = (".".join(map(str, pair)) for pair in (capability, _MIN_CAPABILITY))
        name = torch.cuda.get_device_name()
        return f"{name} has compute capability {found}; FlashInfer's kernels need {wanted}"
    return None


def _why_no_compiler() -> str | None:
    """Without prebuilt kernels, FlashInfer compiles its own when they are first used."""
    if importlib.util.find_spec("flashinfer_jit_cache") is not None:
        return None
    from torch.utils.cpp_extension import CUDA_HOME

    if CUDA_HOME is None and shutil.which("nvcc") is None:
        return "FlashInfer compiles its kernels, and there is no nvcc (install it, or flashinfer-jit-cache)"
    return None


def _release(text: str) -> tuple[int, ...]:
    """The leading numbers of a version: 0.6.18.post1 is (0, 6, 18)."""
    numbers = []
    for part in text.split("."):
        if not part.isdigit():
            break
        numbers.append(int(part))
    return tuple(numbers)
