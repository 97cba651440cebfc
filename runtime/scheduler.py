"""Which tokens the next step computes, and what the cache keeps of it. The only caller of RadixCache.

A request moves through three phases::

              admit                    finish, abort, fail
    WAITING ─────────▶ RUNNING ───────────────────────────▶ FINISHED
       ▲                  │
       └──────────────────┘ preempt: its computed blocks stay in the tree, and it resumes with a hit on them

Each step is `schedule` (decide, lock, allocate), then the model runs, then `commit` (blocks become matchable only now, rule 7).
Nothing here touches a tensor, and nothing here is thread-safe: the engine's loop owns it.
"""

from __future__ import annotations

from collections.abc import Iterable

from phloem.radix import OutOfBlocks, RadixCache
from phloem.runtime.batch import Batch, Refusal, Row, RowCopy
from phloem.runtime.errors import CacheFull
from phloem.runtime.request import Hold, Phase, Request

TOKEN_BYTES = 4


class Scheduler:
    """Continuous batching over a radix cache: decodes first, then chunks of prefill, within a budget of tokens.

    Owns every request's phase, block table and lock. Requests are admitted first come, first served; a request whose next
    block is being computed for another one is passed over until that block is there.
    """

    def __init__(
        self, cache: RadixCache, *, max_running: int, max_step_tokens: int, prefix_cache: bool = True
    ) -> None:
        self.cache = cache
        self.block_size = cache.block_size
        self.max_running = max_running
        self.max_step_tokens = max_step_tokens
        self.prefix_cache = prefix_cache
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
        """
        needed = self._blocks_for(len(request.tokens))
        if needed > self.cache.pool.num_blocks:
            raise CacheFull(
                f"the prompt of {len(request.tokens)} tokens needs {needed} blocks of {self.block_size} tokens, and the pool has "
                f"{self.cache.pool.num_blocks}; shorten it or raise num_blocks (or kv_memory_bytes)"
            )
        request.arrival = self._arrivals
        self._arrivals += 1
        self.waiting.append(request)

    def schedule(self) -> Batch:
        """Choose the rows of the next step, and lock and allocate what they need.

        With nothing running, the oldest waiting request starts or is refused: a step never leaves all of them waiting, except
        for one in which the only running request was preempted.
        """
        batch = Batch()
        budget = self.max_step_tokens
        preempted = self.preemptions
        for request in self._by_urgency():
            if budget == 0:
                break
            # An older request may have preempted this one since the list was made.
            if request.phase is Phase.RUNNING and self._grow(request):
                budget -= self._add_row(batch, request, budget)
        if self.preemptions == preempted:
            self._admit_waiting(batch, budget)
        return batch

    def commit(self, rows: Iterable[Row]) -> None:
        """Record that a step has computed these rows, and put the blocks which that filled into the tree."""
        for row in rows:
            request = row.request
            request.num_computed = row.start + row.count
            if self.prefix_cache:
                self._commit_full_blocks(request)

    def finish(self, request: Request) -> None:
        """End a request in any phase: its lock and its private blocks go; what it committed stays in the tree."""
        if request.phase is Phase.RUNNING:
            self.running.remove(request)
            self._let_go(request)
        elif request.phase is Phase.WAITING:
            self.waiting.remove(request)
        request.phase = Phase.FINISHED

    # Running requests

    def _by_urgency(self) -> list[Request]:
        """Decodes before prefills, so that no running generation stalls behind a long prompt."""
        return sorted(self.running, key=lambda request: (request.num_pending > 1, request.arrival))

    def _add_row(self, batch: Batch, request: Request, budget: int) -> int:
        count = min(request.num_pending, budget)
        batch.rows.append(Row(request, request.num_computed, count))
        return count

    def _grow(self, request: Request) -> bool:
        """Give a request room for all its known tokens, preempting younger ones if need be. False: it was preempted itself.

        Only a decode grows (admission allocates for the whole prompt), and decodes are visited in order of arrival: a
        younger request has no row in this step's batch yet, and can still be preempted.
        """
        short = self._blocks_for(len(request.tokens)) - len(request.block_table)
        if short <= 0:
            return True
        while True:
            try:
                request.block_table += self.cache.allocate(short)
                return True
            except OutOfBlocks:
                victim = self.running[-1]
                self._preempt(victim)
                if victim is request:
                    return False

    def _preempt(self, request: Request) -> None:
        self.running.remove(request)
        self._let_go(request)
        request.phase = Phase.WAITING
        _insert_by_arrival(self.waiting, request)
        request.num_preemptions += 1
        self.preemptions += 1

    def _let_go(self, request: Request) -> None:
        """Return what a running request holds: the lock on its committed blocks, and its private blocks."""
        if request.ref is not None:
            self.cache.unlock(request.ref)
        self.cache.free(request.block_table[request.num_committed // self.block_size :])
        request.ref = None
        request.block_table = []
        request.num_committed = request.num_computed = 0

    # Admission

    def _admit_waiting(self, batch: Batch, budget: int) -> None:
        for request in list(self.waiting):
            if budget == 0 or len(self.running) >= self.max_running:
                return
            if self._is_held(request):
                continue
            if not self._admit(request, batch):
                # First come, first served: nobody overtakes a request that waits for memory.
                return
            budget -= self._add_row(batch, request, budget)

    def _admit(self, request: Request, batch: Batch) -> bool:
        """Lock the request's cached prefix and allocate the rest, or change nothing and return False."""
        try:
            if self.prefix_cache:
                self._acquire(request, batch)
            else:
                request.block_table = self.cache.allocate(self._blocks_for(len(request.tokens)))
        except OutOfBlocks as error:
            if not self.running:
                # Nothing will free a block by itself, so waiting would be for ever.
                self.finish(request)
                batch.refused.append(
                    Refusal(request, CacheFull(f"request {request.id} cannot start: {error}"))
                )
            return False
        self.waiting.remove(request)
        request.phase = Phase.RUNNING
        _insert_by_arrival(self.running, request)
        return True

    def _acquire(self, request: Request, batch: Batch) -> None:
        with memoryview(request.tokens) as tokens:
            # The last token must run to give logits (rule 5).
            grip = self.cache.acquire(
                request.namespace, tokens[:-1], num_blocks=self._blocks_for(len(request.tokens))
            )
        request.ref = grip.node
        request.block_table = [*grip.blocks, *grip.new_blocks]
        request.num_committed = grip.num_tokens
        request.num_computed = grip.num_tokens + grip.tail_tokens
        if grip.tail_block is not None:
            batch.copies.append(RowCopy(grip.tail_block, grip.new_blocks[0], grip.tail_tokens))
        if request.num_preemptions == 0:
            request.cached_tokens = request.num_computed

    # Twins wait (rule 9)

    def _is_held(self, request: Request) -> bool:
        """Whether the block that the request needs next is being computed for a running one."""
        if not self.prefix_cache:
            return False
        hold = request.hold
        if hold and hold.producer.phase is Phase.RUNNING and hold.producer.num_committed < hold.until:
            return True
        request.hold = self._find_hold(request)
        return request.hold is not None

    def _find_hold(self, request: Request) -> Hold | None:
        if not any(other.num_pending > 0 for other in self.running):
            return None
        wanted = len(request.packed_prompt) // TOKEN_BYTES - 1
        with memoryview(request.packed_prompt) as prompt:
            hit = self.cache.match(request.namespace, prompt[: wanted * TOKEN_BYTES]).num_tokens
            if hit == wanted:
                return None
            end = hit + self.block_size
            needed = prompt[: end * TOKEN_BYTES]
            for other in self.running:
                will_commit = other.num_committed < end <= len(other.tokens)
                if will_commit and other.namespace == request.namespace and _starts_with(other, needed):
                    return Hold(other, until=end)
        return None

    # Commit

    def _commit_full_blocks(self, request: Request) -> None:
        """Hand the blocks that are now full to the tree, and adopt the tree's where it has them already (rule 8)."""
        start, end = request.num_committed, request.num_computed - request.num_computed % self.block_size
        if end == start:
            return
        first, last = start // self.block_size, end // self.block_size
        assert request.ref is not None
        done = self.cache.extend(request.ref, request.tokens[start:end], request.block_table[first:last])
        request.ref = done.node
        request.block_table[first:last] = done.blocks
        request.num_committed = end

    def _blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)


def _starts_with(request: Request, prefix: memoryview) -> bool:
    """Whether the known tokens of a request start with `prefix`. A memory compare."""
    in_prompt = len(request.packed_prompt)
    if len(prefix) <= in_prompt:
        return request.packed_prompt.startswith(prefix)
    with memoryview(request.tokens).cast("B") as path:
        return path[: len(prefix)].tobytes().startswith(prefix)


def _insert_by_arrival(requests: list[Request], request: Request) -> None:
    """Insert into a list that is in order of arrival. Most often the place is at the end."""
    index = len(requests)
    while index and requests[index - 1].arrival > request.arrival:
        index -= 1
    requests.insert(index, request)
