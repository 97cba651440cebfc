"""What remembering evicted paths costs: time beside a cache that remembers none, and bytes per token; and leases."""

from __future__ import annotations

import gc
import tracemalloc
from collections.abc import Callable, Iterable
from statistics import median
from time import perf_counter_ns

from phloem.radix.bench.timing import Row, garbage_collection_off, median_us
from phloem.radix.bench.workload import Shape, paths
from phloem.radix.cache import GHOST_BYTES_PER_TOKEN, RadixCache
from phloem.radix.namespace import Namespace
from phloem.radix.packing import TOKEN_BYTES
from phloem.radix.pool import BlockPool

BLOCK_SIZE = 16
BLOCK_BYTES = BLOCK_SIZE * TOKEN_BYTES
NAMESPACE = Namespace()
EVICTED_BLOCKS = 256
EVICTIONS = 20
MAX_BYTES_PER_TOKEN = 4.0


def ghost_rows(num_paths: int, samples: int, progress: Callable[[str], None]) -> list[Row]:
    """Runs `num_paths` paths through caches that hold a quarter of them, one with a ghost and one without."""
    progress(f"{num_paths:,} paths through a small cache, with a ghost and without")
    shape = Shape(num_paths)
    pool_blocks = num_paths // 4 * shape.own_tokens // BLOCK_SIZE
    without = RadixCache(BlockPool(pool_blocks), BLOCK_SIZE, ghost_bytes=0)
    room = GHOST_BYTES_PER_TOKEN * pool_blocks * BLOCK_SIZE
    full = RadixCache(BlockPool(pool_blocks), BLOCK_SIZE, ghost_bytes=room)
    seen: list[bytes] = []
    plain_us, ghost_us = _allocate([without, full], paths(shape), seen, samples)
    group = f"{num_paths:,} paths through a pool for a quarter: a full ghost"
    rows = [
        Row(group, "allocate for a path, no ghost", plain_us, "µs"),
        Row(
            group, "allocate for a path, full ghost", ghost_us, "µs", note=f"{ghost_us / plain_us:.2f} x that"
        ),
    ]
    rows += _questions(group, full, seen)
    plain_us, ghost_us = _evict([without, full])
    note = f"{ghost_us / plain_us:.2f} x that"
    rows += [
        Row(group, f"evict {EVICTED_BLOCKS} blocks, no ghost", plain_us, "µs"),
        Row(group, f"evict {EVICTED_BLOCKS} blocks, full ghost", ghost_us, "µs", note=note),
        _counted(group, full),
    ]
    progress("the memory of what was evicted")
    tails = Shape(num_paths // 10, own_tokens=64)
    rows.append(_allocated(group, "the same, as allocated", Shape(num_paths // 10), MAX_BYTES_PER_TOKEN))
    rows.append(_allocated(group, "own parts of 48 to 80 tokens", tails, None))
    return rows


def _allocate(
    caches: list[RadixCache], stream: Iterable[bytes], seen: list[bytes], samples: int
) -> tuple[float, ...]:
    """Runs all paths through each cache; median µs of allocating for one of the last, and these paths in `seen`."""
    times: list[list[int]] = [[] for _ in caches]
    with garbage_collection_off():
        for path in stream:
            seen.append(path)
            del seen[:-samples]
            for cache, taken in zip(caches, times, strict=True):
                start = perf_counter_ns()
                blocks = cache.allocate(len(path) // BLOCK_BYTES)
                taken.append(perf_counter_ns() - start)
                cache.insert(NAMESPACE, path, blocks)
    return tuple(median(taken[-samples:]) / 1_000 for taken in times)


def _evict(caches: list[RadixCache]) -> tuple[float, ...]:
    times: list[list[float]] = [[] for _ in caches]
    for _ in range(EVICTIONS):
        for cache, taken in zip(caches, times, strict=True):
            taken.append(median_us(cache.evict, [EVICTED_BLOCKS]))
    return tuple(map(median, times))


def _questions(group: str, cache: RadixCache, seen: list[bytes]) -> list[Row]:
    def explain(path: bytes) -> object:
        return cache.explain(NAMESPACE, path)

    def pin(path: bytes) -> None:
        cache.pin(NAMESPACE, path).release()

    # The older of these paths are evicted already where the pool is small; the last is always there to be pinned.
    explain_us, pin_us = median_us(explain, seen), median_us(pin, seen[-1:] * len(seen))
    return [
        Row(group, "explain a path", explain_us, "µs"),
        Row(group, "pin a path and release it", pin_us, "µs"),
    ]


def _counted(group: str, cache: RadixCache) -> Row:
    stats = cache.stats()
    note = f"{stats.ghost_tokens:,} tokens in {stats.ghost_bytes:,} bytes of {stats.max_ghost_bytes:,}"
    per_token = stats.ghost_bytes / max(1, stats.ghost_tokens)
    return Row(group, "per remembered token, as counted", per_token, "bytes", MAX_BYTES_PER_TOKEN, note)


def _allocated(group: str, name: str, shape: Shape, target: float | None) -> Row:
    """Evicts all paths of a shape, and measures by what is freed as they are forgotten."""
    prefixes = shape.num_systems * shape.system_tokens + shape.num_applications * shape.application_tokens
    num_blocks = (prefixes + (shape.num_paths + 1) * shape.own_tokens * 5 // 4) // BLOCK_SIZE
    cache = RadixCache(BlockPool(num_blocks), BLOCK_SIZE, ghost_bytes=2**40)
    for path in paths(shape):
        cache.insert(NAMESPACE, path, cache.allocate(len(path) // BLOCK_BYTES))
    tracemalloc.start()
    cache.evict(num_blocks)
    num_tokens = cache.stats().ghost_tokens
    gc.collect()
    before = tracemalloc.get_traced_memory()[0]
    cache.clear()
    per_token = (before - tracemalloc.get_traced_memory()[0]) / num_tokens
    tracemalloc.stop()
    return Row(group, name, per_token, "bytes", target, f"{num_tokens:,} tokens remembered")
