"""A request: tokens to compute on one path, and how many to generate. What it holds of the KV is its path's (`path.py`).

A step computes the first `count` of the path's known, uncomputed tokens. When that reaches the end, it samples one more. So a
prefill chunk and a decode are the same thing, and so is the resumption of a preempted request, whose known tokens include
what it had generated.

A request that does not sample computes its path up to the last token, whose KV only a following token would need: that
prefills a branch, or scores a continuation. Or it computes the last token too, to tell how likely some next ones are.
"""

from __future__ import annotations

import math
from array import array
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING

from phloem.radix import Explanation, Namespace
from phloem.runtime.path import Path
from phloem.runtime.sampling_params import SamplingParams

if TYPE_CHECKING:
    from phloem.runtime.grammar import Constraint


class Phase(Enum):
    """Where a request is; see :class:`~phloem.runtime.scheduler.Scheduler`."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(slots=True, eq=False)
class Cohort:
    """Requests of one namespace that are submitted together, in the order of a walk through the tree of their prompts.

    So each of them shares no more with any before it than with the one just before it, and a prefix is of no use any more
    once the next request does not begin with it.
    """

    output_share: float | None = None
    """The largest share of its longest possible output that any of them has generated; None while none has ended."""


@dataclass(slots=True, eq=False)
class Request:
    """One computation on a path. The scheduler alone changes it, but for the path's tokens, which the engine appends to."""

    id: str
    path: Path
    params: SamplingParams
    seed: int
    max_len: int
    """Length of the path at which it ends: prompt and `max_tokens`, or the context."""

    child_index: int = 0
    """Which of several children of one prompt this is: part of what its draws depend on."""

    logits_from: int | None = None
    """First prompt position whose logits are still wanted, for the log-probability of the token after it. None: none."""

    candidate_ids: tuple[int, ...] = ()
    """Tokens whose log-probabilities are reported where the prompt ends, whether or not a token is sampled there."""

    constraint: Constraint | None = None
    """Where its grammar stands after the tokens generated so far."""

    keeps_path: bool = False
    """Whether the path stays resident (idle) after the end, for the branch that it belongs to."""

    cohort: Cohort | None = None
    """What it is submitted together with, depth first."""

    num_prompt_tokens: int = field(init=False)
    samples: bool = field(init=False)
    """Whether it generates tokens."""

    reads_next: bool = field(init=False)
    """Whether the logits after its last known token are wanted, so that all known tokens are computed."""

    packed_prompt: bytes = field(init=False)
    """The prompt as int32 bytes: what a prefix comparison reads."""

    phase: Phase = Phase.WAITING
    arrival: int = -1
    """Order of arrival, kept over preemptions; the scheduler sets it."""

    cached_tokens: int | None = None
    """Prompt tokens that needed no computing when it was first admitted, or that another row of its first step computes; None
    before. Hits after a preemption do not count."""

    explanation: Explanation | None = None
    """What of the prompt was cached when it was first considered for admission, and why the rest was not."""

    deadline_s: float | None = None
    """When it is given up, on `time.monotonic`'s clock. None: never."""

    num_preemptions: int = 0
    passes: int = 0
    """How often a younger request was admitted before it."""

    hold: Hold | None = None

    def __post_init__(self) -> None:
        self.num_prompt_tokens = len(self.path.tokens)
        self.samples = self.max_len > self.num_prompt_tokens
        self.reads_next = self.samples or bool(self.candidate_ids)
        self.packed_prompt = self.path.tokens.tobytes()

    @property
    def tokens(self) -> array[int]:
        """The path's tokens."""
        return self.path.tokens

    @property
    def namespace(self) -> Namespace:
        """The path's namespace."""
        return self.path.namespace

    @property
    def num_to_compute(self) -> int:
        """How many of the known tokens will be computed: all, but for the last one when nothing is read after it."""
        return len(self.path.tokens) - (not self.reads_next)

    @property
    def num_pending(self) -> int:
        """Tokens that are known and not computed, and will be."""
        return self.num_to_compute - self.path.num_computed

    @property
    def reusable(self) -> int:
        """How many of the first tokens may come from the cache (rule 5): not those whose logits are wanted."""
        limit = self.num_to_compute - self.reads_next
        return limit if self.logits_from is None else min(limit, self.logits_from)

    @property
    def output_share(self) -> float:
        """How much it has generated of what it may; only for one that samples."""
        return (len(self.path.tokens) - self.num_prompt_tokens) / (self.max_len - self.num_prompt_tokens)

    @property
    def expected_len(self) -> int:
        """How many tokens will be computed in all, if it generates as large a share of what it may as any of its cohort has."""
        share = 1.0 if self.cohort is None or self.cohort.output_share is None else self.cohort.output_share
        output_len = math.ceil(share * (self.max_len - self.num_prompt_tokens))
        return max(self.num_to_compute, self.num_prompt_tokens + output_len - 1)

    @property
    def output_ids(self) -> list[int]:
        """The tokens generated so far."""
        return self.path.tokens[self.num_prompt_tokens :].tolist()


@dataclass(frozen=True, slots=True)
class Hold:
    """Why a waiting request is held back: `producer` is computing the block that it needs next (rule 9)."""

    producer: Request
    until: int
    """Held while the producer runs and has committed fewer tokens than this."""
