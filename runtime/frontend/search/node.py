"""A node of a search tree: the tokens of one step, and what the search knows of them."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field


@dataclass(slots=True, eq=False)
class Node:
    """One step of a text. It holds its own tokens only: a path's tokens are those of the nodes on the way to it.

    Made and changed by `SearchTree` and the searches; the rest of the world reads.
    """

    parent: Node | None
    index: int
    """Its number among its parent's children."""

    depth: int
    """Steps from the root, which has 0."""

    start: int
    """Tokens before its own, the prompt's included."""

    tokens: array[int]
    """Its own: of the root, the prompt."""

    decode: Callable[[Sequence[int]], str] = field(repr=False)
    """From token ids to text."""

    children: list[Node] = field(default_factory=list, repr=False)
    value: float | None = None
    """What the search's `Value` said."""

    logprob: float | None = None
    """Natural log-probability of its own tokens; None unless `SamplingParams.logprobs` asked for it."""

    is_done: bool = False
    """Whether the text ends here: nothing is grown from it."""

    is_pruned: bool = False
    """Whether the search gave it up, and what is under it."""

    visits: int = 0
    """For Monte Carlo tree search: values that were found at it or under it."""

    total: float = 0.0
    """The sum of these values."""

    @property
    def end(self) -> int:
        """Tokens of the whole path, its own included."""
        return self.start + len(self.tokens)

    @property
    def text(self) -> str:
        """Its own step as text, without special tokens."""
        return self.decode(self.tokens.tolist())

    @property
    def path_text(self) -> str:
        """All steps from the prompt (which is not part of it) to this one, as one text. O(tokens)."""
        own: list[int] = []
        for node in self.line()[1:]:
            own += node.tokens
        return self.decode(own)

    @property
    def path_token_ids(self) -> list[int]:
        """The whole path's tokens, the prompt included. O(tokens)."""
        ids: list[int] = []
        for node in self.line():
            ids += node.tokens
        return ids

    @property
    def is_open(self) -> bool:
        """Whether a search may go on from it."""
        return not self.is_done and not self.is_pruned

    @property
    def mean_logprob(self) -> float:
        """`logprob` per token; 0 where it was not asked for."""
        return 0.0 if self.logprob is None else self.logprob / max(1, len(self.tokens))

    @property
    def name(self) -> str:
        """Its place: the numbers on the way to it, as in "0.2.1"; of the root, "root"."""
        return ".".join(str(node.index) for node in self.line()[1:]) or "root"

    def line(self) -> list[Node]:
        """Return the nodes from the root to this one. O(depth)."""
        nodes = [self]
        while nodes[-1].parent is not None:
            nodes.append(nodes[-1].parent)
        return nodes[::-1]

    def walk(self) -> Iterator[Node]:
        """Yield it and all under it, parents before children, in the order of their numbers."""
        stack = [self]
        while stack:
            node = stack.pop()
            yield node
            stack += reversed(node.children)


def ranked(nodes: Sequence[Node]) -> list[Node]:
    """Return nodes best first: those that are done, then by value; equal ones stay in their order."""
    worst = float("-inf")
    return sorted(nodes, key=lambda node: (not node.is_done, -(worst if node.value is None else node.value)))
