"""Which tokens the next step computes.

A request moves through three phases::

              admit                    finish, abort, fail
    WAITING ─────────▶ RUNNING ───────────────────────────▶ FINISHED
       ▲                  │
       └──────────────────┘ preempt: its computed blocks stay in the tree, and it resumes with a hit on them

Each step is `schedule` (decide, lock, allocate), then the model runs, then `commit` (blocks become matchable only now, rule 7).
Nothing here touches a tensor, and nothing here is thread-safe: the engine's loop owns it.
"""

from __future__ import annotations

from bisect import bisect
from collections.abc import Iterable, Iterator

from phloem.radix import OutOfBlocks
from phloem.radix.packing import TOKEN_BYTES
from phloem.runtime.batch import Batch, Refusal, Row, RowCopy
from phloem.runtime.errors import CacheFull, QueueFull
from phloem.runtime.path import Path
from phloem.runtime.path_cache import PathCache
from phloem.runtime.request import Hold, Phase, Request
from phloem.runtime.twins import with_leads

WINDOW = 64
"""How many of the oldest waiting requests are compared when one is admitted."""

MAX_PASSES = 16
"""How often a request may see a younger one admitted before it, for that one's longer cached prefix."""


class Scheduler:
    """Continuous batching over a radix cache: decodes first, then chunks of prefill, within a budget of tokens.

    Owns every request's phase. Among waiting requests the longest cached prefix goes first, within bounds (`_next_waiting`); a
    request whose next block is being computed for another one is held back until that block is there. Requests of a cohort
    are admitted beside others only where that costs no other of the cohort what it can reuse: in memory for the longest of
    their paths, no block of their tree is computed twice (as long as nobody else needs the memory).

    Progress: the oldest running request is never preempted, so it ends; then the next one is the oldest. The oldest waiting
    request is admitted after at most `MAX_PASSES` others, or refused when it does not fit with nothing else running.
    """

    def __init__(
        self, paths: PathCache, *, max_running: int, max_step_tokens: int, max_waiting: int | None = None
    ) -> None:
        self.paths = paths
        self.max_waiting = max_waiting
        self.block_size = paths.block_size
        self.max_running = max_running
        self.max_step_tokens = max_step_tokens
        self.waiting: list[Request] = []
        """In order of arrival."""
        self.running: list[Request] = []
        """In order of arrival too, so that the last one is the first to be preempted."""
        self.preemptions = 0
        self._arrivals = 0

    @property
    def has_work(self) -> bool:
        """Whether there is a request that has not finished."""
        return bool(self.waiting or self.running)

    def add(self, request: Request) -> None:
        """Queue a new request.

        Raises:
            CacheFull: It needs more blocks than the pool has.
            QueueFull: As many wait already as may.
        """
        if self.max_waiting is not None and len(self.waiting) >= self.max_waiting:
            raise QueueFull(
                f"{len(self.waiting)} requests wait already, as many as max_waiting allows; try again later"
            )
        needed = self.paths.blocks_for(len(request.tokens))
        num_blocks = self.paths.num_blocks
        if needed > num_blocks:
            raise CacheFull(
                f"the prompt of {len(request.tokens)} tokens needs {needed} blocks of {self.block_size} tokens, and the pool has "
                f"{num_blocks}; shorten it or raise num_blocks (or kv_memory_bytes)"
            )
        request.arrival = self._arrivals
        self._arrivals += 1
        self.waiting.append(request)

    def requests_on(self, path: Path) -> Iterator[Request]:
        """Yield the unfinished requests on a path. O(requests)."""
        return (request for request in (*self.running, *self.waiting) if request.path is path)

    def is_busy(self, path: Path) -> bool:
        """Whether an unfinished request is on the path. O(requests)."""
        return any(True for _ in self.requests_on(path))

    def schedule(self) -> Batch:
        """Choose the rows of the next step, and lock and allocate what they need.

        With nothing running, the oldest waiting request starts or is refused: a step never leaves all of them waiting, except
        for one in which the only running request was preempted.
        """
        self.paths.expire()
        batch = Batch()
        budget = self.max_step_tokens
        preempted = self.preemptions
        for request in self._by_urgency():
            if budget == 0:
                break
            # An older request may have preempted this one since the list was made.
            if request.phase is Phase.RUNNING and self._grow(request, batch):
                budget -= self._add_row(batch, request, budget)
        if self.preemptions == preempted:
            self._admit_waiting(batch, budget)
        if self.paths.prefix_cache:
            batch.rows = with_leads(batch.rows, block_size=self.block_size)
            _count_led(batch.rows)
        return batch

    def following(self, batch: Batch) -> Batch | None:
        """Choose the next step of the decodes of a batch before its tokens are known: for a device that still computes it.

        None when others wait who could be admitted, when memory is short, or when every decode ends with this step: then the
        next step must be scheduled with the tokens.
        """
        if self.waiting and len(self.running) < self.max_running:
            return None
        following = Batch()
        for row in batch.rows:
            request = row.request
            # It has been aborted, or the token that is being sampled is its last.
            if request.phase is not Phase.RUNNING or row.end + 1 >= request.max_len:
                continue
            try:
                copies = self.paths.grow(request.path, row.end + 1)
            except OutOfBlocks:
                return None  # what the others got they would have asked for next
            assert not copies, "a path that has just written to its tail shares it with nobody"
            following.rows.append(Row(request, row.end, 1))
        return following if following.rows else None

    def commit(self, rows: Iterable[Row]) -> None:
        """Record that a step has computed these rows, and put the blocks which that filled into the tree."""
        for row in rows:
            self.paths.commit(row.request.path, row.end)

    def finish(self, request: Request) -> None:
        """End a request in any phase. Its path is released, or parked for the branch that keeps it; a second call does nothing."""
        if request.phase is Phase.FINISHED:
            return
        self._leave_to_cohort(request)
        if request.phase is Phase.RUNNING:
            self.running.remove(request)
            if request.keeps_path:
                self.paths.park(request.path)
        else:
            self.waiting.remove(request)
        if not request.keeps_path:
            self.paths.retire(request.path)
        request.phase = Phase.FINISHED

    # Running requests

    def _by_urgency(self) -> list[Request]:
        """Decodes before prefills, so that no running generation stalls behind a long prompt."""
        return sorted(self.running, key=lambda request: (request.num_pending > 1, request.arrival))

    def _add_row(self, batch: Batch, request: Request, budget: int) -> int:
        count = min(request.num_pending, budget)
        batch.rows.append(Row(request, request.path.num_computed, count))
        return count

    def _grow(self, request: Request, batch: Batch) -> bool:
        """Give a request room for all its known tokens, preempting younger ones if need be. False: it was preempted itself.

        Mostly it is a decode that grows: admission allocates for the whole prompt.
        """
        while True:
            try:
                batch.copies += self.paths.grow(request.path, request.num_to_compute)
                return True
            except OutOfBlocks:
                if self.paths.drop_kept():
                    continue
                victim = self.running[-1]
                self._preempt(victim)
                batch.rows = [row for row in batch.rows if row.request is not victim]
                if victim is request:
                    return False

    def _preempt(self, request: Request) -> None:
        self.running.remove(request)
        self.paths.release(request.path)
        request.phase = Phase.WAITING
        _insert_by_arrival(self.waiting, request)
        request.num_preemptions += 1
        self.preemptions += 1

    # Admission

    def _admit_waiting(self, batch: Batch, budget: int) -> None:
        while self.waiting and budget > 0 and len(self.running) < self.max_running:
            request = self._next_waiting()
            # When it waits for memory, nobody overtakes it: those behind it have less in the cache, or came later.
            if request is None or not self._admit(request, batch):
                return
            if request.num_pending > 0:
                budget -= self._add_row(batch, request, budget)
            else:
                batch.computed.append(request)

    def _next_waiting(self) -> Request | None:
        """Choose whom to admit next; None when all are held back.

        Among the oldest waiting request and those of its namespace in the window behind it, the one with the longest
        cached prefix: what it needs is there now, and may be evicted later. (In SGLang: longest prefix match first.) The order of
        namespaces never depends on what they have cached, so that no tenant can see in its waiting times what another sent.
        Whoever was passed over `MAX_PASSES` times goes first: so once a request is the oldest, at most that many are admitted
        before it.
        """
        window = [request for request in self.waiting[:WINDOW] if not self._is_held(request)]
        if not window:
            return None
        oldest = window[0]
        if not self.paths.prefix_cache or oldest.passes >= MAX_PASSES:
            return oldest
        if oldest.cohort is not None and not self.running:
            return oldest  # others may not fit in beside what is kept for it
        rivals = [request for request in window if request.namespace == oldest.namespace]
        # The oldest of equals.
        chosen = max(rivals, key=self._cached_tokens) if len(rivals) > 1 else oldest
        for request in rivals[: rivals.index(chosen)]:
            request.passes += 1
        return chosen

    def _cached_tokens(self, request: Request) -> int:
        if request.path.is_resident:
            return request.path.num_computed
        return self.paths.cached_tokens(request.path, reusable=request.reusable)

    def _admit(self, request: Request, batch: Batch) -> bool:
        """Lock the request's cached prefix and allocate the rest. False: it can't run now, or was refused for good."""
        if request.explanation is None:
            # Tokens that a grammar forces at the very beginning are in the path by now, and no part of the prompt.
            request.explanation = self.paths.explain(
                request.path, reusable=request.reusable, num_tokens=request.num_prompt_tokens
            )
        try:
            copies = self._make_room(request)
        except OutOfBlocks as error:
            if not self.running:
                # Nothing will free a block by itself, so waiting would be for ever.
                self.finish(request)
                batch.refused.append(
                    Refusal(request, CacheFull(f"request {request.id} cannot start: {error}"))
                )
            return False
        batch.copies += copies
        request.path.label = request.id
        self.waiting.remove(request)
        request.phase = Phase.RUNNING
        _insert_by_arrival(self.running, request)
        if request.cached_tokens is None:
            request.cached_tokens = min(request.path.num_computed, request.num_prompt_tokens)
        return True

    def _make_room(self, request: Request) -> list[RowCopy]:
        waits_for_others = request.cohort is not None and bool(self.running)
        spare = self._spare(request) if waits_for_others else 0
        while True:
            try:
                return self.paths.admit(
                    request.path, reusable=request.reusable, num_tokens=request.num_to_compute, spare=spare
                )
            except OutOfBlocks:
                if waits_for_others or not self.paths.drop_kept():
                    raise

    # Cohorts: depth first, so that memory for the longest path is enough to compute nothing twice

    def _spare(self, request: Request) -> int:
        """How many blocks to leave when a request of a cohort is admitted beside running ones. O(running + WINDOW).

        What the cohort's running requests will grow by, lest one is preempted, or evicts what the next ones want; and if
        it is not its cohort's turn yet, room for each of those whose turn comes before.
        """
        growth = sum(
            max(0, self._extent(other) - len(other.path.block_table))
            for other in self.running
            if other.cohort is not None
        )
        own = self._extent(request) - self.paths.blocks_for(request.num_to_compute)
        before = (
            self._extent(other)
            for other in self.waiting[:WINDOW]
            if other.cohort is request.cohort and other.arrival < request.arrival
        )
        return growth + own + max(before, default=0)

    def _extent(self, request: Request) -> int:
        return self.paths.blocks_for(request.expected_len)

    def _leave_to_cohort(self, request: Request) -> None:
        """Keep what the next request of the cohort shares with one that ends: all others behind share less of it."""
        cohort = request.cohort
        if cohort is None or not self.paths.prefix_cache:
            return
        if request.samples and request.phase is Phase.RUNNING:
            cohort.output_share = max(request.output_share, cohort.output_share or 0.0)
        index = bisect(self.waiting, request.arrival, key=lambda other: other.arrival)
        behind = (other for other in self.waiting[index : index + WINDOW] if other.cohort is cohort)
        heir = next(behind, None)
        if heir is not None:
            self.paths.keep(heir.path)

    # Twins wait (rule 9)

    def _is_held(self, request: Request) -> bool:
        """Whether the block that the request needs next is being computed for a running one."""
        if not self.paths.prefix_cache or request.num_pending < self.block_size:
            return False
        hold = request.hold
        if hold and hold.producer.phase is Phase.RUNNING and hold.producer.path.num_committed < hold.until:
            return True
        request.hold = self._find_hold(request)
        return request.hold is not None

    def _find_hold(self, request: Request) -> Hold | None:
        if not any(other.num_pending > 0 for other in self.running):
            return None
        wanted = min(request.reusable, request.num_prompt_tokens)
        seen = self.paths.cached_tokens(request.path, reusable=request.num_prompt_tokens)
        hit = max(request.path.num_committed, min(seen, wanted - wanted % self.block_size))
        end = hit + self.block_size
        # A block that is there but may not count whole is copied: of a cached prompt, only the last token runs.
        if hit >= wanted or seen >= end:
            return None
        with memoryview(request.packed_prompt) as prompt:
            needed = prompt[: end * TOKEN_BYTES]
            for other in self.running:
                will_commit = other.path.num_committed < end <= other.num_to_compute
                if will_commit and other.namespace == request.namespace and _starts_with(other, needed):
                    return Hold(other, until=end)
        return None


def _starts_with(request: Request, prefix: memoryview) -> bool:
    """Whether the known tokens of a request start with `prefix`. A memory compare."""
    if len(prefix) <= len(request.packed_prompt):
        return request.packed_prompt.startswith(prefix)
    with memoryview(request.tokens).cast("B") as path:
        return path[: len(prefix)].tobytes().startswith(prefix)


def _count_led(rows: Iterable[Row]) -> None:
    """Count what another row computes, in the first step of a request, as if the cache had had it."""
    for row in rows:
        if row.lead is not None and row.start == row.request.cached_tokens:
            row.request.cached_tokens = row.start + row.lead.num_tokens


def _insert_by_arrival(requests: list[Request], request: Request) -> None:
    """Insert into a list that is in order of arrival. Most often the place is at the end."""
    index = len(requests)
    while index and requests[index - 1].arrival > request.arrival:
        index -= 1
    requests.insert(index, request)
