"""What a workload asks of whatever it runs on: prompts of token ids, all at once or one by one. And the engine as such a client."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from phloem.runtime.engine import Engine
from phloem.runtime.generation import AsyncGeneration
from phloem.runtime.sampling_params import SamplingParams


@dataclass(frozen=True, slots=True)
class Ask:
    """One request. It gets `max_tokens` tokens, whatever they are."""

    prompt: list[int]
    max_tokens: int
    seed: int | None = None
    """Draw at temperature 1 with this seed. None: greedy."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What came back."""

    ask: Ask
    token_ids: list[int]
    prompt_tokens: int
    """As the other side counts them."""

    cached_tokens: int | None
    """Of these; None where the other side does not tell."""

    completion_tokens: int
    first_token_s: float
    """From sending to the first token."""

    gaps_s: list[float]
    """Between two pieces, divided by the tokens of the later one."""

    total_s: float


class Client(Protocol):
    """An engine, or a server."""

    async def complete(self, asks: Sequence[Ask]) -> list[Answer]:
        """Ask all at once, and wait for all answers, which are in the order of the asks."""


@dataclass(slots=True)
class Stopwatch:
    """Times of the pieces of one answer."""

    started: float
    first_token_s: float = float("nan")
    last: float = 0.0
    gaps_s: list[float] = field(default_factory=list)
    """Between two pieces, divided by the tokens of the later one."""

    def piece(self, num_tokens: int) -> None:
        """Note a piece that arrives now."""
        if num_tokens == 0:
            return
        now = time.perf_counter()
        if self.last:
            self.gaps_s.append((now - self.last) / num_tokens)
        else:
            self.first_token_s = now - self.started
        self.last = now


class EngineClient:
    """An engine in this process."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    async def complete(self, asks: Sequence[Ask]) -> list[Answer]:
        """See :class:`Client`."""
        started = time.perf_counter()
        params = [
            SamplingParams(
                max_tokens=ask.max_tokens,
                temperature=0.0 if ask.seed is None else 1.0,
                seed=ask.seed,
                ignore_eos=True,
            )
            for ask in asks
        ]
        generations = await self._engine.asubmit([ask.prompt for ask in asks], params)
        return list(
            await asyncio.gather(
                *(
                    _answer(ask, generation, started)
                    for ask, generation in zip(asks, generations, strict=True)
                )
            )
        )


async def _answer(ask: Ask, generation: AsyncGeneration, started: float) -> Answer:
    watch = Stopwatch(started)
    async for chunk in generation:
        watch.piece(len(chunk.token_ids))
    done = await generation.result()
    return Answer(
        ask,
        done.token_ids,
        done.usage.prompt_tokens,
        done.usage.cached_tokens,
        done.usage.completion_tokens,
        watch.first_token_s,
        watch.gaps_s,
        time.perf_counter() - started,
    )
