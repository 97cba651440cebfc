"""The real engine with its real branches, but each step runs when a test says so, and every row of logits is recorded."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from phloem.radix import Namespace
from phloem.runtime import Engine, EngineConfig
from phloem.runtime.assembly import Assembler, Toolkit, fused_ops
from phloem.runtime.batch import Batch, Row, RowCopy
from phloem.runtime.engine_core import EngineCore
from phloem.runtime.engine_loop import EngineLoop
from phloem.runtime.grammar import GrammarCompiler
from phloem.runtime.model_runner import ModelRunner, RowResult, places_of
from phloem.runtime.models.config import ModelConfig, read_model_config
from phloem.runtime.models.decoder import Decoder
from phloem.runtime.models.loading import load_model
from phloem.runtime.outputs import TokenLogprob
from phloem.runtime.placement import Placement, place
from phloem.runtime.request import Request
from phloem.runtime.step_forward import Forward

ENDLESS = sys.maxsize


@dataclass(slots=True)
class Record:
    """What the model gave for one request, whatever became of it."""

    request: Request
    prompt: list[int]
    logits_from: int | None
    """As it was at first: it moves on while the request runs."""

    logits: dict[int, torch.Tensor] = field(default_factory=dict)
    """By the position of the token that they follow."""

    tokens: dict[int, int] = field(default_factory=dict)
    """The tokens that were sampled, by their position."""

    scored: list[TokenLogprob] = field(default_factory=list)
    sampled: list[TokenLogprob] = field(default_factory=list)
    candidates: tuple[float, ...] = ()


class RecordingDecoder:
    """A decoder that keeps the logits of a step."""

    def __init__(self, decoder: Decoder) -> None:
        self.forward = decoder.forward
        self._logits = decoder.logits
        self.seen: list[torch.Tensor] = []

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        found = self._logits(hidden)
        self.seen += found.clone()  # the sampler changes its rows
        return found


class RecordingRunner:
    """A model runner that notes what each request got. Every number must be finite."""

    def __init__(self, runner: ModelRunner) -> None:
        self.runner = runner
        self.decoder = RecordingDecoder(runner.decoder)
        runner.decoder = self.decoder
        self.close = runner.close
        self.records: dict[str, Record] = {}
        self.rows_copied = 0
        self.tokens_led = 0

    def copy_rows(self, copies: Sequence[RowCopy]) -> None:
        self.rows_copied += sum(copy.num_rows for copy in copies)
        self.runner.copy_rows(copies)

    def run(self, batch: Batch) -> list[RowResult]:
        records = [self._record(row) for row in batch.rows]
        self.decoder.seen.clear()
        results = self.runner.run(batch)
        assert all(result.is_finite for result in results)
        self.tokens_led += sum(row.num_led for row in batch.rows)
        logits = iter(self.decoder.seen)
        places = places_of(batch.rows)
        asked = [
            [(position, place[position - row.start]) for position in row.scored]
            for row, place in zip(batch.rows, places, strict=True)
        ]
        # Rows of a step may have tokens in common, of which the logits are computed once.
        scored = {index: next(logits) for index in sorted({index for each in asked for _, index in each})}
        for record, each in zip(records, asked, strict=True):
            for position, index in each:
                assert position not in record.logits, "each position once"
                record.logits[position] = scored[index]
        ends = {place[-1]: None for row, place in zip(batch.rows, places, strict=True) if row.reads_next}
        ending = {index: next(logits) for index in ends}
        for record, result, own in zip(records, results, places, strict=True):
            record.scored += result.scored
            if result.row.reads_next:
                record.logits[result.row.end - 1] = ending[own[-1]]
                record.candidates = record.candidates or result.candidates
            if result.token_id is not None:
                record.tokens[result.row.end] = result.token_id
                record.sampled += [] if result.sampled is None else [result.sampled]
        assert next(logits, None) is None
        return results

    def _record(self, row: Row) -> Record:
        request = row.request
        if request.id not in self.records:
            prompt = request.tokens[: request.num_prompt_tokens].tolist()
            self.records[request.id] = Record(request, prompt, request.logits_from)
        return self.records[request.id]


class SteppedLoop(EngineLoop):
    """The engine's loop, taking commands in their order, and steps in between only as many as it was allowed.

    An error, also one in a command, ends it: all that wait get it.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        self._allowed = 0
        super().__init__(*args, **options)

    def allow(self, steps: int) -> Future[None]:
        """Let so many steps run, while there is work, before any later command is taken."""

        def set_allowed() -> None:
            self._allowed = steps

        return self.call(set_allowed)

    def _run_commands(self) -> None:
        while not self._closing and not (self._allowed and self.scheduler.has_work):
            self._commands.get()()
        self._allowed -= 1

    def _step(self) -> None:
        super()._step()
        self.scheduler.paths.cache.check()


class SteppedEngine(Engine):
    """An engine over a model that is loaded already. Calls that wait need `running()` around them."""

    def __init__(self, core: EngineCore, loop: SteppedLoop, runner: RecordingRunner) -> None:
        self._core = core
        self.model, self.tokenizer, self.max_model_len = core.model, core.tokenizer, core.max_model_len
        self.core, self.loop, self.runner = core, loop, runner

    def step(self, count: int = ENDLESS) -> None:
        """Run so many steps, or until there is nothing left to do."""
        self.loop.allow(count)
        self.loop.allow(0).result()

    @contextmanager
    def running(self) -> Iterator[None]:
        """Run steps as they come."""
        self.loop.allow(ENDLESS)
        yield
        self.loop.allow(0).result()


@dataclass(slots=True)
class GpuRig:
    """What engines run on that compute as on a GPU, in deterministic mode."""

    toolkit: Toolkit
    place: Callable[[EngineConfig, ModelConfig], Placement] = place
    watch: Callable[[Forward], Forward] = lambda forward: forward
    """What stands between the runner and the steps' computation."""


class Lab:
    """One loaded model, on which engines are built: on the CPU, or with a rig."""

    def __init__(
        self, path: Path, *, dtype: torch.dtype, num_threads: int, rig: GpuRig | None = None
    ) -> None:
        self.options: dict[str, Any] = {"device": "cpu" if rig is None else "cuda", "deterministic": True}
        self.options |= {"dtype": str(dtype).removeprefix("torch."), "num_threads": num_threads}
        self.place = place if rig is None else rig.place
        self.rig = rig
        placement = self.place(EngineConfig(**self.options), read_model_config(path))
        ops = fused_ops(rig.toolkit if rig else None)
        self.loaded = load_model(path, dtype=dtype, device=placement.device, ops=ops)
        self.grammars = GrammarCompiler(self.loaded.tokenizer, self.loaded.config.vocab_size)
        self.num_threads = num_threads

    def engine(self, **options: Any) -> SteppedEngine:
        """Make an engine whose KV memory holds NaN wherever nothing was written: one read of that shows in all that follows."""
        config = EngineConfig(**self.options, **options)
        toolkit = self.rig.toolkit if self.rig else None
        parts = Assembler(self.loaded, config, self.place(config, self.loaded.config), toolkit)
        store = parts.store()
        store.data.fill_(torch.nan)
        longest = parts.num_pool_blocks(store) * store.block_size
        inner = parts.runner(store, max_len=longest)
        if self.rig is not None:
            inner.forward = self.rig.watch(inner.forward)
        runner = RecordingRunner(inner)
        loop = SteppedLoop(
            parts.scheduler(store), runner, self.loaded.tokenizer, num_threads=self.num_threads
        )
        core = EngineCore(
            model=self.loaded.config,
            tokenizer=self.loaded.tokenizer,
            loop=loop,
            identity=Namespace(model=self.loaded.fingerprint),
            max_model_len=min(config.max_model_len or sys.maxsize, longest),
            grammars=self.grammars,
            length_advice="the limit is {limit}{room}",
        )
        return SteppedEngine(core, loop, runner)
