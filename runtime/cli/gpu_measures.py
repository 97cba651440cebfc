"""The measurements of `phloem bench gpu`. They run on whatever the rig holds: a GPU, or in the tests an emulation of one."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace

import torch

from phloem.kernels.flashinfer import FlashInferBackend
from phloem.kernels.flashinfer_library import FlashInferLibrary
from phloem.kernels.flashinfer_options import FlashInferOptions
from phloem.kernels.flashinfer_rows import CascadeGate
from phloem.kernels.kv_store import PagedKVStore
from phloem.kernels.plan import AttentionPlan, PlanRow
from phloem.runtime.cli.bench_common import greedy
from phloem.runtime.cli.floors import Rates, decode_step_bytes, kv_bytes_per_token, prefill_flops
from phloem.runtime.engine import Engine
from phloem.runtime.models.config import ModelConfig
from phloem.runtime.placement import Placement, attention_spec
from phloem.runtime.sampling_params import SamplingParams

ATTENTION_AIM, DECODE_AIM, CASCADE_AIM = 0.7, 0.6, 3.0
_BLOCK_SIZE = 16
_ROUNDS = 3


@dataclass(frozen=True, slots=True)
class Sizes:
    """How much is measured."""

    rows: int = 64
    attention_context: int = 4096
    """Tokens that each row of the attention alone reads."""
    decode_prompt: int = 1024
    prefix: int = 8192
    """Of the shared prefix, and of the prompt whose prefill is measured."""
    new_tokens: int = 128
    copy_bytes: int = 1 << 30
    matrix: int = 8192
    """Rows and columns of the matrices."""

    def fitted(self, context: int) -> Sizes:
        """Return sizes for a model of this context."""
        room = context - self.new_tokens - 2
        return replace(self, decode_prompt=min(self.decode_prompt, room), prefix=min(self.prefix, room))

    @property
    def num_blocks(self) -> int:
        """KV blocks for the largest of the measurements."""
        apart = self.rows * (self.decode_prompt + self.new_tokens + 2 * _BLOCK_SIZE)
        shared = 2 * self.prefix + self.rows * (self.new_tokens + 2 * _BLOCK_SIZE)
        return 2 * -(-(apart + shared) // _BLOCK_SIZE)


@dataclass(frozen=True, slots=True)
class Rig:
    """What is measured, and with what."""

    model: ModelConfig
    placement: Placement
    library: FlashInferLibrary
    make_engine: Callable[..., AbstractContextManager[Engine]]
    """Of settings of `EngineConfig`."""
    seconds: Callable[[Callable[[], object]], float]
    """Time of one call on the device."""
    sizes: Sizes


@dataclass(frozen=True, slots=True)
class Measure:
    """A line of the table."""

    name: str
    seconds: float
    compared_to: str
    """What the seconds are set against."""
    other_s: float
    ratio: float
    """other_s / seconds: a share of the card's rate, or how many times faster."""
    aim: float | None = None

    @property
    def met(self) -> bool | None:
        """Whether the aim was reached; None without one."""
        return None if self.aim is None else self.ratio >= self.aim


def measure_card(rig: Rig) -> Rates:
    """Time a large copy and a large matrix product."""
    sizes, device = rig.sizes, rig.placement.device
    source = torch.zeros(sizes.copy_bytes, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    copy_s = rig.seconds(lambda: target.copy_(source))
    left, right = torch.randn((2, sizes.matrix, sizes.matrix), device=device).to(rig.placement.dtype)
    product_s = rig.seconds(lambda: left @ right)
    return Rates(2 * sizes.copy_bytes / copy_s, 2 * sizes.matrix**3 / product_s)


def measure_all(rig: Rig, card: Rates) -> Iterator[Measure]:
    """Yield each measurement as it is done."""
    yield _decode_attention(rig, card)
    yield _cascade_attention(rig)
    sizes, draw = rig.sizes, random.Random(0)
    vocab_size = rig.model.vocab_size
    prefix = [draw.randrange(vocab_size) for _ in range(sizes.prefix)]
    family = [[*prefix, draw.randrange(vocab_size)] for _ in range(sizes.rows)]
    settings = {"num_blocks": sizes.num_blocks, "max_running": sizes.rows, "block_size": _BLOCK_SIZE}
    with rig.make_engine(**settings) as engine:
        yield _decode(rig, card, engine, draw)
        yield _prefill(rig, card, engine, draw)
        with_s = _decode_step_s(engine, family, sizes.new_tokens)
    with rig.make_engine(cascades=False, **settings) as engine:
        without_s = _decode_step_s(engine, family, sizes.new_tokens)
    name = f"decode step: {sizes.rows} branches over one prefix of {sizes.prefix:,} tokens, with cascades"
    yield Measure(name, with_s, "without cascades", without_s, without_s / with_s, CASCADE_AIM)


def _decode_attention(rig: Rig, card: Rates) -> Measure:
    """One layer, every row over KV of its own, in blocks at random places."""
    rows, context = rig.sizes.rows, rig.sizes.attention_context
    per_row = -(-context // _BLOCK_SIZE)
    tables = torch.randperm(rows * per_row).view(rows, per_row).tolist()
    seconds = _attend_s(rig, tables, context, cascade=None)
    num_bytes = rows * context * kv_bytes_per_token(rig.model, rig.placement.kv_dtype, num_layers=1)
    floor_s = num_bytes / card.bytes_per_s
    name = f"attention of a layer: {rows} rows of {context:,} tokens"
    return Measure(name, seconds, "copy bandwidth", floor_s, floor_s / seconds, ATTENTION_AIM)


def _cascade_attention(rig: Rig) -> Measure:
    """One layer, all rows over the same blocks but the last one."""
    rows, shared = rig.sizes.rows, -(-rig.sizes.prefix // _BLOCK_SIZE)
    tables = [[*range(shared), shared + row] for row in range(rows)]
    context = shared * _BLOCK_SIZE + 1
    with_s = _attend_s(rig, tables, context, cascade=CascadeGate())
    without_s = _attend_s(rig, tables, context, cascade=None)
    name = f"attention of a layer: {rows} rows over one prefix of {rig.sizes.prefix:,} tokens, with cascades"
    return Measure(name, with_s, "without cascades", without_s, without_s / with_s)


def _attend_s(rig: Rig, tables: list[list[int]], context: int, *, cascade: CascadeGate | None) -> float:
    place, spec = rig.placement, replace(attention_spec(rig.model), num_layers=1, windows=None)
    store = PagedKVStore(
        num_layers=1,
        num_blocks=1 + max(map(max, tables)),
        block_size=_BLOCK_SIZE,
        num_kv_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
        dtype=place.kv_dtype,
        device=place.device,
    )
    store.data.zero_()
    options = FlashInferOptions(q_dtype=place.dtype, cascade=cascade)
    backend = FlashInferBackend(spec, store, options=options, library=rig.library)
    rows = [PlanRow(table, context - 1, 1) for table in tables]
    backend.plan(AttentionPlan.from_rows(rows, block_size=_BLOCK_SIZE))
    shape = (len(tables), spec.num_q_heads, spec.head_dim)
    q = torch.randn(shape, device=place.device).to(place.dtype)
    return rig.seconds(lambda: backend.attend(0, q))


def _decode(rig: Rig, card: Rates, engine: Engine, draw: random.Random) -> Measure:
    sizes, place = rig.sizes, rig.placement
    prompts = [
        [draw.randrange(rig.model.vocab_size) for _ in range(sizes.decode_prompt)] for _ in range(sizes.rows)
    ]
    seconds = _decode_step_s(engine, prompts, sizes.new_tokens)
    context = sizes.decode_prompt + sizes.new_tokens / 2
    num_bytes = decode_step_bytes(
        rig.model, place.dtype, place.kv_dtype, num_rows=sizes.rows, context=context
    )
    floor_s = num_bytes / card.bytes_per_s
    name = f"decode step: {sizes.rows} rows of {context:,.0f} tokens"
    return Measure(name, seconds, "copy bandwidth", floor_s, floor_s / seconds, DECODE_AIM)


def _prefill(rig: Rig, card: Rates, engine: Engine, draw: random.Random) -> Measure:
    once = greedy(1)
    times = []
    for _ in range(_ROUNDS + 1):
        prompt = [draw.randrange(rig.model.vocab_size) for _ in range(rig.sizes.prefix)]
        times.append(_generate_s(engine, [prompt], once))
    seconds = statistics.median(times[1:])  # the first one warms up
    floor_s = prefill_flops(rig.model, rig.sizes.prefix) / card.flops_per_s
    name = f"prefill of {rig.sizes.prefix:,} tokens"
    return Measure(name, seconds, "matrix rate", floor_s, floor_s / seconds)


def _decode_step_s(engine: Engine, prompts: list[list[int]], num_tokens: int) -> float:
    """Seconds per step of decoding all prompts together, once they are cached."""
    once, long = greedy(1), greedy(1 + num_tokens)
    engine.generate(prompts, long)
    times = [
        (_generate_s(engine, prompts, long) - _generate_s(engine, prompts, once)) / num_tokens
        for _ in range(_ROUNDS)
    ]
    return statistics.median(times)


def _generate_s(engine: Engine, prompts: list[list[int]], params: SamplingParams) -> float:
    started = time.perf_counter()
    engine.generate(prompts, params)
    return time.perf_counter() - started
