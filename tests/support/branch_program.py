"""Random lives of branches over a scheduler and a shadow of the KV memory (stepping.py)."""

from __future__ import annotations

import random
from array import array
from dataclasses import dataclass

from stepping import Stepper

from phloem.radix import Namespace
from phloem.runtime.path import Path
from phloem.runtime.request import Phase, Request


@dataclass
class Run:
    """A request that was made, and what must come of it."""

    request: Request
    prompt: list[int]
    max_tokens: int
    scored_from: int | None


class BranchProgram:
    """Forks at any place and time, appends, scores, generations, aborts and releases, in pools too small for all of them."""

    def __init__(self, seed: int) -> None:
        self.draw = draw = random.Random(seed)
        block_size = draw.choice([1, 2, 4, 8])
        num_blocks = draw.choice([4, 5, 6, 8, 12, 40])
        self.capacity = num_blocks * block_size
        self.stepper = Stepper(
            num_blocks=num_blocks,
            block_size=block_size,
            vocabulary=draw.choice([2, 3, 50]),
            max_running=draw.choice([1, 2, 8]),
            max_step_tokens=draw.choice([1, 3, 8, 64]),
            prefix_cache=draw.random() < 0.9,
        )
        self.paths = [Path(Namespace(), array("i", [0]))]
        self.runs: list[Run] = []
        self.made = 0

    def act(self) -> None:
        """Do one thing, and let the scheduler go on a little."""
        draw = self.draw
        path = draw.choice(self.paths)
        [action] = draw.choices([self.fork, self.run, self.release, self.abort], weights=[35, 45, 10, 10])
        action(path)
        self.stepper.cache.check()
        for _ in range(draw.randrange(4)):
            if self.stepper.scheduler.has_work:
                self.stepper.step()

    def fork(self, path: Path) -> None:
        if len(self.paths) < 30:
            self.paths.append(self.stepper.paths.fork(path, self.draw.randrange(1, len(path.tokens) + 1)))

    def run(self, path: Path) -> None:
        draw = self.draw
        if any(True for _ in self.stepper.scheduler.requests_on(path)):
            return
        room = self.capacity - len(path.tokens)
        appended = [draw.randrange(3) for _ in range(draw.randrange(min(4, room + 1)))]
        max_tokens = draw.randrange(min(6, room - len(appended) + 1))
        scored_from = len(path.tokens) - 1 if draw.random() < 0.4 and appended else None
        self.made += 1
        request = self.stepper.add_on(
            path, appended, max_tokens=max_tokens, scored_from=scored_from, name=str(self.made)
        )
        self.runs.append(Run(request, path.tokens.tolist(), max_tokens, scored_from))

    def abort(self, path: Path) -> None:
        for request in list(self.stepper.scheduler.requests_on(path)):
            self.stepper.scheduler.finish(request)
            self.runs = [run for run in self.runs if run.request is not request]

    def release(self, path: Path) -> None:
        if len(self.paths) > 1:
            self.abort(path)
            self.stepper.paths.release(path)
            self.paths.remove(path)

    def finish(self) -> None:
        """Run to the end; check every answer, and that nothing was lost."""
        self.stepper.run()
        assert not self.stepper.refused, "idle branches give way"
        assert self.made > 0
        for run in self.runs:
            assert run.request.phase is Phase.FINISHED
            # What comes after that on its path is later requests'.
            found = run.request.output_ids[: run.max_tokens]
            assert found == self.stepper.output_of(run.prompt, max_tokens=run.max_tokens)
            if run.scored_from is not None:
                scored = self.stepper.scored.get(run.request.id, 0)
                assert scored == len(run.prompt) - 1 - run.scored_from, "each position once"
        for path in self.paths:
            self.stepper.paths.release(path)
        self.stepper.cache.check()
        stats = self.stepper.cache.stats()
        assert stats.locked == stats.private - len(self.stepper.paths.tails) == 0
