"""How a node gets children: sampled by the model, or proposed by a function."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from phloem.runtime.errors import InvalidRequest
from phloem.runtime.frontend.search.node import Node
from phloem.runtime.sampling_params import SamplingParams

MAX_CHILDREN = 100_000


@dataclass(frozen=True, slots=True)
class Sample:
    """`n` children, each sampled from the end of its parent. Child i draws from the tree's seed, the parent's place and i.

    Raises:
        InvalidRequest: `n` is out of range, or `params` set what the tree sets: the seed and `n`.
    """

    n: int
    params: SamplingParams = field(default_factory=SamplingParams)
    """A stop string that ends a step stays part of the path, though not of the completion's text."""

    is_done: Callable[[Node], bool] | None = None
    """Whether a child is a finished text, besides those that end with an end-of-sequence token."""

    def __post_init__(self) -> None:
        good = isinstance(self.n, int) and not isinstance(self.n, bool) and 1 <= self.n <= MAX_CHILDREN
        if not good:
            raise InvalidRequest(
                f"n must be a whole number from 1 to {MAX_CHILDREN:,}, not {self.n!r}", field="n"
            )
        if not isinstance(self.params, SamplingParams):
            raise InvalidRequest(
                f"params must be SamplingParams, not {type(self.params).__name__}", field="params"
            )
        if self.params.max_tokens == 0:
            raise InvalidRequest("a step has at least one token; max_tokens is 0", field="max_tokens")
        if self.params.seed is not None:
            raise InvalidRequest("a step's draws come from the seed of its SearchTree; set it there", field="seed")  # fmt: skip
        if self.params.n != 1 or self.params.prompt_logprobs is not None:
            raise InvalidRequest(
                "a step's params have n=1 and no prompt_logprobs; say n in Sample(n, ...)", field="params"
            )


@dataclass(frozen=True, slots=True)
class Propose:
    """Children whose texts a function gives. Nothing is computed for them until somebody goes on from them."""

    function: Callable[[Sequence[Node]], Sequence[Sequence[str]]]
    """Gets all nodes that are to grow, and returns the texts of each one's children; none makes the node a dead end.
    It can ask the model for them, all at once, by `SearchTree.ask`."""

    is_done: Callable[[Node], bool] | None = None
    """Whether a child is a finished text."""


Step: TypeAlias = "Sample | Propose"
