"""One step's attention metadata, as arrays.

What a step computes is a list of rows: row i runs tokens [start, start + count) of one token path, whose KV then
covers [0, start + count). `AttentionPlan` holds those rows in FlashInfer's convention (CSR), so that the CPU and the
GPU backends read the very same arrays::

    row            0           1     2
    tokens    |t0 t1 t2|      |t3|  |t4 t5|          qo_indptr        0 3 4 6
    blocks    |b7 b2|   |b5 b9 b1|   |b4|            kv_indptr        0 2 5 6
                                                     kv_indices       7 2 5 9 1 4
                                                     kv_last_page_len tokens in the last block of each row

Rows that begin alike need not compute the same tokens twice: one row computes them, and the KV of these tokens is written to
the *mirrors* too, the slots from which the other rows read it::

    row 0   |.. end a b|     computes end, a, b
    row 1   |.. end c|       computes c; its slot of `end` mirrors row 0's token

The module knows block ids, not what they mean: no tree, no request, no tensor of KV.

Invariants (`AttentionPlan.check` proves them): causal attention is aligned bottom-right, so a row's tokens are the
last ones of its KV; every token is written to the slots from which rows read it, at its own position; no slot is written twice.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain

import numpy as np
import numpy.typing as npt
import torch

from phloem.kernels.shared_prefix import SharedGroup, find_groups

IntArray = npt.NDArray[np.int64]


class PlanError(ValueError):
    """A row or a plan that breaks a rule of the attention metadata."""


@dataclass(frozen=True, slots=True)
class PlanRow:
    """One row of a step: tokens [start, start + count) of a path whose KV covers [0, start + count).

    `count` may be 0: the row computes nothing, its output is empty.
    """

    block_table: Sequence[int]
    """Block ids of the path, in order. May be longer than what the KV needs; the rest is ignored."""
    start: int
    """Tokens whose KV was written by earlier steps, or is mirrored."""
    count: int
    """Tokens that this step computes."""
    mirrored: Sequence[int] = ()
    """The step's tokens, by number, that other rows compute and that stand right before `start` in this path too. Their KV is
    written by this step, not by earlier ones."""


@dataclass(frozen=True, slots=True, eq=False)
class AttentionPlan:
    """The CSR arrays of one step. Made once per step, read by every layer."""

    qo_indptr: torch.Tensor
    """int32 `[num_rows + 1]`: row i owns tokens [qo_indptr[i], qo_indptr[i + 1])."""
    kv_indptr: torch.Tensor
    """int32 `[num_rows + 1]`: row i reads blocks kv_indices[kv_indptr[i] : kv_indptr[i + 1]]."""
    kv_indices: torch.Tensor
    """int32 `[num_row_blocks]`: block ids."""
    kv_last_page_len: torch.Tensor
    """int32 `[num_rows]`: tokens in a row's last block, 1 to block_size; 0 only where the row has no block."""
    positions: torch.Tensor
    """int64 `[num_tokens]`: place of each token in its path."""
    slot_mapping: torch.Tensor
    """int64 `[num_tokens]`: block id * block_size + offset, where the token's KV is written."""
    mirror_indptr: torch.Tensor
    """int32 `[num_rows + 1]`: row i takes over mirrors [mirror_indptr[i], mirror_indptr[i + 1])."""
    mirror_tokens: torch.Tensor
    """int64 `[num_mirrors]`: the token whose KV it is."""
    mirror_slots: torch.Tensor
    """int64 `[num_mirrors]`: where it is written as well."""
    block_size: int
    groups: tuple[SharedGroup, ...] = ()
    """Rows that share their first blocks; a backend may attend to those once for all of them."""
    _is_laid_out: bool = field(default=False, init=False, repr=False)
    """Made by `from_rows`, which puts tokens nowhere but in their rows' blocks: `check` need not do it a second time."""

    @property
    def num_rows(self) -> int:
        """Rows of the step, empty ones included."""
        return self.kv_last_page_len.shape[0]

    @property
    def num_tokens(self) -> int:
        """Tokens that the step computes."""
        return self.positions.shape[0]

    @property
    def num_mirrors(self) -> int:
        """Slots that KV is written to beside the tokens' own."""
        return self.mirror_slots.shape[0]

    @property
    def kv_lens(self) -> torch.Tensor:
        """int32 `[num_rows]`: tokens of KV that each row reads, its own included."""
        num_blocks = np.diff(self.kv_indptr.numpy())
        lengths = (num_blocks - 1) * self.block_size + self.kv_last_page_len.numpy()
        return torch.from_numpy(np.where(num_blocks > 0, lengths, 0).astype(np.int32))

    @classmethod
    def from_rows(cls, rows: Sequence[PlanRow], *, block_size: int) -> "AttentionPlan":
        """Lay the rows out as arrays, and find who shares what. O(tokens + blocks), without Python per token.

        Raises:
            PlanError: a negative start or count, more mirrored tokens than there are before the start, or a block table that is
                too short for its row.
        """
        if block_size < 1:
            raise PlanError(f"block_size is {block_size}; it must be 1 or more")
        starts = np.fromiter((row.start for row in rows), np.int64, len(rows))
        counts = np.fromiter((row.count for row in rows), np.int64, len(rows))
        mirrored = np.fromiter((len(row.mirrored) for row in rows), np.int64, len(rows))
        num_blocks = -(-(starts + counts) // block_size)
        _check_rows(rows, starts, counts, mirrored, num_blocks)
        qo_indptr, kv_indptr = _offsets(counts), _offsets(num_blocks)
        tables = [
            np.asarray(r.block_table[:n], np.int32) for r, n in zip(rows, num_blocks.tolist(), strict=True)
        ]
        kv_indices = np.concatenate(tables) if tables else np.empty(0, np.int32)
        positions, slots = _place_tokens(starts, counts, kv_indptr, kv_indices, block_size)
        mirror_slots = _place_tokens(starts - mirrored, mirrored, kv_indptr, kv_indices, block_size)[1]
        mirror_tokens = np.fromiter(chain.from_iterable(row.mirrored for row in rows), np.int64)
        last_page_len = starts + counts - (num_blocks - 1) * block_size
        plan = cls(
            qo_indptr=torch.from_numpy(qo_indptr.astype(np.int32)),
            kv_indptr=torch.from_numpy(kv_indptr.astype(np.int32)),
            kv_indices=torch.from_numpy(kv_indices),
            kv_last_page_len=torch.from_numpy(np.where(num_blocks > 0, last_page_len, 0).astype(np.int32)),
            positions=torch.from_numpy(positions),
            slot_mapping=torch.from_numpy(slots),
            mirror_indptr=torch.from_numpy(_offsets(mirrored).astype(np.int32)),
            mirror_tokens=torch.from_numpy(mirror_tokens),
            mirror_slots=torch.from_numpy(mirror_slots),
            block_size=block_size,
            groups=find_groups(
                kv_indptr, kv_indices, np.where(counts > 0, (starts - mirrored) // block_size, 0)
            ),
        )
        object.__setattr__(plan, "_is_laid_out", True)
        return plan

    def check(self, num_blocks: int) -> None:
        """Prove every rule against a store of `num_blocks` blocks. O(tokens log tokens + blocks).

        Raises:
            PlanError: the first rule found broken, with the row or token and the numbers.
        """
        if not self._is_laid_out:
            self._check_arrays()
        self._check_block_ids(num_blocks)
        if not self._is_laid_out:
            self._check_layout()
        if self.num_mirrors:
            self._check_mirrors()
        self._check_slots()

    def _check_layout(self) -> None:
        """Every token stands in its row's blocks, and groups share what they say."""
        self._check_pages()
        self._check_tokens()
        for group in self.groups:
            self._check_group(group)

    def _check_arrays(self) -> None:
        """Types, shapes and devices: FlashInfer reads an int64 index array as int32 without a word."""
        rows, tokens = self.num_rows, self.num_tokens
        wanted = {
            "qo_indptr": (torch.int32, rows + 1),
            "kv_indptr": (torch.int32, rows + 1),
            "kv_indices": (torch.int32, self.kv_indices.numel()),
            "kv_last_page_len": (torch.int32, rows),
            "positions": (torch.int64, tokens),
            "slot_mapping": (torch.int64, tokens),
            "mirror_indptr": (torch.int32, rows + 1),
            "mirror_tokens": (torch.int64, self.num_mirrors),
            "mirror_slots": (torch.int64, self.num_mirrors),
        }
        for name, (dtype, length) in wanted.items():
            array: torch.Tensor = getattr(self, name)
            if array.dtype != dtype or tuple(array.shape) != (length,) or array.device.type != "cpu":
                raise PlanError(
                    f"{name} is {array.dtype} {list(array.shape)} on {array.device}; needs {dtype} [{length}] on cpu"
                )
        _check_indptr("qo_indptr", self.qo_indptr.numpy(), tokens)
        _check_indptr("kv_indptr", self.kv_indptr.numpy(), self.kv_indices.shape[0])
        _check_indptr("mirror_indptr", self.mirror_indptr.numpy(), self.num_mirrors)

    def _check_block_ids(self, num_blocks: int) -> None:
        kv_indices = self.kv_indices.numpy()
        if kv_indices.size and (kv_indices.min() < 0 or kv_indices.max() >= num_blocks):
            bad = kv_indices[(kv_indices < 0) | (kv_indices >= num_blocks)][0]
            raise PlanError(f"block id {bad} is outside of the store's {num_blocks} blocks")

    def _check_pages(self) -> None:
        row_blocks = np.diff(self.kv_indptr.numpy())
        last = self.kv_last_page_len.numpy()
        wrong = np.where(row_blocks > 0, (last < 1) | (last > self.block_size), last != 0)
        if wrong.any():
            row = int(np.flatnonzero(wrong)[0])
            raise PlanError(
                f"row {row} has {row_blocks[row]} blocks and {last[row]} tokens in the last; "
                f"needs 1 to {self.block_size}, or 0 without blocks"
            )

    def _check_tokens(self) -> None:
        counts = np.diff(self.qo_indptr.numpy()).astype(np.int64)
        kv_lens = self.kv_lens.numpy().astype(np.int64)
        if (counts > kv_lens).any():
            row = int(np.flatnonzero(counts > kv_lens)[0])
            raise PlanError(f"row {row} computes {counts[row]} tokens but its KV covers only {kv_lens[row]}")
        positions, slots = _place_tokens(
            kv_lens - counts,
            counts,
            self.kv_indptr.numpy().astype(np.int64),
            self.kv_indices.numpy(),
            self.block_size,
        )
        for name, wanted in (("positions", positions), ("slot_mapping", slots)):
            given = getattr(self, name).numpy()
            if not np.array_equal(given, wanted):
                token = int(np.flatnonzero(given != wanted)[0])
                raise PlanError(
                    f"{name}[{token}] is {given[token]}; its row's blocks make it {wanted[token]}"
                )

    def _check_slots(self) -> None:
        """No slot is written twice."""
        ordered = np.sort(np.concatenate((self.slot_mapping.numpy(), self.mirror_slots.numpy())))
        twice = ordered[1:][ordered[1:] == ordered[:-1]]
        if twice.size:
            block, offset = divmod(int(twice[0]), self.block_size)
            raise PlanError(f"two tokens of the step write to block {block}, offset {offset}")

    def _check_mirrors(self) -> None:
        """Prove that every mirror takes the token of its own position over."""
        counts = np.diff(self.qo_indptr.numpy()).astype(np.int64)
        starts = self.kv_lens.numpy().astype(np.int64) - counts
        mirrored = np.diff(self.mirror_indptr.numpy()).astype(np.int64)
        if (mirrored > starts).any():
            row = int(np.flatnonzero(mirrored > starts)[0])
            raise PlanError(f"row {row} mirrors {mirrored[row]} tokens but starts at {starts[row]}")
        tokens, given = self.mirror_tokens.numpy(), self.mirror_slots.numpy()
        if tokens.min() < 0 or tokens.max() >= self.num_tokens:
            raise PlanError(
                f"mirror_tokens goes from {tokens.min()} to {tokens.max()}; there are {self.num_tokens} tokens"
            )
        kv_indptr = self.kv_indptr.numpy().astype(np.int64)
        positions, slots = _place_tokens(
            starts - mirrored, mirrored, kv_indptr, self.kv_indices.numpy(), self.block_size
        )
        wrong = (self.positions.numpy()[tokens] != positions) | (given != slots)
        if wrong.any():
            mirror = int(np.flatnonzero(wrong)[0])
            raise PlanError(
                f"mirror {mirror} writes the token of position {self.positions[tokens[mirror]]} to slot {given[mirror]}; "
                f"its row has position {positions[mirror]} in slot {slots[mirror]}"
            )

    def _check_group(self, group: SharedGroup) -> None:
        rows, shared = group.rows, group.num_shared_blocks
        if len(rows) < 2 or list(rows) != sorted(set(rows)) or rows[0] < 0 or rows[-1] >= self.num_rows:
            raise PlanError(f"group rows {rows} must be two or more of {self.num_rows} rows, ascending")
        chosen = np.array(rows)
        starts = (self.kv_lens - (self.qo_indptr[1:] - self.qo_indptr[:-1])).numpy()[chosen]
        if shared < 1 or starts.min() < shared * self.block_size:
            row = int(starts.argmin())
            raise PlanError(
                f"row {rows[row]} starts at {starts[row]}; it can't share {shared} blocks as past KV"
            )
        places = self.kv_indptr.numpy()[chosen].reshape(-1, 1) + np.arange(shared)
        blocks = self.kv_indices.numpy()[places]
        differs = (blocks != blocks[0]).any(1)
        if differs.any():
            other = rows[int(differs.argmax())]
            raise PlanError(f"rows {rows[0]} and {other} differ within their {shared} shared blocks")


def _check_rows(
    rows: Sequence[PlanRow], starts: IntArray, counts: IntArray, mirrored: IntArray, num_blocks: IntArray
) -> None:
    lengths = np.fromiter((len(row.block_table) for row in rows), np.int64, len(rows))
    wrong = (starts < mirrored) | (counts < 0) | (lengths < num_blocks)
    if not wrong.any():
        return
    row = int(np.flatnonzero(wrong)[0])
    if starts[row] < 0 or counts[row] < 0:
        raise PlanError(f"row {row} has start {starts[row]} and count {counts[row]}; both must be 0 or more")
    if starts[row] < mirrored[row]:
        raise PlanError(f"row {row} mirrors {mirrored[row]} tokens but starts at {starts[row]}")
    raise PlanError(
        f"row {row} covers {starts[row] + counts[row]} tokens, which need {num_blocks[row]} blocks; "
        f"its block table has {lengths[row]}"
    )


def _check_indptr(name: str, indptr: npt.NDArray[np.int32], total: int) -> None:
    if indptr[0] != 0 or indptr[-1] != total or (np.diff(indptr) < 0).any():
        raise PlanError(f"{name} must rise from 0 to {total}, got {indptr.tolist()}")


def _offsets(counts: IntArray) -> IntArray:
    offsets = np.zeros(len(counts) + 1, np.int64)
    np.cumsum(counts, out=offsets[1:])
    return offsets


def _place_tokens(
    starts: IntArray,
    counts: IntArray,
    kv_indptr: IntArray,
    kv_indices: npt.NDArray[np.int32],
    block_size: int,
) -> tuple[IntArray, IntArray]:
    """Positions and slots of all tokens: each int64 `[num_tokens]`."""
    row_begin = _offsets(counts)[:-1]
    positions = np.arange(int(counts.sum()), dtype=np.int64) + np.repeat(starts - row_begin, counts)
    block, offset = np.divmod(positions, block_size)
    slots = kv_indices[np.repeat(kv_indptr[:-1], counts) + block].astype(np.int64) * block_size + offset
    return positions, slots
