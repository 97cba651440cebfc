"""Runs a batch through the model. The only owner of tensors: weights, KV, attention metadata."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from phloem.kernels.attention import AttentionBackend
from phloem.kernels.kv_store import PagedKVStore
from phloem.kernels.plan import AttentionPlan, PlanRow
from phloem.runtime.batch import Batch, Row
from phloem.runtime.models.decoder import Decoder
from phloem.runtime.sampler import SamplingRow, sample


@dataclass(frozen=True, slots=True)
class RowResult:
    """What a step found for one row.

    `token_id` is None where the row ends before its known tokens do, or where its numbers went wrong.
    """

    row: Row
    token_id: int | None
    is_finite: bool
    """False: the hidden state holds NaN or infinity, so the KV that this row wrote is worthless."""


class ModelRunner:
    """Model, KV store and attention backend of one engine. Knows no tree and decides nothing."""

    def __init__(
        self, decoder: Decoder, store: PagedKVStore, attention: AttentionBackend, *, eos_ids: Sequence[int]
    ) -> None:
        self.decoder = decoder
        self.store = store
        self.attention = attention
        self.eos_ids = tuple(eos_ids)

    @torch.inference_mode()
    def run(self, batch: Batch) -> list[RowResult]:
        """Compute every row of the batch and sample where a row reaches the end of its known tokens.

        Returns:
            One result per row, in the order of the rows.
        """
        for copy in batch.copies:
            self.store.copy_rows(copy.source_block, copy.target_block, copy.num_rows)
        rows = batch.rows
        last_hidden = self._forward(rows)
        finite = torch.isfinite(last_hidden).all(dim=-1).tolist()
        sampling = [index for index, row in enumerate(rows) if row.samples and finite[index]]
        token_ids = self._sample([rows[index] for index in sampling], last_hidden[sampling])
        sampled = dict(zip(sampling, token_ids, strict=True))
        return [RowResult(row, sampled.get(index), finite[index]) for index, row in enumerate(rows)]

    def _forward(self, rows: Sequence[Row]) -> Tensor:
        """Run the decoder over all rows; return the hidden state of each row's last token, `[num_rows, hidden_size]`."""
        plan = AttentionPlan.from_rows(
            [PlanRow(row.request.path.block_table, row.start, row.count) for row in rows],
            block_size=self.store.block_size,
        )
        self.attention.plan(plan)
        token_ids = array("i")
        for row in rows:
            token_ids += row.request.tokens[row.start : row.start + row.count]
        hidden = self.decoder.forward(
            torch.frombuffer(token_ids, dtype=torch.int32).long(), plan.positions, self.attention
        )
        return hidden[plan.qo_indptr[1:].long() - 1]

    def _sample(self, rows: Sequence[Row], hidden: Tensor) -> list[int]:
        if not rows:
            return []
        logits = self.decoder.logits(hidden)
        return sample(logits, [self._sampling_row(row) for row in rows])

    def _sampling_row(self, row: Row) -> SamplingRow:
        request = row.request
        params = request.params
        num_output = len(request.tokens) - request.num_prompt_tokens
        banned = (*self.eos_ids, *params.stop_token_ids) if num_output < params.min_tokens else ()
        return SamplingRow(
            params, request.seed, request.child_index, position=len(request.tokens), banned_ids=banned
        )
