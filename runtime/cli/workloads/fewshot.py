"""Many questions behind the same examples."""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass

from phloem.runtime.cli.floors import DecodeStage
from phloem.runtime.cli.workloads.client import Answer, Ask, Client
from phloem.runtime.cli.workloads.words import Words


@dataclass(frozen=True, slots=True)
class FewShot:
    """Requests that share a long prefix, so many at a time. The first of them compute it."""

    requests: int = 64
    at_once: int = 16
    shared_tokens: int = 1000
    own_tokens: int = 50
    output_tokens: int = 16

    @property
    def title(self) -> str:
        """See :class:`Workload`."""
        return (
            f"few-shot: {self.requests} requests, {self.shared_tokens:,} shared + {self.own_tokens} own tokens, "
            f"{self.output_tokens} out, {self.at_once} at once"
        )

    async def prepare(self, client: Client, words: Words, round_number: int) -> list[Answer]:
        """See :class:`Workload`."""
        return []

    async def run(self, client: Client, words: Words, round_number: int) -> list[Answer]:
        """See :class:`Workload`."""
        rng = random.Random(f"few-shot {round_number}")
        shared = words.draw(rng, self.shared_tokens)
        left = iter([shared + words.draw(rng, self.own_tokens) for _ in range(self.requests)])
        answers: list[Answer] = []

        async def work() -> None:
            for prompt in left:
                answers.extend(await client.complete([Ask(prompt, self.output_tokens)]))

        await asyncio.gather(*(work() for _ in range(self.at_once)))
        return answers

    def decode_stages(self, words: Words) -> list[DecodeStage]:
        """See :class:`Workload`."""
        kv_tokens = self.shared_tokens + self.at_once * (self.own_tokens + self.output_tokens / 2)
        steps = self.requests / self.at_once * (self.output_tokens - 1)
        return [DecodeStage(steps, self.at_once, kv_tokens)]
