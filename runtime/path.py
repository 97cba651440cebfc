"""A path of tokens, and what it holds of the KV memory. The state under every request and every branch.

The tokens of a path fall into three half-open intervals, and each has one owner of the KV::

    [0, committed)          whole blocks in the tree, locked by this path through `ref`
    [committed, computed)   KV written, in private blocks of this path (at rest: less than one block, the *tail*)
    [computed, len(tokens)) known tokens that no step has run yet: a prompt's rest, or the token just sampled

A *suspended* path holds nothing but its tokens. It resumes with a hit on whatever of it is still in the tree.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field

from phloem.radix import Namespace, NodeRef


@dataclass(slots=True, eq=False)
class SharedTail:
    """A private, partly filled block that several paths read after a fork.

    Whoever writes to it first copies its rows to a block of his own; the last one keeps it.
    """

    block: int
    num_sharers: int


@dataclass(frozen=True, slots=True)
class Sighting:
    """How much of a path the tree had, when the cache was at `version` and the path had `path_len` tokens."""

    version: int
    path_len: int
    num_tokens: int
    """In whole blocks."""

    tail_tokens: int
    """Beyond these, in part of one more block."""

    last_block: int | None
    """The last of the whole blocks; None when there is none."""


@dataclass(slots=True, eq=False)
class Path:
    """Tokens, and the KV held for them. `PathCache` alone changes it, but for `tokens`, which its user appends to."""

    namespace: Namespace
    tokens: array[int]
    """The whole path as int32."""

    block_table: list[int] = field(default_factory=list)
    ref: NodeRef | None = None
    """The locked end of the committed interval. None while suspended."""

    num_committed: int = 0
    """Tokens; a multiple of the block size."""

    num_computed: int = 0
    tail: SharedTail | None = None
    """Set while the tail block may have other readers."""

    label: str | None = None
    """The request that ran on it last: what `explain` names when another path leaves this one."""

    sighting: Sighting | None = None
    """The last look into the tree, so that nobody looks again while nothing has changed."""

    @property
    def is_resident(self) -> bool:
        """Whether it holds a lock or blocks."""
        return self.ref is not None or bool(self.block_table)
