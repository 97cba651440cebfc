"""Searches that go level by level: a beam over steps, diverse verifier tree search, a tree of thoughts breadth first."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from phloem.runtime.errors import InvalidRequest
from phloem.runtime.frontend.search.growth import Growth
from phloem.runtime.frontend.search.node import Node
from phloem.runtime.frontend.search.steps import Step
from phloem.runtime.frontend.search.tree import SearchTree
from phloem.runtime.frontend.search.values import Value

MAX_COUNT = 1_000_000


def breadth_first(
    tree: SearchTree, step: Step, value: Value | Callable[[Node], float], *, keep: int, depth: int
) -> list[Node]:
    """Search a tree of thoughts level by level (Yao et al., 2023): of each level, the best `keep` nodes go on.

    Nodes that are done stay as answers and take no place. What is not kept is pruned, and its memory is free, at once.
    Called again on the same tree, it goes on where it was.

    Returns:
        The leaves that are left, best first, those that are done before the others.

    Raises:
        InvalidRequest: `keep` or `depth` is not a whole number of at least 1, or the value is not finite numbers.
        CacheFull: The budget's blocks do not hold one step.
    """
    check_counts(keep=keep, depth=depth)
    with Growth(tree, step, value) as growth:
        for level in range(depth):
            if not _grow(growth, [node for node in _level(tree, level) if node.is_open]):
                break
            _prune_worst(tree, [node for node in _level(tree, level + 1) if node.is_open], keep)
    return tree.ranked()


def beam(
    tree: SearchTree, step: Step, value: Value | Callable[[Node], float], *, width: int, depth: int
) -> list[Node]:
    """Search by a beam over steps: of new nodes and of those done before, the best `width` stay; the rest is pruned.

    It ends when all that stay are done. Otherwise as `breadth_first`.
    """
    check_counts(width=width, depth=depth)
    with Growth(tree, step, value) as growth:
        for level in range(depth):
            if not _grow(growth, [node for node in _level(tree, level) if node.is_open]):
                break
            done = [node for node in tree.leaves() if node.is_done and node.depth <= level]
            _prune_worst(tree, done + [node for node in _level(tree, level + 1) if not node.is_pruned], width)
    return tree.ranked()


def dvts(tree: SearchTree, step: Step, value: Value | Callable[[Node], float], *, depth: int) -> list[Node]:
    """Diverse verifier tree search (Beeching et al., 2024): each of the first step's nodes is the root of a greedy search.

    In a subtree, the best of a step's nodes goes on. No subtree waits for another.

    Returns:
        One leaf for each subtree, best first, those that are done before the others.

    Raises:
        InvalidRequest: `depth` is not a whole number of at least 1, or the value is not finite numbers.
        CacheFull: The budget's blocks do not hold one step.
    """
    check_counts(depth=depth)
    with Growth(tree, step, value) as growth:
        if not tree.root.children:
            growth.add(tree.root)
            growth.run()
        ends = [end for child in tree.root.children if (end := _greedy_end(tree, child)) is not None]
        while all([growth.add(node) for node in ends if _goes_on(node, depth)]):  # noqa: C419 - add them all
            ends = []
            for family in growth:
                _prune_worst(tree, family, 1)
                ends += [node for node in family if _goes_on(node, depth)]
                # Where the budget ends must not depend on which subtree was first: then they go in step.
                if not tree.ledger.is_limited and ends:
                    growth.add(ends.pop())
            if not ends:
                break
            ends.sort(key=lambda node: node.line()[1].index)
        for family in growth:
            _prune_worst(tree, family, 1)
    return tree.ranked()


def check_counts(**counts: object) -> None:
    """Check numbers by name.

    Raises:
        InvalidRequest: One is not a whole number from 1 to 1,000,000.
    """
    for name, count in counts.items():
        if not isinstance(count, int) or isinstance(count, bool) or not 1 <= count <= MAX_COUNT:
            raise InvalidRequest(
                f"{name} must be a whole number from 1 to {MAX_COUNT:,}, not {count!r}", field=name
            )


def _grow(growth: Growth, nodes: Sequence[Node]) -> bool:
    """Grow the nodes that have no children yet. False if the budget was too small for one, or there is none at all."""
    affordable = True
    for node in nodes:
        affordable = affordable and (bool(node.children) or growth.add(node))
    growth.run()
    return affordable and bool(nodes)


def _level(tree: SearchTree, depth: int) -> list[Node]:
    level = [tree.root]
    for _ in range(depth):
        level = [child for node in level for child in node.children]
    return level


def _prune_worst(tree: SearchTree, nodes: Sequence[Node], keep: int) -> None:
    """Prune all but the best by value; of equal ones, the first stay."""
    for node in sorted(nodes, key=_worth)[keep:]:
        tree.prune(node)


def _greedy_end(tree: SearchTree, node: Node) -> Node | None:
    """Return the end of the line of best nodes; None when it is a dead end."""
    while node.children:
        left = [child for child in node.children if not child.is_pruned]
        if not left:
            return None
        _prune_worst(tree, left, 1)
        node = next(child for child in left if not child.is_pruned)
    return node


def _goes_on(node: Node, depth: int) -> bool:
    return node.is_open and node.depth < depth


def _worth(node: Node) -> float:
    return 0.0 if node.value is None else -node.value
