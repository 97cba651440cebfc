"""Rounds of a workload on an engine or on servers in turns, and what they took beside the machine's floor."""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import asdict, dataclass
from typing import Any

from phloem.runtime.cli.floors import FloorModel
from phloem.runtime.cli.workloads.client import Answer, Client
from phloem.runtime.cli.workloads.tally import exact_hits
from phloem.runtime.cli.workloads.words import Words
from phloem.runtime.cli.workloads.workload import Workload


@dataclass(frozen=True, slots=True)
class Target:
    """What a workload runs on."""

    name: str
    open: Callable[[], AbstractAsyncContextManager[Client]]


@dataclass(frozen=True, slots=True)
class Round:
    """One run of a workload. Times are in seconds."""

    seconds: float
    requests: int
    output_tokens: int
    prompt_tokens: int
    """As the target counts them."""

    cached_tokens: int | None
    """Of these; None where the target does not tell."""

    sent_tokens: int
    """Prompt tokens as they were sent."""

    exact_tokens: int
    """Of these, what an exact cache without limits would have."""

    first_token_s: float
    """Median over the requests."""

    gap_s: float | None
    """Median time between two tokens; None where no answer has two pieces."""

    floor_s: float
    """The least that the machine takes."""


@dataclass(frozen=True, slots=True)
class WorkloadResult:
    """All counted rounds of a workload on one target."""

    title: str
    target: str
    rounds: list[Round]

    @property
    def tokens_per_s(self) -> list[float]:
        """Output tokens per second of each round."""
        return [each.output_tokens / each.seconds for each in self.rounds]

    @property
    def median_tokens_per_s(self) -> float:
        """Over the rounds."""
        return statistics.median(self.tokens_per_s)

    @property
    def cached_share(self) -> float | None:
        """Of the prompt tokens; None where the target does not tell."""
        cached = [each.cached_tokens for each in self.rounds if each.cached_tokens is not None]
        if len(cached) < len(self.rounds):
            return None
        return sum(cached) / sum(each.prompt_tokens for each in self.rounds)

    @property
    def exact_share(self) -> float:
        """The same of an exact cache."""
        return sum(each.exact_tokens for each in self.rounds) / sum(each.sent_tokens for each in self.rounds)

    @property
    def limit_share(self) -> float:
        """Floor by time, the median over the rounds: 1 is as fast as the machine can."""
        return statistics.median(each.floor_s / each.seconds for each in self.rounds)

    @property
    def first_token_s(self) -> float:
        """The median over the rounds."""
        return statistics.median(each.first_token_s for each in self.rounds)

    @property
    def gap_s(self) -> float | None:
        """The median over the rounds."""
        gaps = [each.gap_s for each in self.rounds if each.gap_s is not None]
        return statistics.median(gaps) if gaps else None

    def to_dict(self) -> dict[str, Any]:
        """Return it as plain data."""
        return {
            "title": self.title,
            "target": self.target,
            "tokens_per_s": self.median_tokens_per_s,
            "cached_share": self.cached_share,
            "exact_share": self.exact_share,
            "limit_share": self.limit_share,
            "first_token_s": self.first_token_s,
            "gap_s": self.gap_s,
            "rounds": [asdict(each) for each in self.rounds],
        }


@dataclass(frozen=True, slots=True)
class Bench:
    """What all rounds have in common."""

    words: Words
    floors: FloorModel

    def measure(
        self, workload: Workload, targets: Sequence[Target], *, rounds: int, advance: Callable[[], None]
    ) -> list[WorkloadResult]:
        """Run the workload on the targets in turns, one round more than is counted: the first warms up.

        Args:
            workload: What to run.
            targets: Who takes part; who is first changes from round to round.
            rounds: That count.
            advance: Called after each round of each target, `len(targets) * (rounds + 1)` times.
        """
        found: dict[str, list[Round]] = {target.name: [] for target in targets}
        for number in range(rounds + 1):
            first = number % len(targets)
            for target in [*targets[first:], *targets[:first]]:
                one = self.round(workload, target, number)
                if number > 0:
                    found[target.name].append(one)
                advance()
        return [WorkloadResult(workload.title, name, each) for name, each in found.items()]

    def round(self, workload: Workload, target: Target, number: int) -> Round:
        """Run the workload once; a number's prompts are always the same."""
        return asyncio.run(self._round(workload, target, number))

    async def _round(self, workload: Workload, target: Target, number: int) -> Round:
        async with target.open() as client:
            before = await workload.prepare(client, self.words, number)
            started = time.perf_counter()
            answers = await workload.run(client, self.words, number)
            seconds = time.perf_counter() - started
        return self._result(workload, before, answers, seconds)

    def _result(
        self, workload: Workload, before: list[Answer], answers: list[Answer], seconds: float
    ) -> Round:
        hits = exact_hits((each.ask.prompt, each.token_ids) for each in before + answers)[len(before) :]
        lengths = [len(each.ask.prompt) for each in answers]
        cached = [each.cached_tokens for each in answers if each.cached_tokens is not None]
        gaps = [gap for each in answers for gap in each.gaps_s]
        return Round(
            seconds=seconds,
            requests=len(answers),
            output_tokens=sum(each.completion_tokens for each in answers),
            prompt_tokens=sum(each.prompt_tokens for each in answers),
            cached_tokens=sum(cached) if len(cached) == len(answers) else None,
            sent_tokens=sum(lengths),
            exact_tokens=sum(hits),
            first_token_s=statistics.median(each.first_token_s for each in answers),
            gap_s=statistics.median(gaps) if gaps else None,
            floor_s=self.floors.total_s(zip(lengths, hits, strict=True), workload.decode_stages(self.words)),
        )
