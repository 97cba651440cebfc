"""Which rows of a step share a prefix, read off their block tables.

A block of the tree stands once in memory, so equal block ids at equal places of two tables are a common ancestor of two
paths. The groups form a forest, as the tree does: a system prompt under all rows, a problem under some, a step under few::

    row 0   |b1 b2 b3 b7|        rows (0, 1, 2, 3)  1 block     b1
    row 1   |b1 b2 b3 b9|        rows (0, 1, 2)     2 blocks    b1 b2
    row 2   |b1 b2 b4   |        rows (0, 1)        3 blocks    b1 b2 b3
    row 3   |b1 b5      |

Blocks that a row still writes to are its own and never shared. Knows no tree.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True, slots=True)
class SharedGroup:
    """Rows that run through one locked ancestor, and so share their first blocks."""

    rows: tuple[int, ...]
    """Row indices, ascending, two or more."""
    num_shared_blocks: int
    """Blocks, counted from the first, that are the same in all rows; all of their tokens precede every query."""


def find_groups(
    kv_indptr: npt.NDArray[np.int64],
    kv_indices: npt.NDArray[np.int32],
    num_past_blocks: npt.NDArray[np.int64],
) -> tuple[SharedGroup, ...]:
    """Find all groups of rows that share one block or more. O(blocks) to compare, and O(rows log rows) to sort.

    Args:
        kv_indptr: `[num_rows + 1]`: row i's block table is kv_indices[kv_indptr[i] : kv_indptr[i + 1]].
        kv_indices: Block ids.
        num_past_blocks: `[num_rows]`: of each row, the blocks whose tokens were all written by earlier steps.

    Returns:
        The groups, a group before those inside it. Two groups are disjoint, or one lies within the other and shares more.
    """
    begins = kv_indptr[:-1].tolist()
    tables = [
        kv_indices[begin : begin + n] for begin, n in zip(begins, num_past_blocks.tolist(), strict=True)
    ]
    keys = [table.tobytes() for table in tables]
    # Any order in which tables with a common beginning stand together will do.
    order = sorted(range(len(keys)), key=keys.__getitem__)
    common = [_num_common(tables[a], tables[b]) for a, b in pairwise(order)]
    return tuple(sorted(_nest(order, common), key=lambda group: (-len(group.rows), group.num_shared_blocks)))


def _num_common(a: npt.NDArray[np.int32], b: npt.NDArray[np.int32]) -> int:
    """Length of the common beginning."""
    shorter = min(len(a), len(b))
    differs = a[:shorter] != b[:shorter]
    place = int(differs.argmax()) if shorter else 0
    return place if shorter and differs[place] else shorter


def _nest(order: list[int], common: list[int]) -> Iterator[SharedGroup]:
    """Yield the groups of rows that stand in order, given how much each has in common with the next one.

    `open_groups` are the groups that the rows seen so far end in, (first place in the order, shared blocks), inner ones last.
    """
    open_groups: list[tuple[int, int]] = []
    for place, shared in enumerate([*common, 0]):
        first = place
        while open_groups and open_groups[-1][1] > shared:
            first, num_blocks = open_groups.pop()
            yield SharedGroup(tuple(sorted(order[first : place + 1])), num_blocks)
        if shared and not (open_groups and open_groups[-1][1] == shared):
            open_groups.append((first, shared))
