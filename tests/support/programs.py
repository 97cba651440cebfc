"""Random programs of requests on a real model, run step by step, with every row of logits recorded."""

from __future__ import annotations

import random
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from phloem.kernels.attention import AttentionSpec, make_backend
from phloem.kernels.kv_store import PagedKVStore
from phloem.radix import BlockPool, Namespace, RadixCache
from phloem.runtime import SamplingParams
from phloem.runtime.model_runner import ModelRunner
from phloem.runtime.models.decoder import Decoder
from phloem.runtime.models.loading import LoadedModel, load_model
from phloem.runtime.path import Path as TokenPath
from phloem.runtime.path_cache import PathCache
from phloem.runtime.request import Request
from phloem.runtime.scheduler import Scheduler


class RecordingDecoder:
    """A decoder that keeps the logits it gave last."""

    def __init__(self, decoder: Decoder) -> None:
        self.decoder = decoder
        self.forward = decoder.forward
        self.last: torch.Tensor | None = None

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        found = self.decoder.logits(hidden)
        self.last = found.clone()
        return found


@dataclass
class Outcome:
    """What one request gave: its tokens, and the logits that each was drawn from."""

    request: Request
    logits: list[torch.Tensor] = field(default_factory=list)


class Lab:
    """One loaded model with one store; runs schedulers over it."""

    def __init__(
        self, path: Path, *, num_blocks: int, block_size: int, dtype: torch.dtype, backend: str = "cpu"
    ) -> None:
        self.loaded: LoadedModel = load_model(path, dtype=dtype)
        model = self.loaded.config
        self.store = PagedKVStore(
            num_layers=model.num_layers, num_blocks=num_blocks, block_size=block_size,
            num_kv_heads=model.num_kv_heads, head_dim=model.head_dim, dtype=dtype,
        )  # fmt: skip
        # What is never written must never be read: one NaN would show in every logit after it.
        self.store.data.fill_(torch.nan)
        spec = AttentionSpec(
            model.num_q_heads, model.num_kv_heads, model.head_dim, model.num_layers,
            logits_soft_cap=model.attn_logits_soft_cap, windows=model.windows,
        )  # fmt: skip
        self.recorder = RecordingDecoder(self.loaded.decoder)
        self.runner = ModelRunner(
            self.recorder, self.store, make_backend(backend, spec, self.store), eos_ids=model.eos_token_ids
        )

    def scheduler(
        self, *, num_blocks: int | None = None, policy: str = "lru", **options: int | bool
    ) -> Scheduler:
        limits: dict[str, int | bool] = {"max_running": 8, "max_step_tokens": 64, **options}
        pool = BlockPool(num_blocks or self.store.num_blocks)
        cache = RadixCache(pool, block_size=self.store.block_size, policy=policy)
        return Scheduler(PathCache(cache, prefix_cache=bool(limits.pop("prefix_cache", True))), **limits)

    def request(
        self, name: str, tokens: Sequence[int], *, max_tokens: int, salt: str | None, seed: int | None
    ) -> Request:
        temperature = 0.0 if seed is None else 1.0
        return Request(
            id=name, path=TokenPath(Namespace(salt=salt), array("i", tokens)),
            params=SamplingParams(max_tokens=max_tokens, temperature=temperature, ignore_eos=True),
            seed=seed or 0, max_len=len(tokens) + max_tokens,
        )  # fmt: skip

    def step(self, scheduler: Scheduler, outcomes: dict[str, Outcome]) -> None:
        batch = scheduler.schedule()
        assert not batch.refused
        if not batch.rows:
            return
        self.runner.copy_rows(batch.copies)
        results = self.runner.run(batch)
        scheduler.commit(batch.rows)
        drawn = iter(self.recorder.last if any(row.samples for row in batch.rows) else ())
        for result in results:
            assert result.is_finite
            if result.token_id is not None:
                request = result.row.request
                outcomes[request.id].logits.append(next(drawn))
                request.tokens.append(result.token_id)
                if len(request.tokens) >= request.max_len:
                    scheduler.finish(request)
        scheduler.paths.cache.check()

    def alone(self, request: Request) -> Outcome:
        """The same request with nothing around it, the cache off, and its prompt in one piece."""
        prompt = request.tokens[: request.num_prompt_tokens]
        seed = request.seed if request.params.temperature else None
        again = self.request(
            "alone", prompt, max_tokens=request.max_len - len(prompt), salt=request.namespace.salt, seed=seed
        )
        scheduler = self.scheduler(prefix_cache=False, max_step_tokens=4096)
        scheduler.add(again)
        outcomes = {"alone": Outcome(again)}
        while scheduler.has_work:
            self.step(scheduler, outcomes)
        return outcomes["alone"]


@dataclass(frozen=True)
class Report:
    """What a program did besides giving the right answers."""

    cached_tokens: int
    preemptions: int
    evictions: int
    compared: int


def run_program(lab: Lab, seed: int, *, num_requests: int, longest: int) -> Report:
    """Run one random program, then each of its requests alone; assert equal tokens and equal bits of logits."""
    draw = random.Random(seed)
    block_size = lab.store.block_size
    num_blocks = min(lab.store.num_blocks, draw.choice([1, 2, 3, 8]) * -(-longest // block_size) + 1)
    scheduler = lab.scheduler(
        num_blocks=num_blocks,
        policy=draw.choice(["lru", "lfu", "fifo"]),
        max_running=draw.choice([1, 2, 8]),
        max_step_tokens=draw.choice([1, 7, 16, 33, 64, 512]),
    )
    vocabulary = lab.loaded.config.vocab_size
    bases = [[draw.randrange(vocabulary) for _ in range(longest - 8)] for _ in range(2)]
    outcomes: dict[str, Outcome] = {}
    aborted: set[str] = set()
    for number in range(num_requests):
        base = draw.choice(bases)
        prompt = base[: draw.randrange(1, len(base) - 4)] + [
            draw.randrange(vocabulary) for _ in range(draw.randrange(4))
        ]
        request = lab.request(
            str(number), prompt, max_tokens=draw.randrange(1, 8), salt=draw.choice([None, None, None, "a"]),
            seed=draw.choice([None, number]),
        )  # fmt: skip
        outcomes[request.id] = Outcome(request)
        scheduler.add(request)
        for _ in range(draw.randrange(6)):
            if scheduler.has_work:
                lab.step(scheduler, outcomes)
        if draw.random() < 0.1:
            victim = draw.choice(list(outcomes))
            scheduler.finish(outcomes[victim].request)
            aborted.add(victim)
    while scheduler.has_work:
        lab.step(scheduler, outcomes)
    stats = scheduler.paths.cache.stats()
    assert stats.locked == stats.private - len(scheduler.paths.tails) == 0
    whole = [outcome for name, outcome in outcomes.items() if name not in aborted]
    for outcome in whole:
        cold = lab.alone(outcome.request)
        assert outcome.request.output_ids == cold.request.output_ids, (
            f"request {outcome.request.id} of program {seed}"
        )
        for index, (warm_row, cold_row) in enumerate(zip(outcome.logits, cold.logits, strict=True)):
            assert torch.equal(warm_row, cold_row), (
                f"bits of token {index} of request {outcome.request.id}, program {seed}"
            )
    return Report(
        cached_tokens=sum(outcome.request.cached_tokens for outcome in whole),
        preemptions=scheduler.preemptions,
        evictions=stats.evictions,
        compared=len(whole),
    )
