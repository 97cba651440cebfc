"""Drives a scheduler step by step, with a shadow of the KV memory in place of a model.

Every KV slot of the shadow holds a digest of the whole path up to its token, as real KV depends on it. Before a row
computes, each slot that it would read must hold the digest of its own path: a block that was freed too early, copied too
late, committed before it was written or handed to two owners shows at once. The next token is a function of the path too, so
that two runs of one request must agree whatever happened around it.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from phloem.radix import BlockPool, Namespace, RadixCache
from phloem.runtime import SamplingParams
from phloem.runtime.batch import Batch, Row
from phloem.runtime.path import Path
from phloem.runtime.path_cache import PathCache
from phloem.runtime.request import Cohort, Phase, Request
from phloem.runtime.scheduler import Scheduler


def digests(namespace: Namespace, tokens: Sequence[int]) -> list[int]:
    """Digest of each prefix: `[0]` of the first token, and so on."""
    found, state = [], hash(namespace)
    for token in tokens:
        state = hash((state, token))
        found.append(state)
    return found


class Stepper:
    """A scheduler with a shadow memory, a deterministic next token, and `check()` after every step."""

    def __init__(
        self,
        *,
        num_blocks: int,
        block_size: int = 4,
        vocabulary: int = 97,
        policy: str = "lru",
        **options: int | bool,
    ) -> None:
        limits: dict[str, int | bool] = {"max_running": 8, "max_step_tokens": 64, **options}
        self.cache = RadixCache(BlockPool(num_blocks), block_size=block_size, policy=policy)
        self.paths = PathCache(self.cache, prefix_cache=bool(limits.pop("prefix_cache", True)))
        self.scheduler = Scheduler(self.paths, **limits)
        self.vocabulary = vocabulary
        self.memory: dict[tuple[int, int], int] = {}
        self.computed = 0
        self.batches: list[Batch] = []
        self.refused: list[Request] = []
        self.scored: dict[str, int] = {}
        """How many positions of each request were scored."""

    def add(
        self,
        tokens: Sequence[int],
        *,
        max_tokens: int = 1,
        salt: str | None = None,
        name: str = "r",
        cohort: Cohort | None = None,
    ) -> Request:
        request = Request(
            id=name,
            path=Path(Namespace(salt=salt), array("i", tokens)),
            params=SamplingParams(max_tokens=max_tokens),
            seed=0,
            max_len=len(tokens) + max_tokens,
            cohort=cohort,
        )
        self.scheduler.add(request)
        return request

    def add_on(
        self,
        path: Path,
        appended: Sequence[int],
        *,
        max_tokens: int,
        scored_from: int | None = None,
        name: str = "r",
    ) -> Request:
        """Add a request on a path that a branch keeps; with `max_tokens` 0 it computes and scores only."""
        path.tokens.extend(appended)
        request = Request(
            id=name,
            path=path,
            params=SamplingParams(),
            seed=0,
            max_len=len(path.tokens) + max_tokens,
            logits_from=scored_from,
            keeps_path=True,
        )
        self.scheduler.add(request)
        return request

    def step(self) -> Batch:
        """Run one step, checking every read."""
        batch = self.scheduler.schedule()
        self.refused += [refusal.request for refusal in batch.refused]
        self.cache.check()
        assert batch.num_tokens <= self.scheduler.max_step_tokens
        for copy in batch.copies:
            for offset in range(copy.num_rows):
                self.memory[copy.target_block, offset] = self.memory[copy.source_block, offset]
        for row in batch.rows:
            self._check_reads(row.request, row.start)
        for index, row in enumerate(batch.rows):
            if row.lead is not None:
                assert row.lead.row < index
                self._mirror(batch.rows[row.lead.row], row)
            self._write(row.request, row.start + row.num_led, row.end)
        for row in batch.rows:
            self._check_reads(row.request, row.start + row.count)
        self.computed += batch.num_tokens
        self.scheduler.commit(batch.rows)
        self.cache.check()
        for request in batch.computed:
            self.scheduler.finish(request)
        for row in batch.rows:
            self._deliver(row)
        self.cache.check()
        self.batches.append(batch)
        return batch

    def run(self, limit: int = 10_000) -> None:
        """Run until nothing is left to do."""
        for _ in range(limit):
            if not self.scheduler.has_work:
                break
            self.step()
        assert not self.scheduler.has_work, "no progress"
        stats = self.cache.stats()
        if not self.paths.num_idle:
            assert stats.locked == stats.private - len(self.paths.tails) == 0

    def output_of(self, tokens: Sequence[int], *, max_tokens: int, salt: str | None = None) -> list[int]:
        """What any correct run generates."""
        path = list(tokens)
        for _ in range(max_tokens):
            path.append(digests(Namespace(salt=salt), path)[-1] % self.vocabulary)
        return path[len(tokens) :]

    def _slot(self, request: Request, position: int) -> tuple[int, int]:
        block, offset = divmod(position, self.cache.block_size)
        return request.path.block_table[block], offset

    def _check_reads(self, request: Request, end: int) -> None:
        expected = digests(request.namespace, request.tokens[:end])
        for position in range(end):
            assert self.memory.get(self._slot(request, position)) == expected[position], (
                f"{request.id} reads something else at {position}"
            )

    def _write(self, request: Request, start: int, end: int) -> None:
        values = digests(request.namespace, request.tokens[:end])
        for position in range(start, end):
            self.memory[self._slot(request, position)] = values[position]

    def _mirror(self, leader: Row, row: Row) -> None:
        """Take over the digests of the row that leads; `_check_reads` finds them wrong if they are another path's."""
        assert 0 < row.num_led <= min(row.count, leader.count)
        for position in range(row.start, row.start + row.num_led):
            self.memory[self._slot(row.request, position)] = self.memory[self._slot(leader.request, position)]

    def _deliver(self, row: Row) -> None:
        request = row.request
        if row.scored:
            self.scored[request.id] = self.scored.get(request.id, 0) + len(row.scored)
            request.logits_from = row.scored.stop
        if row.samples:
            self._append_next(request)
        elif not request.samples and request.num_pending == 0:
            self.scheduler.finish(request)

    def _append_next(self, request: Request) -> None:
        assert request.phase is Phase.RUNNING
        request.tokens.append(digests(request.namespace, request.tokens)[-1] % self.vocabulary)
        if len(request.tokens) >= request.max_len:
            self.scheduler.finish(request)
