"""Rows of one step that begin alike, and generate nothing: their common tokens are computed once.

Twins wait where a whole block is common (`Scheduler._is_held`). What is less than a block they compute in the same step: above all the
end of a branch from which continuations are scored. Then the first row that has a token *leads*: it computes it, and the others take over
its KV and its hidden state. These hang on nothing but the path up to that token, so a row gets the bits that it would have computed, and
fails where it would have failed.

Called when the rows of a step are settled, so that no row leads which is not computed. A row that leads and ends leaves the others
nothing short: each holds all of its KV itself.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field, replace

from phloem.runtime.batch import Lead, Row


@dataclass(slots=True)
class _Place:
    """After some common tokens: which row came here first, and where it goes on to from here, by token."""

    row: int
    after: dict[int, _Place] = field(default_factory=dict)


def with_leads(rows: Sequence[Row], *, block_size: int) -> list[Row]:
    """Return the rows of a step, each told with which earlier one it has most tokens in common. O(rows * block_size).

    Args:
        rows: Of paths that are active, over a prefix cache.
        block_size: In tokens; so many are shared at most, since more than a block's worth is not computed twice anyway.
    """
    families: defaultdict[Hashable, list[int]] = defaultdict(list)
    for index, row in enumerate(rows):
        # Of a prompt to go on from, the last token runs in each row that samples after it (rule 5).
        if not row.request.samples:
            families[_past(row, block_size)].append(index)
    led = list(rows)
    for family in families.values():
        if len(family) > 1:
            for index, lead in _leads(rows, family, block_size):
                led[index] = replace(rows[index], lead=lead)
    return led


def _past(row: Row, block_size: int) -> Hashable:
    """The same for rows that continue the same tokens of one namespace, as far as the tree knows: what is before them.

    A block has one owner, so paths whose last committed blocks are one block are one path up to there.
    """
    path = row.request.path
    last = path.block_table[path.num_committed // block_size - 1] if path.num_committed else path.namespace
    return last, path.tokens[path.num_committed : row.start].tobytes()


def _leads(rows: Sequence[Row], family: Iterable[int], block_size: int) -> Iterable[tuple[int, Lead]]:
    start: dict[int, _Place] = {}
    for index in family:
        row, after, lead = rows[index], start, None
        for number, token_id in enumerate(
            row.request.tokens[row.start : min(row.end, row.start + block_size)]
        ):
            place = after.get(token_id)
            if place is None:
                place = after[token_id] = _Place(index)
            else:
                lead = Lead(place.row, number + 1)
            after = place.after
        if lead is not None:
            yield index, lead
