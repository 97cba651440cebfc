"""Token paths as a server sees them: few system prompts, more applications under each, and an own part for everyone.

Which application a path belongs to follows Zipf's law, so that some prefixes are shared by thousands and most by few.
Deterministic. Uses numpy, which the cache itself does not.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

VOCABULARY = 50_000
CHUNK = 1_000


@dataclass(frozen=True, slots=True)
class Shape:
    """The sizes of a workload, in tokens but for the counts."""

    num_paths: int
    own_tokens: int = 304  # on average; from 3/4 to 5/4 of it
    num_systems: int = 16
    system_tokens: int = 256
    num_applications: int = 2_000
    application_tokens: int = 192
    zipf_exponent: float = 1.1


def random_path(num_tokens: int, seed: int) -> bytes:
    """Packed random tokens."""
    return _draw(np.random.default_rng(seed), num_tokens)


def paths(shape: Shape, seed: int = 0) -> Iterator[bytes]:
    """The packed paths of a workload, one after the other; nothing is kept. O(tokens)."""
    prefixes = _prefixes(shape)
    rng = np.random.default_rng([seed, 1])
    ranks = np.arange(1, len(prefixes) + 1, dtype=np.float64)
    weights = ranks**-shape.zipf_exponent
    weights /= weights.sum()
    for start in range(0, shape.num_paths, CHUNK):
        count = min(CHUNK, shape.num_paths - start)
        chosen = rng.choice(len(prefixes), size=count, p=weights)
        lengths = rng.integers(shape.own_tokens * 3 // 4, shape.own_tokens * 5 // 4, size=count)
        for index, length in zip(chosen.tolist(), lengths.tolist(), strict=True):
            yield prefixes[index] + _draw(rng, length)


def _prefixes(shape: Shape) -> list[bytes]:
    rng = np.random.default_rng(0)
    systems = [_draw(rng, shape.system_tokens) for _ in range(shape.num_systems)]
    return [
        systems[number % len(systems)] + _draw(rng, shape.application_tokens)
        for number in range(shape.num_applications)
    ]


def _draw(rng: np.random.Generator, num_tokens: int) -> bytes:
    return rng.integers(0, VOCABULARY, size=num_tokens, dtype=np.int32).tobytes()
