"""Many answers to one prompt: the best of them, or the one that most agree on."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from phloem.runtime.frontend.search.growth import Growth
from phloem.runtime.frontend.search.node import Node, ranked
from phloem.runtime.frontend.search.steps import Sample
from phloem.runtime.frontend.search.tree import SearchTree
from phloem.runtime.frontend.search.values import Value


@dataclass(frozen=True, slots=True)
class Consensus:
    """What most samples agree on."""

    answer: str | None
    """None when no sample has an answer."""

    votes: dict[str, int]
    """Samples per answer, most first; equal ones in the order of their first samples."""

    nodes: list[Node]
    """The samples that give the answer."""


def best_of_n(tree: SearchTree, step: Sample, value: Value | Callable[[Node], float]) -> list[Node]:
    """Sample `step.n` continuations of the prompt; return them best first. A budget may leave fewer.

    Raises:
        CacheFull: The budget's blocks do not hold them.
        InvalidRequest: The value is not finite numbers.
    """
    with Growth(tree, step, value) as growth:
        growth.add_affordable(tree.root)
        growth.run()
    return ranked(tree.root.children)


def self_consistency(tree: SearchTree, step: Sample, answer: Callable[[str], str | None]) -> Consensus:
    """Sample `step.n` continuations, read an answer in each, and return the most frequent (Wang et al., 2022).

    Args:
        tree: With the prompt.
        step: How many, and how they are sampled.
        answer: From a continuation's text to its answer in a normal form; None where there is none.
    """
    nodes = best_of_n(tree, step, lambda node: 0.0)
    answers = [(node, answer(node.path_text)) for node in sorted(nodes, key=lambda node: node.index)]
    votes = Counter(found for _, found in answers if found is not None)
    most = next(iter(votes.most_common(1)), (None, 0))[0]
    for node, found in answers:
        node.value = votes[found] / len(answers) if found is not None else 0.0
    agreeing = [node for node, found in answers if found is not None and found == most]
    return Consensus(most, dict(votes.most_common()), agreeing)
