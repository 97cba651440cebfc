"""What tests of tree searches ask of a tree."""

from __future__ import annotations

import zlib
from pathlib import Path

from phloem.runtime import Engine, SamplingParams
from phloem.runtime.frontend.search import Node, Sample, SearchTree

PROMPT = "Once there was a tree; it grew and grew, until"


def make_engine(path: Path, **options: object) -> Engine:
    return Engine(path, dtype="float32", **{"num_blocks": 512, **options})


def sample(n: int, **options: object) -> Sample:
    return Sample(n, SamplingParams(**{"max_tokens": 8, "ignore_eos": True, "temperature": 2.0, **options}))  # type: ignore[arg-type]


def worth(node: Node) -> float:
    """A value from 0 to 1 that is as good as random, and the same for the same path."""
    return zlib.crc32(repr(node.path_token_ids).encode()) / 2**32


def tokens_of(tree: SearchTree) -> int:
    """The tokens of all nodes."""
    return sum(len(node.tokens) for node in tree.nodes())


def distinct_tokens(tree: SearchTree) -> int:
    """The same, but what siblings have in common counts once: the size of a trie of all paths."""
    seen: dict[tuple[int, int], int] = {}
    ends: dict[Node | None, int] = {None: 0}
    for node in tree.nodes():
        place = ends[node.parent]
        for token in node.tokens:
            place = seen.setdefault((place, token), len(seen) + 1)
        ends[node] = place
    return len(seen)


def shape(tree: SearchTree) -> list[tuple[object, ...]]:
    """All that a search decides, in a form that can be compared."""
    return [
        (node.name, node.tokens.tolist(), node.value, node.is_done, node.is_pruned, node.visits)
        for node in tree.nodes()
    ]
