"""Compares what an engine gave, whatever happened around it, with each of its requests alone."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, fields

import torch
from stepped_engine import Record, SteppedEngine

from phloem.runtime import Completion
from phloem.runtime.branch import Score
from phloem.runtime.generation import QueueSink
from phloem.runtime.path import Path as TokenPath
from phloem.runtime.request import Request


@dataclass(slots=True)
class Report:
    """What a program did besides giving the right answers."""

    cached_tokens: int = 0
    computed_tokens: int = 0
    preemptions: int = 0
    evictions: int = 0
    rows_copied: int = 0
    shared_tails: int = 0
    """Forks that shared a partly filled block."""

    forks_of_running: int = 0
    """Forks of branches that were generating."""

    aborts: int = 0
    scores: int = 0
    tokens_led: int = 0
    """Prompt tokens that another row of the same step computed."""

    compared: int = 0
    """Requests that were run again alone, and agreed."""

    compared_rows: int = 0
    """Rows of logits that had the same bits."""

    def add(self, other: Report) -> None:
        for field in fields(self):
            setattr(self, field.name, getattr(self, field.name) + getattr(other, field.name))


@dataclass(slots=True)
class Scored:
    """The answer to a score."""

    tokens: list[int]
    score: Score


@dataclass(slots=True)
class Told:
    """The answer to `next_token_logprobs`."""

    tokens: list[int]
    logprobs: list[tuple[int, float]]


class Comparison:
    """Runs each request of a program again: alone, with the cache off, its prompt in one piece."""

    def __init__(self, warm: SteppedEngine, cold: SteppedEngine, report: Report) -> None:
        self.records = warm.runner.records
        self.cold = cold
        self.report = report

    def check_requests(self) -> None:
        """Compare tokens, log-probabilities and every row of logits, also of what was aborted, as far as it came."""
        for record in self.records.values():
            if record.logits:
                self._check_same(record, self._alone(record))
                self.report.compared += 1
                self.report.compared_rows += len(record.logits)
                self.report.cached_tokens += record.request.cached_tokens or 0

    def check_completions(self, completions: list[Completion]) -> None:
        """Check that callers got what was recorded."""
        for done in completions:
            usage = done.usage
            assert 0 <= usage.cached_tokens < usage.prompt_tokens
            record = self.records.get(done.request_id)
            if record is None:
                assert done.finish_reason == "abort"
                assert not done.token_ids
                continue
            output = dict(enumerate(done.token_ids, start=len(record.prompt)))
            assert record.tokens.items() <= output.items()
            assert usage.prompt_tokens == len(record.prompt)
            assert usage.completion_tokens == len(output)
            assert (done.prompt_logprobs or []) == record.scored
            assert (done.logprobs or []) == record.sampled

    def check_told(self, told: list[Told], scores: list[Scored]) -> None:
        """Check that callers got the log-probabilities that were recorded."""
        known = self._known_next()
        for each in told:
            for token_id, logprob in each.logprobs:
                assert logprob == known[(*each.tokens, token_id)]
        recorded = {
            (tuple(record.prompt), record.logits_from): record.scored for record in self.records.values()
        }
        for scored in scores:
            given = scored.score.token_logprobs
            assert [entry.token_id for entry in given] == scored.tokens[-len(given) :]
            assert given == recorded[tuple(scored.tokens), len(scored.tokens) - len(given) - 1]
        self.report.scores += len(scores)

    def _known_next(self) -> dict[tuple[int, ...], float]:
        """Return what was recorded of tokens after a prompt, by the prompt and such a token."""
        known = {}
        for record in self.records.values():
            top = record.sampled[0].top if record.sampled else ()
            candidates = zip(record.request.candidate_ids, record.candidates, strict=False)
            known |= {(*record.prompt, token_id): logprob for token_id, logprob in (*top, *candidates)}
        return known

    def _alone(self, record: Record) -> Record:
        request, core = record.request, self.cold.core
        again = Request(
            id=core.next_request_id(),
            path=TokenPath(request.namespace, array("i", record.prompt)),
            params=request.params,
            seed=request.seed,
            max_len=max(record.tokens, default=len(record.prompt) - 1) + 1,
            child_index=request.child_index,
            logits_from=record.logits_from,
            candidate_ids=request.candidate_ids,
            constraint=core.constraint(request.params),
        )
        core.submit(again, QueueSink())
        self.cold.step()
        return self.cold.runner.records.pop(again.id)

    def _check_same(self, warm: Record, cold: Record) -> None:
        assert warm.tokens == cold.tokens, warm.request.id
        assert warm.candidates == cold.candidates
        assert warm.sampled == cold.sampled
        assert warm.scored == cold.scored[: len(warm.scored)]
        for position, row in warm.logits.items():
            assert torch.equal(row, cold.logits[position]), (
                f"other bits after position {position} of request {warm.request.id}"
            )
