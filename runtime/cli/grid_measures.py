"""The cells of the cache experiment of `phloem bench grid`, and the prompts that must not hit."""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from itertools import product

import numpy as np

from phloem.radix import Namespace
from phloem.runtime.cli.bench_common import greedy, random_ids
from phloem.runtime.cli.workloads.client import Stopwatch
from phloem.runtime.engine import Engine
from phloem.runtime.outputs import Completion, EngineStats

NO_INTERFERENCE, EVICTING = "none", "evicting"
_BLOCK_SIZE = 16
_SLACK_BLOCKS = 8

COUNTERS: dict[str, Callable[[EngineStats], int]] = {
    "computed_tokens": lambda stats: stats.computed_tokens,
    "generated_tokens": lambda stats: stats.generated_tokens,
    "queries": lambda stats: stats.cache.queries,
    "hits": lambda stats: stats.cache.hits,
    "hit_tokens": lambda stats: stats.cache.hit_tokens,
    "tail_tokens": lambda stats: stats.cache.tail_tokens,
    "evictions": lambda stats: stats.cache.evictions,
}
"""What is counted while samples are taken, by its name in the engine's statistics."""


@dataclass(frozen=True, slots=True)
class GridSizes:
    """What is crossed with the cache being on or off, and with interference. In tokens."""

    prefixes: Sequence[int] = (128, 512, 2048)
    outputs: Sequence[int] = (1, 32, 256)
    own: int = 16
    """Behind the common prefix, other ones in each sample."""

    samples: int = 20
    warm_ups: int = 2
    """Samples of a cell that do not count; the first of them computes the prefix."""

    @property
    def num_cells(self) -> int:
        """Of both engines together."""
        return 4 * len(self.prefixes) * len(self.outputs)

    def num_blocks(self, prefix: int, interference: str) -> int:
        """KV blocks: for all samples, or, where they are to evict each other, for one."""
        one = self.own + max(self.outputs)
        count = 1 if interference == EVICTING else len(self.outputs) * (self.samples + self.warm_ups)
        prefixes = 1 if interference == EVICTING else len(self.outputs)
        return -(-prefix // _BLOCK_SIZE) * prefixes + count * (-(-one // _BLOCK_SIZE) + 1) + _SLACK_BLOCKS


@dataclass(frozen=True, slots=True)
class Spread:
    """Of one time over the samples, in seconds."""

    median_s: float
    p95_s: float
    p99_s: float


@dataclass(frozen=True, slots=True)
class Cell:
    """One combination."""

    prefix: int
    output: int
    cache: bool
    interference: str
    samples: int
    prompt_tokens: int
    """Of a sample."""

    cached_tokens: int
    """Of a sample, the median."""

    first_token: Spread
    next_token: Spread | None
    """Between two tokens; None where there is one."""

    total: Spread
    counters: dict[str, int]
    """`cached_tokens` as the samples' usage tells, and what `COUNTERS` rose by while they ran, warm-up and interference left out."""


@dataclass(frozen=True, slots=True)
class CounterExample:
    """A prompt that must not hit, after one that does."""

    name: str
    control_tokens: int
    """What the same prompt hits when nothing is different."""

    cached_tokens: int
    reason: str
    """What the engine says of the first token that was not cached."""

    @property
    def holds(self) -> bool:
        """Whether the control hit, and this did not."""
        return self.cached_tokens == 0 < self.control_tokens


@dataclass(slots=True)
class _Samples:
    """Of one engine in one cell."""

    first_token_s: list[float] = field(default_factory=list)
    gaps_s: list[float] = field(default_factory=list)
    total_s: list[float] = field(default_factory=list)
    cached: list[int] = field(default_factory=list)
    counters: Counter[str] = field(default_factory=Counter)


@dataclass(frozen=True, slots=True)
class Grid:
    """The experiment on engines that a function makes."""

    make_engine: Callable[..., AbstractContextManager[Engine]]
    """Of settings of `EngineConfig`."""

    sizes: GridSizes

    def cells(self) -> Iterator[tuple[Cell, Cell]]:
        """Yield each cell as it is done, with the cache on and off, which take their samples in turns."""
        for prefix, interference in product(self.sizes.prefixes, (NO_INTERFERENCE, EVICTING)):
            settings = {"num_blocks": self.sizes.num_blocks(prefix, interference), "block_size": _BLOCK_SIZE}
            with (
                self.make_engine(**settings) as on,
                self.make_engine(**settings, prefix_cache=False) as off,
            ):
                for output in self.sizes.outputs:
                    yield self._pair(on, off, prefix, output, interference)

    def counter_examples(self) -> list[CounterExample]:
        """Return three prompts that look like hits and must not be."""
        length = min(self.sizes.prefixes)
        draw = random.Random(1)
        # Room for what is asked side by side; little enough to be filled by one prompt.
        num_blocks = self.sizes.num_blocks(length, EVICTING) + 3 * -(-length // _BLOCK_SIZE)
        with self.make_engine(num_blocks=num_blocks, block_size=_BLOCK_SIZE) as engine:
            prompt = random_ids(engine, draw, length)
            other = [(prompt[0] + 1) % engine.tokenizer.vocab_size, *prompt[1:]]
            elsewhere = Namespace(salt="another")
            _ask(engine, prompt)
            control = _ask(engine, prompt)
            examples = [
                _counter_example("the first token differs", control, _ask(engine, other)),
                _counter_example("another salt", control, _ask(engine, prompt, namespace=elsewhere)),
            ]
            control = _ask(engine, prompt)
            _evict(engine, draw)
            examples.append(_counter_example("evicted before", control, _ask(engine, prompt)))
        return examples

    def _pair(
        self, on: Engine, off: Engine, prefix: int, output: int, interference: str
    ) -> tuple[Cell, Cell]:
        sizes, draw = self.sizes, random.Random(f"{prefix} {output} {interference}")
        shared = random_ids(on, draw, prefix)
        found = {True: _Samples(), False: _Samples()}
        for number in range(sizes.warm_ups + sizes.samples):
            prompt = shared + random_ids(on, draw, sizes.own)
            for engine in [on, off] if number % 2 else [off, on]:
                if interference == EVICTING:
                    _evict(engine, draw)
                is_counted = number >= sizes.warm_ups
                samples = found[engine.config.prefix_cache] if is_counted else _Samples()
                _sample(engine, prompt, output, samples)

        def cell(*, cache: bool) -> Cell:
            samples = found[cache]
            return Cell(
                prefix=prefix,
                output=output,
                cache=cache,
                interference=interference,
                samples=sizes.samples,
                prompt_tokens=prefix + sizes.own,
                cached_tokens=int(np.median(samples.cached)),
                first_token=_spread(samples.first_token_s),
                next_token=_spread(samples.gaps_s) if samples.gaps_s else None,
                total=_spread(samples.total_s),
                counters=dict(samples.counters),
            )

        return cell(cache=True), cell(cache=False)


def _sample(engine: Engine, prompt: list[int], output: int, samples: _Samples) -> None:
    before = engine.stats()
    watch = Stopwatch(time.perf_counter(), gaps_s=samples.gaps_s)
    generation = engine.stream(prompt, greedy(output))
    for chunk in generation:
        watch.piece(len(chunk.token_ids))
    done = generation.result()
    after = engine.stats()
    samples.first_token_s.append(done.first_token_s)
    samples.total_s.append(done.total_s)
    samples.cached.append(done.usage.cached_tokens)
    samples.counters["cached_tokens"] += done.usage.cached_tokens
    for name, read in COUNTERS.items():
        samples.counters[name] += read(after) - read(before)


def _evict(engine: Engine, draw: random.Random) -> None:
    """Run a prompt that takes all of the pool."""
    _ask(engine, random_ids(engine, draw, engine.max_model_len - 1))


def _ask(engine: Engine, prompt: list[int], *, namespace: Namespace | None = None) -> Completion:
    return engine.generate(prompt, greedy(1), namespace=namespace)[0]


def _counter_example(name: str, control: Completion, done: Completion) -> CounterExample:
    assert done.explanation is not None
    reason = done.explanation.misses[0].reason.name.lower().replace("_", " ")
    return CounterExample(name, control.usage.cached_tokens, done.usage.cached_tokens, reason)


def _spread(values: Sequence[float]) -> Spread:
    return Spread(*(float(value) for value in np.percentile(values, [50, 95, 99])))
