"""A request: one path of tokens on its way through the scheduler.

Its tokens fall into three half-open intervals, and each has one owner of the KV::

    [0, committed)          whole blocks in the tree, locked by this request through `ref`
    [committed, computed)   KV written, in private blocks of this request (at rest: less than one block)
    [computed, len(tokens)) known tokens that no step has run yet: a prompt's rest, or the token just sampled

A step computes the first `count` tokens of the third interval. When that reaches the end, the step samples
one more token. So a prefill chunk and a decode are the same thing, and so is the resumption of a preempted request,
whose known tokens include what it had generated.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from enum import Enum

from phloem.radix import Namespace, NodeRef
from phloem.runtime.sampling_params import SamplingParams


class Phase(Enum):
    """Where a request is; see :class:`~phloem.runtime.scheduler.Scheduler`."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(slots=True, eq=False)
class Request:
    """One generation. The scheduler alone changes it, but for `tokens`, which the engine appends to."""

    id: str
    namespace: Namespace
    tokens: array[int]
    """The whole path, prompt and output, as int32."""

    params: SamplingParams
    seed: int
    max_len: int
    """Length of the path at which it ends: prompt and `max_tokens`, or the context."""

    num_prompt_tokens: int = field(init=False)
    packed_prompt: bytes = field(init=False)
    """The prompt as int32 bytes: what a prefix comparison reads."""

    phase: Phase = Phase.WAITING
    arrival: int = -1
    """Order of arrival, kept over preemptions; the scheduler sets it."""

    block_table: list[int] = field(default_factory=list)
    ref: NodeRef | None = None
    """The locked end of the committed interval; None while nothing is held."""

    num_committed: int = 0
    """Tokens; a multiple of the block size."""

    num_computed: int = 0
    cached_tokens: int = 0
    """Prompt tokens found in the tree when first admitted. Later hits, after a preemption, are not counted."""

    num_preemptions: int = 0
    hold: Hold | None = None

    def __post_init__(self) -> None:
        self.num_prompt_tokens = len(self.tokens)
        self.packed_prompt = self.tokens.tobytes()

    @property
    def num_pending(self) -> int:
        """Tokens that are known but not computed."""
        return len(self.tokens) - self.num_computed

    @property
    def output_ids(self) -> list[int]:
        """The tokens generated so far."""
        return self.tokens[self.num_prompt_tokens :].tolist()


@dataclass(frozen=True, slots=True)
class Hold:
    """Why a waiting request is held back: `producer` is computing the block that it needs next (rule 9)."""

    producer: Request
    until: int
    """Held while the producer runs and has committed fewer tokens than this."""
