"""What a text is worth: by a Python function, by the model's own log-probabilities, or by its votes."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Protocol

from phloem.runtime.branch import Branch
from phloem.runtime.errors import InvalidRequest
from phloem.runtime.frontend.search.node import Node
from phloem.runtime.sampling_params import SamplingParams

if TYPE_CHECKING:
    from phloem.runtime.frontend.search.tree import SearchTree


class Value(Protocol):
    """Says what nodes are worth; more is better."""

    def of(self, tree: SearchTree, families: Sequence[Sequence[Node]]) -> list[list[float]]:
        """Return a value for each node. Each family is the children of one node; they are not in the tree yet."""


@dataclass(frozen=True, slots=True)
class FunctionValue:
    """A Python function of the node. What takes a plain function makes one of these."""

    function: Callable[[Node], float]

    def of(self, tree: SearchTree, families: Sequence[Sequence[Node]]) -> list[list[float]]:
        """See :class:`Value`."""
        return [[self.function(node) for node in family] for family in families]


@dataclass(frozen=True, slots=True)
class ScoreValue:
    r"""The worth that the model expects: it weighs verdicts by the probability of each, through `Branch.score`.

    ::

        ScoreValue({" yes": 1.0, " no": 0.0}, suffix="\nIs this right? Answer:")
        ScoreValue({"sure": 20, "likely": 1, "impossible": 0.001}, prompt=lambda node: VALUE_PROMPT.format(...))

    Raises:
        InvalidRequest: There are less than two verdicts, or `prompt` and `suffix` are both given.
    """

    verdicts: Mapping[str, float]
    """Text and worth of each."""

    suffix: str = ""
    """What stands between the node's path and the verdict."""

    prompt: Callable[[Node], str] | None = None
    """Ask with a prompt of its own, instead of on the node's path."""

    def __post_init__(self) -> None:
        if len(self.verdicts) < 2:
            raise InvalidRequest("verdicts must be two or more", field="verdicts")
        if self.prompt is not None and self.suffix:
            raise InvalidRequest("suffix goes with the node's path; a prompt ends by itself", field="suffix")

    def of(self, tree: SearchTree, families: Sequence[Sequence[Node]]) -> list[list[float]]:
        """See :class:`Value`. All nodes are scored together."""
        nodes = [node for family in families for node in family]
        branches: list[Branch] = []
        try:
            for node in nodes:
                branches.append(self._branch(tree, node))
            scored = Branch.scores_of(branches, list(self.verdicts))
        finally:
            for branch in branches:
                branch.release()
        weights = list(self.verdicts.values())
        for scores in scored:
            for score in scores:
                tree.count(score.usage)
        expected = iter([_expectation([score.total for score in scores], weights) for scores in scored])
        return [[next(expected) for _ in family] for family in families]

    def _branch(self, tree: SearchTree, node: Node) -> Branch:
        if self.prompt is not None:
            return tree.open(self.prompt(node))
        [branch] = tree.branch(node).fork()
        return branch.append(self.suffix) if self.suffix else branch


@dataclass(frozen=True, slots=True)
class VoteValue:
    """The share of the model's votes: it is shown all children of a node at once, and asked `votes` times for the best.

    Raises:
        InvalidRequest: `votes` is not at least 1.
    """

    prompt: Callable[[Sequence[Node]], str]
    """Shows the candidates and asks for one."""

    choice: Callable[[str], int | None]
    """Reads the number of the chosen candidate, from 0, in an answer; None where it says nothing."""

    votes: int = 5
    params: SamplingParams = field(default_factory=lambda: SamplingParams(max_tokens=32))

    def __post_init__(self) -> None:
        replace(self.params, n=self.votes)

    def of(self, tree: SearchTree, families: Sequence[Sequence[Node]]) -> list[list[float]]:
        """See :class:`Value`. All ballots are sampled together; those of one family share its prompt."""
        prompts = [self.prompt(family) for family in families]
        ballots = tree.ask(prompts, replace(self.params, n=self.votes))
        return [
            _shares([self.choice(answer.text) for answer in answers], len(family))
            for answers, family in zip(ballots, families, strict=True)
        ]


def as_value(value: Value | Callable[[Node], float]) -> Value:
    """Return the value that was meant.

    Raises:
        InvalidRequest: It is neither a Value nor a function.
    """
    if hasattr(value, "of"):
        return value
    if callable(value):
        return FunctionValue(value)
    raise InvalidRequest(
        f"value must be a function of a node, or have a method of(tree, families), not {type(value).__name__}",
        field="value",
    )


def values_of(value: Value, tree: SearchTree, families: Sequence[Sequence[Node]]) -> list[list[float]]:
    """Return what a value says, checked.

    Raises:
        InvalidRequest: It is not one finite number for each node.
    """
    found = value.of(tree, families)
    if [len(row) for row in found] != [len(family) for family in families]:
        raise InvalidRequest(
            f"value gave {sum(map(len, found))} values for {sum(map(len, families))} nodes, or not family by family",
            field="value",
        )
    for row, family in zip(found, families, strict=True):
        for number, node in zip(row, family, strict=True):
            if not isinstance(number, (int, float)) or not math.isfinite(number):
                raise InvalidRequest(
                    f"value gave {number!r} for node {node.name}; it must be a finite number", field="value"
                )
    return [[float(number) for number in row] for row in found]


def _expectation(logprobs: Sequence[float], weights: Sequence[float]) -> float:
    most = max(logprobs)
    odds = [math.exp(logprob - most) for logprob in logprobs]
    return sum(odd * weight for odd, weight in zip(odds, weights, strict=True)) / sum(odds)


def _shares(choices: Sequence[int | None], num_candidates: int) -> list[float]:
    return [sum(choice == index for choice in choices) / len(choices) for index in range(num_candidates)]
