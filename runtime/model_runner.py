"""Runs a batch through the model. The only owner of tensors: weights, KV, attention metadata."""

from __future__ import annotations

from array import array
from collections import defaultdict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass, field

import torch
from torch import Tensor

from phloem.kernels.attention import AttentionBackend
from phloem.kernels.finite import finite_rows
from phloem.kernels.kv_store import PagedKVStore
from phloem.kernels.plan import AttentionPlan, PlanRow
from phloem.runtime.batch import Batch, Row, RowCopy
from phloem.runtime.errors import GrammarError
from phloem.runtime.logprobs import score_known
from phloem.runtime.models.decoder import Decoder
from phloem.runtime.outputs import TokenLogprob
from phloem.runtime.sampler import SamplingRow, sample
from phloem.runtime.step_forward import EagerForward, Forward

SCORED_ROWS = 64
"""Rows of logits that are held at once when known tokens are scored: a vocabulary of 150,000 takes 38 MB."""


@dataclass(slots=True)
class RowResult:
    """What a step found for one row."""

    row: Row
    is_finite: bool
    """False: the hidden state holds NaN or infinity, so the KV that this row wrote is worthless."""

    token_id: int | None = None
    """The token sampled, where the row reaches the end of its known tokens."""

    sampled: TokenLogprob | None = None
    """Of that token, where it was asked for."""

    candidates: tuple[float, ...] = ()
    """Log-probabilities of the request's `candidate_ids`."""

    scored: list[TokenLogprob] = field(default_factory=list)
    """Of the known tokens after the row's `scored` positions."""

    error: GrammarError | None = None
    """Why nothing could be sampled: the grammar has come to a dead end, or got too complex."""


class ModelRunner:
    """Model, KV store and attention backend of one engine. Knows no tree and decides nothing."""

    def __init__(
        self,
        decoder: Decoder,
        store: PagedKVStore,
        attention: AttentionBackend,
        *,
        eos_ids: Sequence[int],
        forward: Forward | None = None,
    ) -> None:
        """Take the parts; `forward` says how a step runs through them, kernel by kernel if None."""
        self.decoder = decoder
        self.store = store
        self.attention = attention
        self.forward: Forward = forward or EagerForward(decoder, attention)
        self.eos_ids = tuple(eos_ids)
        self._mask_pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="phloem-masks")

    def close(self) -> None:
        """End the thread that computes masks."""
        self._mask_pool.shutdown()

    @torch.inference_mode()
    def copy_rows(self, copies: Sequence[RowCopy]) -> None:
        """Make a batch's copies, in their order; before `run`."""
        for copy in copies:
            self.store.copy_rows(copy.source_block, copy.target_block, copy.num_rows)

    @torch.inference_mode()
    def run(self, batch: Batch) -> list[RowResult]:
        """Compute every row of the batch, score known tokens, and sample where a row reaches the end of them.

        Returns:
            One result per row, in the order of the rows.
        """
        rows = batch.rows
        # Masks are computed while the model runs, and kept by the constraints; llguidance lets go of the GIL.
        masks = [
            self._mask_pool.submit(row.request.constraint.mask) for row in rows if row.request.constraint
        ]
        places = places_of(rows)
        hidden = self._forward(rows, places)
        # Every token counts: with a sliding window, a bad one need not reach the last.
        finite: list[bool] = finite_rows(hidden).tolist()
        results = [
            RowResult(row, all(finite[index] for index in place))
            for row, place in zip(rows, places, strict=True)
        ]
        healthy = [(result, place) for result, place in zip(results, places, strict=True) if result.is_finite]
        self._score(healthy, hidden)
        wait(masks)
        ending = [
            (result, place) for result, place in healthy if result.row.reads_next and _can_go_on(result)
        ]
        self._read_next([result for result, _ in ending], hidden, [place[-1] for _, place in ending])
        return results

    def _forward(self, rows: Sequence[Row], places: Sequence[Sequence[int]]) -> Tensor:
        """Run the decoder over all rows. Returns the hidden states, `[num_tokens, hidden_size]`."""
        plan = self.plan_of(rows, places)
        token_ids = array("i")
        for row in rows:
            token_ids += row.request.tokens[row.start + row.num_led : row.end]
        return self.forward.run(torch.frombuffer(token_ids, dtype=torch.int32).long(), plan)

    def _score(self, rows: Sequence[tuple[RowResult, Sequence[int]]], hidden: Tensor) -> None:
        """Find the log-probabilities of the known tokens that rows were asked for, all rows together."""
        wanted: defaultdict[int, list[tuple[RowResult, int]]] = defaultdict(list)
        for result, place in rows:
            for position in result.row.scored:
                wanted[place[position - result.row.start]].append((result, position))
        # In each row, what comes later in the path comes later in the step.
        indices = sorted(wanted)
        for first in range(0, len(indices), SCORED_ROWS):
            part = indices[first : first + SCORED_ROWS]
            logits = self.decoder.logits(hidden[part])
            asked = [(row, *entry) for row, index in enumerate(part) for entry in wanted[index]]
            scored = score_known(
                logits,
                [result.row.request.tokens[position + 1] for _, result, position in asked],
                num_top=[result.row.request.params.prompt_logprobs or 0 for _, result, _ in asked],
                rows=[row for row, _, _ in asked],
            )
            for (_, result, _), entry in zip(asked, scored, strict=True):
                result.scored.append(entry)

    def _read_next(self, results: Sequence[RowResult], hidden: Tensor, indices: Sequence[int]) -> None:
        """Sample the next token of rows that want one, and tell the log-probabilities that were asked for.

        Args:
            results: Of those rows.
            hidden: Of the whole step.
            indices: In it, where each of them ends.
        """
        if not results:
            return
        logits = self._logits_at(hidden, indices)
        finite = finite_rows(logits)
        if not finite.all():
            for result, is_finite in zip(results, finite.tolist(), strict=True):
                result.is_finite = is_finite
            results = [result for result in results if result.is_finite]
            logits = logits[finite]
        # The sampler changes its rows, and what is reported is the model's own.
        raw = logits.clone() if any(_wants_logprobs(result.row) for result in results) else logits
        sampling = [index for index, result in enumerate(results) if result.row.samples]
        if len(sampling) < len(results):
            logits = logits[sampling]
        token_ids = sample(logits, [self.sampling_row(results[index].row) for index in sampling])
        for index, token_id in zip(sampling, token_ids, strict=True):
            results[index].token_id = token_id
        for result, row_logits in zip(results, raw, strict=True):
            if _wants_logprobs(result.row):
                _tell_logprobs(result, row_logits)

    def _logits_at(self, hidden: Tensor, indices: Sequence[int]) -> Tensor:
        """Logits that may be written to, `[num_indices, vocab_size]`; of an index that comes twice, computed once."""
        each = {index: row for row, index in enumerate(dict.fromkeys(indices))}
        logits = self.decoder.logits(hidden[list(each)])
        return logits if len(each) == len(indices) else logits[[each[index] for index in indices]]

    def plan_of(self, rows: Sequence[Row], places: Sequence[Sequence[int]]) -> AttentionPlan:
        """Lay the rows of a step out for attention; `places` are what `places_of` gives."""
        return AttentionPlan.from_rows(
            [
                PlanRow(
                    row.request.path.block_table,
                    row.start + row.num_led,
                    row.num_own,
                    place[: row.num_led] if row.lead else (),
                )
                for row, place in zip(rows, places, strict=True)
            ],
            block_size=self.store.block_size,
        )

    def sampling_row(self, row: Row) -> SamplingRow:
        """Say how the token after a row is sampled."""
        request = row.request
        params = request.params
        num_output = row.end - request.num_prompt_tokens
        banned = (*self.eos_ids, *params.stop_token_ids) if num_output < params.min_tokens else ()
        return SamplingRow(
            params,
            request.seed,
            request.child_index,
            position=row.end,
            banned_ids=banned,
            tokens=request.tokens,
            num_prompt_tokens=request.num_prompt_tokens,
            constraint=request.constraint,
        )


def places_of(rows: Sequence[Row]) -> list[Sequence[int]]:
    """Tell which of the tokens that a step computes are those of each row: ascending, one after the other but for those of its lead."""
    places: list[Sequence[int]] = []
    first = 0
    for row in rows:
        own = range(first, first + row.num_own)
        lead = row.lead
        places.append(own if lead is None else [*places[lead.row][: lead.num_tokens], *own])
        first = own.stop
    return places


def _wants_logprobs(row: Row) -> bool:
    return row.request.params.logprobs is not None or bool(row.request.candidate_ids)


def _tell_logprobs(result: RowResult, logits: Tensor) -> None:
    """Fill in what a request wants to know under one row of logits, `[vocab_size]`."""
    request = result.row.request
    if result.token_id is not None:
        [result.sampled] = score_known(
            logits[None], [result.token_id], num_top=[request.params.logprobs or 0]
        )
    if request.candidate_ids:
        result.candidates = tuple(logits.log_softmax(dim=-1)[list(request.candidate_ids)].tolist())


def _can_go_on(result: RowResult) -> bool:
    """Whether the row's grammar, if any, allows a token at all; notes the error if not."""
    constraint = result.row.request.constraint
    try:
        if constraint is not None:
            constraint.mask()
    except GrammarError as error:
        result.error = error
        return False
    return True
