"""The embedded default backend: compiled C++ where a compiler is found, plain torch elsewhere.

Both do the same thing in the same structure, so that a row's bits depend on its own path alone. The KV of a path is cut
in *spans* of 256 tokens at absolute positions. Each span gives a partial result, computed from scratch in float32::

    m = max of its scores      l = sum of exp(score - m)      O = sum of exp(score - m) * value

and the partials are merged in span order, by rescaling to the common maximum. A span without a visible key is skipped.
Neither the tile of queries that a row ran in, nor the thread, nor the step that wrote the KV enters this arithmetic. The
two implementations round differently from each other: choose one per process and stay with it.
"""

import ctypes
import logging
import os
from collections.abc import Mapping

from phloem.kernels.attention import AttentionSpec
from phloem.kernels.cpu_linear import LinearKernel
from phloem.kernels.cpu_native import NativeBackend, why_unsupported
from phloem.kernels.cpu_ops import native_ops
from phloem.kernels.cpu_torch import TorchBackend
from phloem.kernels.fused_ops import FusedOps, torch_ops
from phloem.kernels.kv_store import PagedKVStore
from phloem.kernels.native_build import BuildError, load_library

CHOICE_VARIABLE = "PHLOEM_CPU_KERNEL"
"""Environment variable: "native" insists on the compiled kernel, "torch" on the fallback; unset takes what works."""

_logger = logging.getLogger(__name__)


def make_cpu_backend(
    spec: AttentionSpec,
    store: PagedKVStore,
    *,
    num_threads: int | None = None,
    environ: Mapping[str, str] = os.environ,
) -> NativeBackend | TorchBackend:
    """Make the compiled backend, or the torch one (its `build_error` says why) where it can't be had.

    Args:
        spec: The model's attention.
        store: Its KV.
        num_threads: Threads of the compiled kernel; None follows torch.get_num_threads().
        environ: Where PHLOEM_CPU_KERNEL and the variables of `native_build` are looked up.

    Raises:
        ValueError: an unknown value of PHLOEM_CPU_KERNEL, or a shape that the insisted-on kernel has no code for.
        BuildError: PHLOEM_CPU_KERNEL is "native" and the kernel can't be built.
    """
    choice = environ.get(CHOICE_VARIABLE, "")
    if choice not in ("", "native", "torch"):
        raise ValueError(f"{CHOICE_VARIABLE} is {choice!r}; use native, torch, or leave it unset")
    if choice == "torch":
        return TorchBackend(spec, store, build_error=f"{CHOICE_VARIABLE} is set to torch")
    if choice == "native":
        return NativeBackend(spec, store, library=load_library(environ), num_threads=num_threads)
    reason = why_unsupported(spec, store)
    if reason is None:
        try:
            return NativeBackend(spec, store, library=load_library(environ), num_threads=num_threads)
        except BuildError as error:
            reason = str(error)
    _logger.info("the cpu backend runs on torch operations, which is slower: %s", reason)
    return TorchBackend(spec, store, build_error=reason)


def make_cpu_ops(environ: Mapping[str, str] = os.environ) -> FusedOps:
    """Make the compiled operations between matrix products, or torch's where no compiler is found.

    Raises:
        BuildError: PHLOEM_CPU_KERNEL is "native" and they can't be built.
    """
    library = _library(environ)
    return torch_ops() if library is None else native_ops(library)


def make_cpu_linear(environ: Mapping[str, str] = os.environ, *, int8: bool = False) -> LinearKernel | None:
    """Make the compiled linear layers, or None where there is no compiler, or PHLOEM_CPU_KERNEL is "torch".

    Args:
        environ: As of `make_cpu_backend`.
        int8: See `LinearKernel`.

    Raises:
        BuildError: PHLOEM_CPU_KERNEL is "native" and they can't be built.
    """
    library = _library(environ)
    return None if library is None else LinearKernel(library, int8=int8)


def _library(environ: Mapping[str, str]) -> ctypes.CDLL | None:
    """The compiled code; None where it is not wanted, or can't be had and is not insisted on."""
    choice = environ.get(CHOICE_VARIABLE, "")
    if choice == "torch":
        return None
    try:
        return load_library(environ)
    except BuildError:
        if choice == "native":
            raise
        return None
