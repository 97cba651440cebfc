"""Two other prefix indices in plain Python, for contrast: what other engines do, reduced to the look-up.

They keep no locks and evict nothing, so what is measured of them is less than what a cache needs.
"""

from __future__ import annotations

from hashlib import sha256
from typing import Any

from phloem.radix.packing import unpack


class HashChain:
    """A dictionary from the hash of (parent's hash, block's tokens) to a block: exact up to a collision."""

    def __init__(self, block_bytes: int) -> None:
        """An empty index for blocks of `block_bytes` packed bytes."""
        self._block_bytes = block_bytes
        self._blocks: dict[bytes, int] = {}

    def insert(self, path: bytes) -> None:
        """Enters all full blocks of a packed path. O(len(path)) of hashing."""
        for digest in self._digests(path):
            self._blocks.setdefault(digest, len(self._blocks))

    def match(self, path: bytes) -> list[int]:
        """The blocks of the longest known prefix. O(len(path)) of hashing."""
        found = []
        for digest in self._digests(path):
            block = self._blocks.get(digest)
            if block is None:
                break
            found.append(block)
        return found

    def _digests(self, path: bytes) -> Any:
        digest = b""
        size = self._block_bytes
        for start in range(0, len(path) - size + 1, size):
            digest = sha256(digest + path[start : start + size]).digest()
            yield digest


class TokenTrie:
    """A dictionary per token."""

    def __init__(self) -> None:
        """An empty trie."""
        self._root: dict[int, Any] = {}

    def insert(self, path: bytes) -> None:
        """Enters all tokens of a packed path. O(tokens)."""
        node = self._root
        for token in unpack(path):
            node = node.setdefault(token, {})

    def match(self, path: bytes) -> int:
        """The number of tokens of the longest known prefix. O(tokens)."""
        node = self._root
        for count, token in enumerate(unpack(path)):
            child = node.get(token)
            if child is None:
                return count
            node = child
        return len(path) // 4
