"""What a workload is."""

from __future__ import annotations

from typing import Protocol

from phloem.runtime.cli.floors import DecodeStage
from phloem.runtime.cli.workloads.client import Answer, Client
from phloem.runtime.cli.workloads.words import Words


class Workload(Protocol):
    """A program of requests. Every round asks other prompts, so that nothing is cached from round to round."""

    @property
    def title(self) -> str:
        """What it does, with its sizes."""

    async def prepare(self, client: Client, words: Words, round_number: int) -> list[Answer]:
        """Ask what comes before the time is taken."""

    async def run(self, client: Client, words: Words, round_number: int) -> list[Answer]:
        """Ask all, and return the answers, each after those that its prompt builds on."""

    def decode_stages(self, words: Words) -> list[DecodeStage]:
        """Return the decode steps that it takes at least, at the batches it allows. First tokens come with the prompts."""
