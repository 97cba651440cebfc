"""Monte Carlo tree search, with the rules UCT and PUCT."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from phloem.runtime.errors import InvalidRequest
from phloem.runtime.frontend.search.growth import Growth
from phloem.runtime.frontend.search.levels import check_counts
from phloem.runtime.frontend.search.node import Node
from phloem.runtime.frontend.search.steps import Sample, Step
from phloem.runtime.frontend.search.tree import SearchTree
from phloem.runtime.frontend.search.values import Value


class Rule(Protocol):
    """Says which child of a node a search looks at next: the one with the highest score."""

    def score(self, *, mean: float, visits: int, parent_visits: int, prior: float) -> float:
        """Return a child's score.

        Args:
            mean: Of the values found at the child and under it.
            visits: How many these are, those under way included: at least 1.
            parent_visits: The same of the parent.
            prior: How likely the model thinks the child, among its siblings; they sum to 1.
        """


@dataclass(frozen=True, slots=True)
class Uct:
    """UCT (Kocsis and Szepesvári, 2006), for values from 0 to 1."""

    exploration: float = math.sqrt(2)

    def score(self, *, mean: float, visits: int, parent_visits: int, prior: float) -> float:
        """See :class:`Rule`."""
        return mean + self.exploration * math.sqrt(math.log(parent_visits) / visits)


@dataclass(frozen=True, slots=True)
class Puct:
    """PUCT (Silver et al., 2017), for values from 0 to 1: what the model finds likely is looked at sooner."""

    exploration: float = 1.5

    def score(self, *, mean: float, visits: int, parent_visits: int, prior: float) -> float:
        """See :class:`Rule`."""
        return mean + self.exploration * prior * math.sqrt(parent_visits) / (1 + visits)


def mcts(
    tree: SearchTree,
    step: Step,
    value: Value | Callable[[Node], float],
    *,
    expansions: int,
    depth: int = 64,
    rule: Rule | None = None,
    parallel: int = 1,
) -> list[Node]:
    """Grow the leaf that the rule leads to, again and again; the value of each new node counts for all above it.

    A value takes the place of the random playout; one that wants a playout can generate on a fork of `tree.branch(node)`. Leaves
    under way count as visited (Liu et al., 2020), and their results are used in the order in which they were chosen, so that
    the tree does not depend on timing. Called again on the same tree it goes on where it was, and with `parallel=1` as if it
    had not been interrupted. A leaf that it comes back to costs nothing while its KV is cached, and otherwise its recomputation.

    Args:
        tree: With the prompt.
        step: How a node gets children. `Puct` needs their log-probabilities: `SamplingParams(logprobs=0)`.
        value: What they are worth, from 0 to 1 for the rules here.
        expansions: Nodes of the tree that grow, those of earlier calls included.
        depth: Steps of a text at most.
        rule: `Uct()` by default.
        parallel: Leaves that grow at the same time.

    Returns:
        The leaves, best first, those that are done before the others.

    Raises:
        InvalidRequest: A number is not a whole one of at least 1, `Puct` has no log-probabilities, or the value is not finite numbers.
        CacheFull: The budget's blocks do not hold one step.
    """
    check_counts(expansions=expansions, depth=depth, parallel=parallel)
    if isinstance(rule, Puct) and isinstance(step, Sample) and step.params.logprobs is None:
        raise InvalidRequest("Puct weighs by log-probabilities; set logprobs=0 in the step's params", field="logprobs")  # fmt: skip
    selection = _Selection(tree, rule or Uct(), depth)
    left = expansions - sum(bool(node.children) for node in tree.nodes())
    chosen: deque[Node] = deque()
    with Growth(tree, step, value) as growth:
        while True:
            while left > 0 and len(chosen) < parallel and (leaf := selection.next_leaf()) is not None:
                if not growth.add(leaf):
                    left = 0
                    break
                selection.start(leaf)
                chosen.append(leaf)
                left -= 1
            if not chosen:
                return tree.ranked()
            leaf = chosen.popleft()
            if not leaf.children and not leaf.is_pruned:
                growth.next_in_order()
            selection.finish(leaf)


class _Selection:
    """Which leaves can grow, how often each node was visited or is about to be, and the priors. Owner of nothing in the tree."""

    def __init__(self, tree: SearchTree, rule: Rule, depth: int) -> None:
        self._tree = tree
        self._rule = rule
        self._depth = depth
        self._free: dict[Node, int] = {}
        """Leaves at or under a node that can grow and are not under way."""
        self._flying: dict[Node, int] = {}
        """Leaves under way at or under a node, where there are any."""
        self._priors: dict[Node, float] = {}
        for node in reversed(list(tree.nodes())):
            grown = sum(self._free[child] for child in node.children)
            self._free[node] = grown if node.children else self._can_grow(node)
            self._set_priors(node)

    def next_leaf(self) -> Node | None:
        """Return the leaf that the rule leads to; None when none can grow. O(depth x children)."""
        node = self._tree.root
        if not self._free[node]:
            return None
        while node.children:
            parent_visits = max(1, node.visits + self._flying.get(node, 0))
            node = max(
                (child for child in node.children if self._free.get(child)),
                key=lambda child: self._score(child, parent_visits),
            )
        return node

    def start(self, leaf: Node) -> None:
        """Note that a leaf is under way."""
        for node in leaf.line():
            self._free[node] -= 1
            self._flying[node] = self._flying.get(node, 0) + 1

    def finish(self, leaf: Node) -> None:
        """Note that a leaf has grown: its children's values count for all above them."""
        total = sum(child.value or 0.0 for child in leaf.children)
        for child in leaf.children:
            child.visits, child.total = 1, child.value or 0.0
            self._free[child] = self._can_grow(child)
        self._set_priors(leaf)
        can_grow = sum(self._free[child] for child in leaf.children)
        for node in leaf.line():
            node.visits += len(leaf.children)
            node.total += total
            self._free[node] += can_grow
            self._flying[node] -= 1
            if not self._flying[node]:
                del self._flying[node]

    def _can_grow(self, node: Node) -> int:
        return int(node.is_open and node.depth < self._depth)

    def _score(self, node: Node, parent_visits: int) -> float:
        return self._rule.score(
            mean=node.total / max(1, node.visits),
            visits=max(1, node.visits + self._flying.get(node, 0)),
            parent_visits=parent_visits,
            prior=self._priors[node],
        )

    def _set_priors(self, node: Node) -> None:
        odds = [math.exp(child.mean_logprob) for child in node.children]
        for child, odd in zip(node.children, odds, strict=True):
            self._priors[child] = odd / sum(odds)
