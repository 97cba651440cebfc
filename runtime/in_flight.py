"""Decode steps that are under way on a device while the host goes on.

The host learns a step's tokens only when the device is done. But the next step of the same decodes needs no host to know them: it
reads them where they are. So it can be launched before, and the host takes up the results of one step while the device
computes the next. A row that turns out to have ended (a stop token, an abort) is computed once in vain, and its result dropped; what
it wrote lies in a block that was private to it, and whoever gets that block next writes to it later on the same stream.

Only rows whose next step hangs on nothing but the token itself can run so: no grammar, no penalties, no log-probabilities.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from phloem.kernels.finite import finite_rows
from phloem.runtime.batch import Batch, Row
from phloem.runtime.model_runner import ModelRunner, RowResult, places_of
from phloem.runtime.sampler import sample_on_device


@dataclass(frozen=True, slots=True, eq=False)
class InFlight:
    """A step that was launched."""

    batch: Batch
    tokens: Tensor
    """int64 `[num_rows]` on the device: what the rows sampled."""
    answer: Tensor
    """int64 `[2, num_rows]` on the host: the tokens, and whether the rows' numbers were finite; valid after `done`."""
    done: torch.Event | None
    """None where there is no device to wait for."""

    def results(self) -> list[RowResult]:
        """Wait for the step, and return one result per row."""
        if self.done is not None:
            self.done.synchronize()
        tokens, finite = self.answer.tolist()
        return [
            RowResult(row, bool(is_finite), token if is_finite else None)
            for row, token, is_finite in zip(self.batch.rows, tokens, finite, strict=True)
        ]


class Launcher:
    """Launches decode steps of a runner without waiting for them."""

    def __init__(self, runner: ModelRunner) -> None:
        self._runner = runner

    def can_launch(self, batch: Batch) -> bool:
        """Whether every row of a step is a decode that can run ahead."""
        return bool(batch.rows) and all(
            row.count == 1 and row.samples and _is_plain(row) for row in batch.rows
        )

    def launch(self, batch: Batch) -> InFlight:
        """Launch a step whose tokens the host knows."""
        token_ids = [row.request.tokens[row.start] for row in batch.rows]
        return self._launch(batch, torch.tensor(token_ids))

    def launch_after(self, before: InFlight, batch: Batch) -> InFlight:
        """Launch the next step of rows of `before`, on the tokens that it samples."""
        place = {row.request.id: index for index, row in enumerate(before.batch.rows)}
        index = [place[row.request.id] for row in batch.rows]
        if index == list(range(len(before.batch.rows))):
            return self._launch(batch, before.tokens)
        return self._launch(batch, before.tokens[torch.tensor(index, device=before.tokens.device)])

    @torch.inference_mode()
    def _launch(self, batch: Batch, token_ids: Tensor) -> InFlight:
        runner = self._runner
        hidden = runner.forward.run(token_ids, runner.plan_of(batch.rows, places_of(batch.rows)))
        logits = runner.decoder.logits(hidden)
        finite = finite_rows(hidden) & finite_rows(logits)
        tokens = sample_on_device(logits, [runner.sampling_row(row) for row in batch.rows])
        found = torch.stack((tokens, finite.long()))
        if found.device.type == "cpu":
            return InFlight(batch, tokens, found, None)
        answer = torch.empty(found.shape, dtype=found.dtype, pin_memory=True)
        answer.copy_(found, non_blocking=True)
        done = torch.Event(found.device)
        done.record()
        return InFlight(batch, tokens, answer, done)


def _is_plain(row: Row) -> bool:
    request = row.request
    params = request.params
    return (
        request.constraint is None
        and request.logits_from is None
        and not request.candidate_ids
        and params.logprobs is None
        and not params.has_penalties
    )
