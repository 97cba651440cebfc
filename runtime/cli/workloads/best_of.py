"""Many samples of one prompt."""

from __future__ import annotations

import random
from dataclasses import dataclass

from phloem.runtime.cli.floors import DecodeStage
from phloem.runtime.cli.workloads.client import Answer, Ask, Client
from phloem.runtime.cli.workloads.words import Words


@dataclass(frozen=True, slots=True)
class BestOf:
    """All samples are asked for at once, of a prompt that was computed before."""

    samples: int = 16
    prompt_tokens: int = 512
    output_tokens: int = 64

    @property
    def title(self) -> str:
        """See :class:`Workload`."""
        return f"best of {self.samples}: {self.prompt_tokens} in (computed before), {self.output_tokens} out"

    async def prepare(self, client: Client, words: Words, round_number: int) -> list[Answer]:
        """Compute the prompt."""
        return await client.complete([Ask(self._prompt(words, round_number), 1)])

    async def run(self, client: Client, words: Words, round_number: int) -> list[Answer]:
        """See :class:`Workload`."""
        prompt = self._prompt(words, round_number)
        return await client.complete([Ask(prompt, self.output_tokens, seed) for seed in range(self.samples)])

    def decode_stages(self, words: Words) -> list[DecodeStage]:
        """See :class:`Workload`."""
        kv_tokens = self.prompt_tokens + self.samples * self.output_tokens / 2
        return [DecodeStage(self.output_tokens - 1, self.samples, kv_tokens)]

    def _prompt(self, words: Words, round_number: int) -> list[int]:
        return words.draw(random.Random(f"best of {round_number}"), self.prompt_tokens)
