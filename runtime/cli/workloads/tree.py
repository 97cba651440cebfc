"""Trees of thoughts (Yao et al., 2023) on the Game of 24, several problems at the same time."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files

from phloem.runtime.cli.floors import DecodeStage
from phloem.runtime.cli.workloads.client import Answer, Ask, Client
from phloem.runtime.cli.workloads.tally import num_distinct
from phloem.runtime.cli.workloads.words import Words

_ROUND_TOKENS = 8
"""In front of every prompt of a round, since the problems are the same in all rounds."""


@dataclass(frozen=True, slots=True)
class TreeOfThoughts:
    """Each node of a level gets some children, each a request of its own; the best of all of them go on.

    Which are the best is drawn, not judged, so that every engine grows trees of the same shape.
    """

    problems: int = 6
    depth: int = 4
    branch: Sequence[int] = (4, 3)
    """Children of each node, level by level; then over again."""

    keep: int = 3
    output_tokens: int = 24

    @property
    def title(self) -> str:
        """See :class:`Workload`."""
        branch = "-".join(str(count) for count in sorted(set(self.branch)))
        return (
            f"tree of thoughts: {self.problems} problems, depth {self.depth}, branch {branch}, keep {self.keep}, "
            f"{self.output_tokens} out"
        )

    async def prepare(self, client: Client, words: Words, round_number: int) -> list[Answer]:
        """See :class:`Workload`."""
        return []

    async def run(self, client: Client, words: Words, round_number: int) -> list[Answer]:
        """See :class:`Workload`."""
        opening = words.draw(random.Random(f"tree {round_number}"), _ROUND_TOKENS)
        prompts = _encoded(words)
        answers: list[Answer] = []

        async def search(problem: int) -> None:
            rng = random.Random(f"tree {round_number} {problem}")
            leaves = [opening + prompts[problem % len(prompts)]]
            for level in range(self.depth):
                asks = [
                    Ask(leaf, self.output_tokens, rng.getrandbits(31))
                    for leaf in leaves
                    for _ in range(self._branch(level))
                ]
                found = await client.complete(asks)
                answers.extend(found)
                best = rng.sample(found, min(self.keep, len(found)))
                leaves = [answer.ask.prompt + answer.token_ids for answer in best]

        await asyncio.gather(*(search(problem) for problem in range(self.problems)))
        return answers

    def decode_stages(self, words: Words) -> list[DecodeStage]:
        """See :class:`Workload`."""
        roots = num_distinct(_encoded(words)[: self.problems]) + _ROUND_TOKENS
        stages, leaves = [], 1
        for level in range(self.depth):
            children = leaves * self._branch(level)
            rows = self.problems * children
            thoughts = self.problems * level * leaves * self.output_tokens + rows * self.output_tokens / 2
            stages.append(DecodeStage(self.output_tokens - 1, rows, roots + thoughts))
            leaves = min(self.keep, children)
        return stages

    def _branch(self, level: int) -> int:
        return self.branch[level % len(self.branch)]


def _encoded(words: Words) -> list[list[int]]:
    """One prompt for each puzzle that ships with phloem: published examples of judgements, then the puzzle's numbers."""
    folder = files("phloem.examples.data.tot")
    published = json.loads(folder.joinpath("prompts.json").read_text(encoding="utf-8"))
    puzzles = json.loads(folder.joinpath("puzzles.json").read_text(encoding="utf-8"))
    texts = [published["value_prompt"].format(input=puzzle) for puzzle in puzzles]
    return [words.tokenizer.encode(text, add_special_tokens=False) for text in texts]
