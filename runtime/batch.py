"""What one step computes: plain data from the scheduler to the model runner."""

from __future__ import annotations

from dataclasses import dataclass, field

from phloem.runtime.errors import CacheFull
from phloem.runtime.request import Request


@dataclass(frozen=True, slots=True)
class Lead:
    """The first tokens of a row, where another row of the step computes them (`twins.py`)."""

    row: int
    """Which one: its place among the step's rows, before the row that it leads."""

    num_tokens: int


@dataclass(frozen=True, slots=True)
class Row:
    """One request's part of a step: its tokens `[start, start + count)`."""

    request: Request
    start: int
    count: int
    lead: Lead | None = None
    """None: it computes all of its tokens itself."""

    @property
    def num_led(self) -> int:
        """How many of its first tokens another row computes."""
        return 0 if self.lead is None else self.lead.num_tokens

    @property
    def num_own(self) -> int:
        """How many tokens it computes itself."""
        return self.count - self.num_led

    @property
    def end(self) -> int:
        """Where the row ends in its path."""
        return self.start + self.count

    @property
    def reads_next(self) -> bool:
        """Whether the row reaches the end of the known tokens, and the logits after it are wanted."""
        return self.request.reads_next and self.end == len(self.request.tokens)

    @property
    def samples(self) -> bool:
        """Whether the next token is sampled after the row."""
        return self.request.samples and self.reads_next

    @property
    def scored(self) -> range:
        """Positions in the row whose logits are wanted because the token after them is known."""
        request = self.request
        if request.logits_from is None:
            return range(0)
        return range(max(self.start, request.logits_from), min(self.end, request.num_prompt_tokens - 1))


@dataclass(frozen=True, slots=True)
class RowCopy:
    """Copy the KV of the first `num_rows` tokens of one block to another (rule 6: reuse inside a block)."""

    source_block: int
    target_block: int
    num_rows: int


@dataclass(frozen=True, slots=True)
class Refusal:
    """A request that can't run, and why; it has been finished."""

    request: Request
    error: CacheFull


@dataclass(slots=True)
class Batch:
    """The rows of one step.

    `copies` run before any row writes, one after the other and in this order: a source may have been evicted
    since it was matched, and be the target of a later copy.
    """

    rows: list[Row] = field(default_factory=list)
    copies: list[RowCopy] = field(default_factory=list)
    computed: list[Request] = field(default_factory=list)
    """Requests that were admitted and have nothing to compute, since the cache has it all."""

    refused: list[Refusal] = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        """Tokens that the step computes."""
        return sum(row.num_own for row in self.rows)
