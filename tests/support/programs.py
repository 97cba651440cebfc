"""Random programs of requests and branches on a real model; every output is compared with the same request alone."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Coroutine
from dataclasses import dataclass
from typing import Any

from comparison import Comparison, Report, Scored, Told
from stepped_engine import Lab, SteppedEngine

from phloem.radix import Namespace
from phloem.runtime import Branch, BranchReleased, Completion, Grammar, SamplingParams

ACTIONS = {
    "requests": 12, "open": 10, "append": 10, "generate": 20, "fork": 10, "at": 8, "expand": 6, "score": 12, "next": 3,
    "release": 6, "abort": 5, "clear": 1,
}  # fmt: skip
GRAMMAR = Grammar.regex("[a-d]{1,3} and [0-9]+")
MAX_BRANCHES = 12


@dataclass(slots=True)
class Job:
    """A call that waits for its answer."""

    task: asyncio.Task[None]
    branch: Branch | None


@dataclass(slots=True)
class Limits:
    """How large a program is."""

    longest: int
    """Tokens in the longest path."""

    num_actions: int


class Program:
    """Does random things with one engine, step by step; the same things for the same seed."""

    def __init__(
        self, engine: SteppedEngine, draw: random.Random, limits: Limits, *, is_crowded: bool
    ) -> None:
        self.engine = engine
        self.draw = draw
        self.limits = limits
        self.report = Report()
        self.branches: list[Branch] = []
        self.released: set[Branch] = set()
        self.jobs: list[Job] = []
        self.completions: list[Completion] = []
        self.scores: list[Scored] = []
        self.told: list[Told] = []
        self.max_new_tokens = limits.longest // 3 if is_crowded else 8
        self.longest_prompt = limits.longest // 5 if is_crowded else limits.longest - 12
        vocabulary = engine.model.vocab_size
        self.bases = [[draw.randrange(vocabulary) for _ in range(limits.longest - 8)] for _ in range(2)]

    async def run(self) -> None:
        """Do it all, until nothing is left to do; prove that nothing was lost."""
        names, weights = list(ACTIONS), list(ACTIONS.values())
        for _ in range(self.limits.num_actions):
            [name] = self.draw.choices(names, weights)
            getattr(self, f"_do_{name}")()
            await self._settle()
            self.engine.step(self.draw.choice([0, 0, 1, 2, 4]))
            await self._settle()
        self.engine.step()
        await self._settle()
        for job in self.jobs:
            self._check_end(job)
        for branch in self.branches:
            branch.release()
        self.engine.check()
        stats = self.engine.stats()
        assert stats.running == stats.waiting == 0
        assert stats.cache.locked == stats.cache.private - stats.kept_tails == 0
        self.report.computed_tokens = stats.computed_tokens
        self.report.preemptions = stats.preemptions
        self.report.evictions = stats.cache.evictions
        self.report.rows_copied = self.engine.runner.rows_copied
        self.report.tokens_led = self.engine.runner.tokens_led

    async def _settle(self) -> None:
        """Let waiting calls take what has come."""
        for _ in range(8):
            await asyncio.sleep(0)

    def _check_end(self, job: Job) -> None:
        assert job.task.done(), "somebody waits for an answer that does not come"
        if not job.task.cancelled() and job.task.exception() is not None:
            # A score or an expansion that had not started when its branch was released.
            assert isinstance(job.task.exception(), BranchReleased), job.task.exception()
            assert job.branch in self.released

    # What there is to do

    def _do_requests(self) -> None:
        prompts = [self._prompt() for _ in range(self.draw.choice([1, 1, 2, 4]))]
        n = self.draw.choice([1, 1, 1, 2, 3])
        prompt_logprobs = self.draw.choice([None, None, None, 0, 2]) if n == 1 else None
        room = self.limits.longest - max(map(len, prompts))
        params = self._params(room, n=n, prompt_logprobs=prompt_logprobs)
        self._start(self._generate_all(prompts, params, self._namespace()))

    async def _generate_all(
        self, prompts: list[list[int]], params: SamplingParams, namespace: Namespace | None
    ) -> None:
        self.completions += await self.engine.agenerate(prompts, params, namespace=namespace)

    def _do_open(self) -> None:
        if len(self.branches) < MAX_BRANCHES:
            self.branches.append(self.engine.branch(self._prompt(), namespace=self._namespace()))

    def _do_append(self) -> None:
        branch = self._idle_branch(room=1)
        if branch is not None:
            branch.append(self._continuation(branch))

    def _do_generate(self) -> None:
        branch = self._idle_branch(room=1)
        if branch is not None:
            self._start(self._generate(branch, self._params(self._room(branch))), branch)

    async def _generate(self, branch: Branch, params: SamplingParams) -> None:
        self.completions.append(await branch.agenerate(params))

    def _do_fork(self) -> None:
        branch = self._any_branch()
        if branch is not None and len(self.branches) < MAX_BRANCHES:
            self._add_forks(branch, branch.fork(self.draw.randrange(1, 3)))

    def _do_at(self) -> None:
        branch = self._any_branch()
        if branch is not None and len(self.branches) < MAX_BRANCHES:
            self._add_forks(branch, [branch.at(self.draw.randrange(1, len(branch) + 1))])

    def _add_forks(self, branch: Branch, forks: list[Branch]) -> None:
        self.branches += forks
        self.report.shared_tails += sum(fork._path.tail is not None for fork in forks)
        self.report.forks_of_running += len(forks) if self._is_busy(branch) else 0

    def _do_expand(self) -> None:
        branch = self._any_branch(room=1)
        if branch is not None and len(self.branches) < MAX_BRANCHES:
            n = self.draw.randrange(1, 4)
            self._start(self._expand(branch, n, self._params(self._room(branch))), branch)

    async def _expand(self, branch: Branch, n: int, params: SamplingParams) -> None:
        kids = await branch.aexpand(n, params)
        self.branches += kids
        self.completions += [kid.completion for kid in kids]

    def _do_score(self) -> None:
        branch = self._any_branch(room=1)
        if branch is not None:
            continuations = [self._continuation(branch) for _ in range(self.draw.randrange(1, 4))]
            self._start(self._score(branch, branch.token_ids, continuations), branch)

    async def _score(self, branch: Branch, tokens: list[int], continuations: list[list[int]]) -> None:
        scores = await branch.ascore(continuations)
        for continuation, score in zip(continuations, scores, strict=True):
            self.scores.append(Scored(tokens + continuation, score))

    def _do_next(self) -> None:
        branch = self._any_branch(room=1)
        if branch is not None:
            asked = self.draw.choice([{"top": 3}, {"candidates": [5, 3, 200]}])
            with self.engine.running():
                self.told.append(Told(branch.token_ids, branch.next_token_logprobs(**asked)))

    def _do_release(self) -> None:
        branch = self._any_branch()
        if branch is not None:
            branch.release()
            self.branches.remove(branch)
            self.released.add(branch)

    def _do_abort(self) -> None:
        waiting = [job for job in self.jobs if not job.task.done()]
        if waiting:
            self.draw.choice(waiting).task.cancel()
            self.report.aborts += 1

    def _do_clear(self) -> None:
        self.engine.clear_cache()

    # Random parts

    def _start(self, call: Coroutine[Any, Any, None], branch: Branch | None = None) -> None:
        self.jobs.append(Job(asyncio.get_running_loop().create_task(call), branch))

    def _prompt(self) -> list[int]:
        base = self.draw.choice(self.bases)
        return base[: self.draw.randrange(1, self.longest_prompt)] + self._few()

    def _few(self) -> list[int]:
        """Return up to three tokens, of few kinds, so that paths meet again after they parted."""
        return [self.draw.randrange(3) for _ in range(self.draw.randrange(4))]

    def _namespace(self) -> Namespace | None:
        return self.draw.choice([None, None, None, Namespace(salt="a")])

    def _params(self, room: int, **options: Any) -> SamplingParams:
        draw = self.draw
        return SamplingParams(
            max_tokens=draw.randrange(1, min(self.max_new_tokens, room) + 1),
            temperature=draw.choice([0, 1, 1]),
            seed=draw.randrange(1000),
            ignore_eos=draw.random() < 0.7,
            logprobs=draw.choice([None, None, 0, 3]),
            repetition_penalty=draw.choice([1.0, 1.0, 1.0, 1.3]),
            grammar=draw.choice([None] * 7 + [GRAMMAR]),
            **options,
        )

    def _continuation(self, branch: Branch) -> list[int]:
        """Return what fits after a branch: some of a base's tokens, or a few others."""
        base = self.draw.choice(self.bases)
        start = self.draw.choice([len(branch), self.draw.randrange(len(base))])
        tokens = base[start : start + self.draw.randrange(1, 30)] if self.draw.random() < 0.5 else self._few()
        return tokens[: self._room(branch)] or [1]

    def _room(self, branch: Branch) -> int:
        return self.engine.max_model_len - len(branch)

    def _is_busy(self, branch: Branch) -> bool:
        loop = self.engine.loop
        return loop.call(lambda: loop.scheduler.is_busy(branch._path)).result()

    def _any_branch(self, *, room: int = 0) -> Branch | None:
        fitting = [branch for branch in self.branches if self._room(branch) >= room]
        return self.draw.choice(fitting) if fitting else None

    def _idle_branch(self, *, room: int) -> Branch | None:
        fitting = [
            branch for branch in self.branches if self._room(branch) >= room and not self._is_busy(branch)
        ]
        return self.draw.choice(fitting) if fitting else None


def run_program(lab: Lab, seed: int, limits: Limits) -> Report:
    """Run one random program, then each of its requests alone; assert equal tokens and equal bits of logits."""
    draw = random.Random(seed)
    block_size = draw.choice([2, 4, 8, 16])
    longest = -(-limits.longest // block_size)
    # In a crowd, many short prompts run at once, and outgrow together a memory that holds the longest path and no more.
    is_crowded = draw.random() < 0.3
    engine = lab.engine(
        block_size=block_size,
        num_blocks=(1 if is_crowded else draw.choice([1, 2, 3, 8])) * longest + draw.randrange(2),
        max_model_len=limits.longest,
        eviction_policy=draw.choice(["lru", "lfu", "fifo"]),
        max_running=8 if is_crowded else draw.choice([1, 2, 8]),
        max_step_tokens=draw.choice([1, 7, 16, 33, 64, 512]),
    )
    cold = lab.engine(block_size=block_size, num_blocks=longest, prefix_cache=False, max_step_tokens=4096)
    with engine, cold:
        program = Program(engine, draw, limits, is_crowded=is_crowded)
        asyncio.run(program.run())
        comparison = Comparison(engine, cold, program.report)
        comparison.check_requests()
        comparison.check_completions(program.completions)
        comparison.check_told(program.told, program.scores)
    return program.report
