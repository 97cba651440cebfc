"""What `phloem bench radix` measures, and the targets that the numbers must meet.

- *long path*: the match of one cached path of 131,072 tokens, beside a memory compare of the same bytes;
- *scale*: the operations at 1,000 and at 100,000 cached paths (30 million tokens), which should cost the same;
- *memory*: resident bytes per cached token;
- *full ghost*: what it costs to remember evicted paths, in time and in bytes per token; and leases (ghost.py);
- *contrast*: this tree beside a hash chain and a trie over tokens, on the same paths and queries.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from statistics import median

from phloem.radix.bench.alternatives import HashChain, TokenTrie
from phloem.radix.bench.ghost import ghost_rows
from phloem.radix.bench.timing import Row, median_us, resident_bytes
from phloem.radix.bench.workload import Shape, paths, random_path
from phloem.radix.cache import RadixCache
from phloem.radix.namespace import Namespace
from phloem.radix.packing import TOKEN_BYTES
from phloem.radix.pool import BlockPool
from phloem.radix.results import PrefixMatch

BLOCK_SIZE = 16
BLOCK_BYTES = BLOCK_SIZE * TOKEN_BYTES
NAMESPACE = Namespace()
EVICTED_BLOCKS = 256
ROUNDS = 5
OTHERS = "beside other indices"
"""How the name of the group ends in which this tree stands beside the plain alternatives."""

MATCH = "match, packed tokens"
EVICT = f"evict {EVICTED_BLOCKS} blocks"
# At both sizes; at the large one, besides, no more than twice the time of the small one.
TARGETS_US = {MATCH: 20.0, EVICT: 2_000.0}

Progress = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class _Sizes:
    long_tokens: int
    long_nodes: int
    small: int  # paths
    large: int
    samples: int


FULL = _Sizes(long_tokens=131_072, long_nodes=512, small=1_000, large=100_000, samples=1_000)
QUICK = _Sizes(long_tokens=131_072, long_nodes=512, small=1_000, large=10_000, samples=200)


def run(*, quick: bool = False, progress: Progress = lambda message: None) -> list[Row]:
    """Runs the benchmark; under three minutes, under ten seconds when `quick`.

    Args:
        quick: 10,000 paths instead of 100,000, and fewer samples.
        progress: Called with a line on what is being measured.
    """
    sizes = QUICK if quick else FULL
    rows = _long_path(sizes, progress)
    rows += _scale(sizes, progress)
    rows += ghost_rows(sizes.large, sizes.samples, progress)
    progress("other indices")
    return rows + _contrast(sizes)


def _long_path(sizes: _Sizes, progress: Progress) -> list[Row]:
    progress(f"one path of {sizes.long_tokens:,} tokens")
    path = random_path(sizes.long_tokens, seed=1)
    same = bytes(bytearray(path))
    rounds = range(200)
    compare = median_us(lambda _: path == same, rounds)
    group = f"match of {sizes.long_tokens:,} tokens"
    rows = [Row(group, "memory compare of the bytes", compare, "µs")]
    limit = 3 * compare + 20
    whole = _long_cache(path, num_nodes=1)
    rows.append(
        Row(
            group,
            "1 node",
            median_us(lambda _: whole.match(NAMESPACE, same), rounds),
            "µs",
            limit,
            "3 compares + 20",
        )
    )
    cut = _long_cache(path, num_nodes=sizes.long_nodes)
    rows.append(
        Row(
            group,
            f"{sizes.long_nodes} nodes",
            median_us(lambda _: cut.match(NAMESPACE, same), rounds),
            "µs",
            limit + 0.5 * sizes.long_nodes,
            "3 compares + 20 + 0.5 per node",
        )
    )
    return rows


def _long_cache(path: bytes, *, num_nodes: int) -> RadixCache:
    num_blocks = len(path) // BLOCK_BYTES
    cache = RadixCache(BlockPool(num_blocks), BLOCK_SIZE)
    cache.insert(NAMESPACE, path, cache.allocate(num_blocks))
    for number in range(1, num_nodes):
        ref = cache.match(NAMESPACE, path[: number * (num_blocks // num_nodes) * BLOCK_BYTES]).node
        cache.lock(ref)
        cache.unlock(ref)
    return cache


@dataclass(frozen=True, slots=True)
class _Bed:
    """A filled cache and what is asked of it."""

    shape: Shape
    cache: RadixCache
    queries: list[bytes]  # each a cached path and 40 more tokens
    fresh: list[bytes]  # paths to insert
    memory: list[Row]


def _scale(sizes: _Sizes, progress: Progress) -> list[Row]:
    beds = []
    for num_paths in (sizes.small, sizes.large):
        progress(f"filling a cache with {num_paths:,} paths")
        beds.append(_make_bed(Shape(num_paths), sizes.samples))
    progress("the same operations on both, in turns")
    rounds = [[_measure(bed, number) for bed in beds] for number in range(ROUNDS)]
    small, large = ({name: median(r[bed][name] for r in rounds) for name in rounds[0][bed]} for bed in (0, 1))
    group = f"{sizes.small:,} paths"
    rows = [Row(group, name, value, "µs", TARGETS_US.get(name)) for name, value in small.items()]
    for name, value in large.items():
        target = TARGETS_US.get(name)
        limit = None if target is None else min(target, 2 * small[name])
        ratio = f"{value / small[name]:.2f} x that of {sizes.small:,}"
        rows.append(Row(f"{sizes.large:,} paths", name, value, "µs", limit, ratio))
    return rows + beds[1].memory


def _make_bed(shape: Shape, samples: int) -> _Bed:
    before = resident_bytes()
    pool = BlockPool(_blocks_needed(shape, samples))
    with_pool = resident_bytes()
    cache, known = _fill(pool, shape, samples)
    after = resident_bytes()
    memory = []
    if before is not None and with_pool is not None and after is not None:
        tokens = pool.num_cached * BLOCK_SIZE
        used = after - before - sum(map(len, known))
        group = f"{shape.num_paths:,} paths: memory"
        note = f"{tokens:,} tokens in {cache.stats().nodes:,} nodes"
        memory = [
            Row(group, "per cached token, all in", used / tokens, "bytes", 12.0, note),
            Row(group, "of which the pool's own", (with_pool - before) / tokens, "bytes"),
        ]
    queries = [path + random_path(40, seed) for seed, path in enumerate(known)]
    fresh = list(paths(replace(shape, num_paths=samples), seed=2))
    return _Bed(shape, cache, queries, fresh, memory)


def _blocks_needed(shape: Shape, samples: int) -> int:
    """Room for all paths, for those inserted while measuring, and for one path's duplicates."""
    prefixes = shape.num_systems * shape.system_tokens + shape.num_applications * shape.application_tokens
    return (prefixes + (shape.num_paths + samples + 50) * shape.own_tokens * 21 // 20) // BLOCK_SIZE


def _fill(pool: BlockPool, shape: Shape, samples: int) -> tuple[RadixCache, list[bytes]]:
    """A cache with all paths of `shape`, and some of these paths in random order."""
    cache = RadixCache(pool, BLOCK_SIZE)
    every = max(1, shape.num_paths // samples)
    known = []
    for number, path in enumerate(paths(shape)):
        cache.insert(NAMESPACE, path, cache.allocate(len(path) // BLOCK_BYTES))
        if number % every == 0:
            known.append(path)
    random.Random(1).shuffle(known)
    return cache, known


def _measure(bed: _Bed, number: int) -> dict[str, float]:
    """Medians in µs of one round. What it inserts and evicts differs from round to round."""
    cache = bed.cache
    unpacked = [list(memoryview(query).cast("i")) for query in bed.queries]
    fresh = bed.fresh[number::ROUNDS]
    tables = [cache.allocate(len(path) // BLOCK_BYTES) for path in fresh]

    def admit(query: bytes) -> None:
        cache.unlock(cache.acquire(NAMESPACE, query, num_blocks=0).node)

    return {
        MATCH: median_us(lambda query: cache.match(NAMESPACE, query), bed.queries),
        "match, list of ints": median_us(lambda query: cache.match(NAMESPACE, query), unpacked),
        "acquire and unlock": median_us(admit, bed.queries),
        "insert": median_us(lambda i: cache.insert(NAMESPACE, fresh[i], tables[i]), range(len(fresh))),
        EVICT: median_us(lambda _: cache.evict(EVICTED_BLOCKS), range(5)),
    }


def _contrast(sizes: _Sizes) -> list[Row]:
    """This tree and the others on the same paths and queries: a match, a long match, and an insert."""
    shape = Shape(sizes.small)
    known = list(paths(shape))
    queries = [path + random_path(40, seed) for seed, path in enumerate(known[: sizes.samples])]
    long = random_path(sizes.long_tokens, seed=1)
    group = f"{shape.num_paths:,} paths: {OTHERS}"
    indices: dict[str, Callable[[], HashChain | TokenTrie | _TreeIndex]] = {
        "this tree": lambda: _TreeIndex(_blocks_needed(shape, 0) + len(long) // BLOCK_BYTES),
        "hash chain (SHA-256 per block)": lambda: HashChain(BLOCK_BYTES),
        "trie over tokens": TokenTrie,
    }
    times: dict[str, dict[str, float]] = {}
    for name, make in indices.items():
        index = make()
        insert_us = median_us(index.insert, known)
        index.insert(long)
        times[name] = {
            "match": median_us(index.match, queries),
            f"match of {sizes.long_tokens:,} tokens": median_us(index.match, [long] * 5),
            "insert": insert_us,
        }
    ours = times["this tree"]
    return [
        Row(
            group,
            f"{what}: {name}",
            of[what],
            "µs",
            note="" if name == "this tree" else f"{of[what] / ours[what]:.1f} x this tree",
        )
        for what in ours
        for name, of in times.items()
    ]


class _TreeIndex:
    """The cache as an index like the others: it owns the blocks that a path needs."""

    def __init__(self, num_blocks: int) -> None:
        self._cache = RadixCache(BlockPool(num_blocks), BLOCK_SIZE)

    def insert(self, path: bytes) -> None:
        self._cache.insert(NAMESPACE, path, self._cache.allocate(len(path) // BLOCK_BYTES))

    def match(self, path: bytes) -> PrefixMatch:
        return self._cache.match(NAMESPACE, path)
