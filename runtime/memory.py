"""How many KV blocks an engine gets."""

from __future__ import annotations

from phloem.runtime.config import EngineConfig
from phloem.runtime.errors import InvalidRequest

CPU_SHARE = 0.25
"""Of the memory available: what KV gets on a CPU, where other programs live, too,"""
CPU_MAX_BYTES = 4 << 30
"""and at most that."""
GPU_SHARE = 0.9
"""Of what is free on a GPU beside the weights and the largest step."""


def pool_size(config: EngineConfig, *, block_bytes: int, available: int, default: int) -> int:
    """Return the number of blocks: what the config says, or what its memory budget holds.

    Args:
        config: `num_blocks` wins over `kv_memory_bytes`; with neither, `default`.
        block_bytes: Size of one block, all layers.
        available: Bytes that could be had.
        default: Bytes to take when the config says nothing.

    Raises:
        InvalidRequest: The budget does not hold one block, or the blocks do not fit into the machine's memory.
    """
    if config.num_blocks is not None:
        needed = config.num_blocks * block_bytes
        if needed > available:
            raise InvalidRequest(
                f"num_blocks={config.num_blocks} needs {_mib(needed)} for KV, and {_mib(available)} of memory are available; "
                f"at most {available // block_bytes} blocks fit"
            )
        return config.num_blocks
    budget = config.kv_memory_bytes
    if budget is None:
        budget = default
    elif budget > available:
        raise InvalidRequest(
            f"kv_memory_bytes={budget} is more than the {_mib(available)} of memory that are available"
        )
    if budget < block_bytes:
        raise InvalidRequest(
            f"a KV memory budget of {budget} bytes does not hold one block of {block_bytes} bytes; raise kv_memory_bytes "
            "or lower block_size"
        )
    return budget // block_bytes


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:,.1f} MiB"
