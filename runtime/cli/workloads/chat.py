"""Conversations that grow by turns, several at a time, behind one system prompt."""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass

from phloem.runtime.cli.floors import DecodeStage
from phloem.runtime.cli.workloads.client import Answer, Ask, Client
from phloem.runtime.cli.workloads.words import Words


@dataclass(frozen=True, slots=True)
class Chat:
    """The next turn's prompt is the whole conversation: all prompts and answers before, and new tokens."""

    conversations: int = 8
    turns: int = 6
    at_once: int = 4
    """Conversations; the next one begins when one has ended."""

    system_tokens: int = 64
    user_tokens: int = 60
    """New in each turn."""

    output_tokens: int = 64

    @property
    def title(self) -> str:
        """See :class:`Workload`."""
        return (
            f"chat: {self.conversations} conversations x {self.turns} turns, {self.at_once} at once, "
            f"{self.user_tokens} in / {self.output_tokens} out, {self.system_tokens} of a system prompt"
        )

    async def prepare(self, client: Client, words: Words, round_number: int) -> list[Answer]:
        """See :class:`Workload`."""
        return []

    async def run(self, client: Client, words: Words, round_number: int) -> list[Answer]:
        """See :class:`Workload`."""
        rng = random.Random(f"chat {round_number}")
        system = words.draw(rng, self.system_tokens)
        turns = [
            [words.draw(rng, self.user_tokens) for _ in range(self.turns)] for _ in range(self.conversations)
        ]
        left = iter(turns)
        answers: list[Answer] = []

        async def talk() -> None:
            for conversation in left:
                path = system
                for turn in conversation:
                    [answer] = await client.complete([Ask(path + turn, self.output_tokens)])
                    answers.append(answer)
                    path = path + turn + answer.token_ids

        await asyncio.gather(*(talk() for _ in range(self.at_once)))
        return answers

    def decode_stages(self, words: Words) -> list[DecodeStage]:
        """See :class:`Workload`."""
        waves = self.conversations / self.at_once
        stages = []
        for turn in range(1, self.turns + 1):
            own = turn * self.user_tokens + (turn - 1) * self.output_tokens + self.output_tokens / 2
            kv_tokens = self.system_tokens + self.at_once * own
            stages.append(DecodeStage(waves * (self.output_tokens - 1), self.at_once, kv_tokens))
        return stages
