"""How many KV blocks an engine gets."""

from __future__ import annotations

import psutil

from phloem.runtime.config import EngineConfig
from phloem.runtime.errors import InvalidRequest

DEFAULT_SHARE = 0.25
DEFAULT_MAX_BYTES = 4 << 30


def pool_size(config: EngineConfig, *, block_bytes: int) -> int:
    """Return the number of blocks: what the config says, or what its memory budget holds.

    Args:
        config: `num_blocks` wins over `kv_memory_bytes`; with neither, a quarter of the memory available now, 4 GiB at most.
        block_bytes: Size of one block, all layers.

    Raises:
        InvalidRequest: The budget does not hold one block, or the blocks do not fit into the machine's memory.
    """
    available = psutil.virtual_memory().available
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
        budget = min(int(available * DEFAULT_SHARE), DEFAULT_MAX_BYTES)
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
