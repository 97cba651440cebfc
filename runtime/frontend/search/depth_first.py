"""A tree of thoughts, depth first."""

from __future__ import annotations

import math
from collections.abc import Callable

from phloem.runtime.errors import InvalidRequest
from phloem.runtime.frontend.search.growth import Growth
from phloem.runtime.frontend.search.levels import check_counts
from phloem.runtime.frontend.search.node import Node, ranked
from phloem.runtime.frontend.search.steps import Step
from phloem.runtime.frontend.search.tree import SearchTree
from phloem.runtime.frontend.search.values import Value


def depth_first(
    tree: SearchTree,
    step: Step,
    value: Value | Callable[[Node], float],
    *,
    depth: int,
    threshold: float = -math.inf,
    enough: float = math.inf,
) -> list[Node]:
    """Search a tree of thoughts depth first (Yao et al., 2023): the best child first, back when its subtree is finished.

    Called again on the same tree, it goes on where it was.

    Args:
        tree: With the prompt.
        step: How a node gets children.
        value: What they are worth.
        depth: Steps of a text at most; texts end there, or where they are done.
        threshold: Nodes worth less are pruned.
        enough: The search ends with the first text that ends and is worth this much.

    Returns:
        The texts that ended, best first.

    Raises:
        InvalidRequest: `depth`, `threshold` or `enough` is no number that fits, or the value is not finite numbers.
        CacheFull: The budget's blocks do not hold one step.
    """
    check_counts(depth=depth)
    for name, number in (("threshold", threshold), ("enough", enough)):
        if not isinstance(number, (int, float)) or math.isnan(number):
            raise InvalidRequest(f"{name} must be a number, not {number!r}", field=name)
    with Growth(tree, step, value) as growth:
        stack = [tree.root]
        while stack:
            node = stack.pop()
            if not node.children and not growth.add(node):
                break
            growth.run()
            _prune_below(tree, node, threshold)
            left = [child for child in node.children if not child.is_pruned]
            if any(_is_end(child, depth) and (child.value or 0.0) >= enough for child in left):
                break
            # The best one on top.
            stack += reversed(ranked([child for child in left if not _is_end(child, depth)]))
    return ranked([node for node in tree.leaves() if _is_end(node, depth)])


def _prune_below(tree: SearchTree, node: Node, threshold: float) -> None:
    for child in node.children:
        if child.value is not None and child.value < threshold:
            tree.prune(child)


def _is_end(node: Node, depth: int) -> bool:
    return node.is_done or node.depth >= depth
