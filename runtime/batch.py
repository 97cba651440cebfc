"""What one step computes: plain data from the scheduler to the model runner."""

from __future__ import annotations

from dataclasses import dataclass, field

from phloem.runtime.errors import CacheFull
from phloem.runtime.request import Request


@dataclass(frozen=True, slots=True)
class Row:
    """One request's part of a step: its tokens `[start, start + count)`."""

    request: Request
    start: int
    count: int

    @property
    def samples(self) -> bool:
        """Whether the row reaches the end of the known tokens, so that the next one is sampled."""
        return self.start + self.count == len(self.request.tokens)


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
    refused: list[Refusal] = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        """Tokens that the step computes."""
        return sum(row.count for row in self.rows)
