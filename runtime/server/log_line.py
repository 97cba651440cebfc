"""One line of log for each interval in which something happened. It tells numbers, never a prompt."""

from __future__ import annotations

import asyncio
import logging
import time

from phloem.runtime.errors import EngineClosed
from phloem.runtime.outputs import EngineStats
from phloem.runtime.server.service import Service

logger = logging.getLogger(__name__)


class IntervalLog:
    """Writes the line when it is due. Used by the event loop."""

    def __init__(self, service: Service, interval_s: float) -> None:
        self._service = service
        self._interval_s = interval_s
        self._written_at = time.monotonic()
        self._before = self._counters()
        self._task: asyncio.Task[None] | None = None

    def tick(self) -> None:
        """Begin to write the line if it is due and the server is not idle."""
        if time.monotonic() - self._written_at < self._interval_s or (self._task and not self._task.done()):
            return
        elapsed_s = time.monotonic() - self._written_at
        self._written_at = time.monotonic()
        if self._counters() != self._before or self._service.gate.active:
            self._task = asyncio.ensure_future(self._write(elapsed_s))

    async def _write(self, elapsed_s: float) -> None:
        try:
            stats = await asyncio.to_thread(self._service.engine.stats)
        except EngineClosed:
            return
        logger.info("%s", self._line(stats, elapsed_s))

    def _line(self, stats: EngineStats, elapsed_s: float) -> str:
        now = self._counters()
        prompts, new, cached, generated = (
            after - before for after, before in zip(now, self._before, strict=True)
        )
        self._before = now
        blocks = stats.cache
        used = 1 - (blocks.free + blocks.evictable) / blocks.num_blocks
        return (
            f"running {stats.running}, queued {stats.waiting}; in {elapsed_s:.0f} s: {prompts} prompts, {new} new tokens, "
            f"{cached} cached, {generated} generated; KV usage {used:.0%}, {blocks.evictable} of {blocks.num_blocks} blocks evictable"
        )

    def _counters(self) -> tuple[int, int, int, int]:
        """Prompts, tokens computed, tokens cached, tokens generated."""
        totals = self._service.totals
        num_new = totals.prompt_tokens - totals.cached_tokens
        return totals.prompts, num_new, totals.cached_tokens, totals.generated_tokens
