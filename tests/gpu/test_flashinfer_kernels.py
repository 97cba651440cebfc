"""FlashInfer itself, on a GPU, against the oracle. The first run compiles kernels for some minutes.

python -m pytest -m gpu tests/gpu
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest
import torch
from attention_paths import Chunk, Paths, at_once, chunked, error
from flashinfer_steps import SMALL, WINDOWED, family, family_steps

from phloem.kernels.attention import AttentionBackend, AttentionSpec
from phloem.kernels.flashinfer import FlashInferBackend
from phloem.kernels.flashinfer_graph import GraphBucket, GraphDecodeBackend
from phloem.kernels.flashinfer_library import load_flashinfer, why_unavailable
from phloem.kernels.flashinfer_options import FlashInferOptions
from phloem.kernels.flashinfer_rows import CascadeGate
from phloem.kernels.fused_ops import flashinfer_ops, torch_ops
from phloem.kernels.plan import AttentionPlan
from phloem.kernels.rope import RotaryEmbedding

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(why_unavailable() is not None, reason=str(why_unavailable())),
]

DEVICE = "cuda"
TOLERANCE = {torch.float16: 3e-3, torch.bfloat16: 2e-2}
SPECS = {
    "small model": SMALL,
    "windows": WINDOWED,
    "group 8, 128": AttentionSpec(num_q_heads=16, num_kv_heads=2, head_dim=128, num_layers=1),
    "group 5 and cap": AttentionSpec(
        num_q_heads=10, num_kv_heads=2, head_dim=64, num_layers=1, logits_soft_cap=5.0, scale=0.3
    ),
}


def make(paths: Paths, options: FlashInferOptions | None = None) -> FlashInferBackend:
    options = options or FlashInferOptions(q_dtype=paths.dtype)
    return FlashInferBackend(paths.spec, paths.store(DEVICE), options=options, library=load_flashinfer())


@dataclass
class OnDevice:
    """Takes and returns host tensors."""

    backend: AttentionBackend

    def plan(self, plan: AttentionPlan) -> None:
        self.backend.plan(plan)

    def append(self, layer: int, k: torch.Tensor, v: torch.Tensor) -> None:
        self.backend.append(layer, k.to(DEVICE), v.to(DEVICE))

    def attend(self, layer: int, q: torch.Tensor) -> torch.Tensor:
        return self.backend.attend(layer, q.to(DEVICE)).cpu()


@dataclass
class Captured:
    """Decode steps through a CUDA graph per layer, captured at the first of them; other steps through the base."""

    decode: GraphDecodeBackend
    replays: int = 0
    _graphs: dict[int, torch.cuda.CUDAGraph] = field(default_factory=dict)
    _inputs: dict[int, list[torch.Tensor]] = field(default_factory=dict)
    _outputs: dict[int, torch.Tensor] = field(default_factory=dict)
    _kv: tuple[torch.Tensor, ...] = ()
    _is_decode: bool = False

    def plan(self, plan: AttentionPlan) -> None:
        self._is_decode = self.decode.why_not(plan) is None
        (self.decode if self._is_decode else self.decode.base).plan(plan)

    def append(self, layer: int, k: torch.Tensor, v: torch.Tensor) -> None:
        self._kv = (k, v)
        if not self._is_decode:
            self.decode.base.append(layer, k.to(DEVICE), v.to(DEVICE))

    def attend(self, layer: int, q: torch.Tensor) -> torch.Tensor:
        if not self._is_decode:
            return self.decode.base.attend(layer, q.to(DEVICE)).cpu()
        if layer not in self._graphs:
            self._capture(layer, q)
        for given, static in zip((q, *self._kv), self._inputs[layer], strict=True):
            static[: len(given)].copy_(given)
        self._graphs[layer].replay()
        self.replays += 1
        return self._outputs[layer][: len(q)].cpu()

    def _capture(self, layer: int, q: torch.Tensor) -> None:
        rows = self.decode.bucket.num_rows
        statics = [torch.zeros((rows, *x.shape[1:]), dtype=x.dtype, device=DEVICE) for x in (q, *self._kv)]
        for given, static in zip((q, *self._kv), statics, strict=True):
            static[: len(given)].copy_(given)

        def run() -> torch.Tensor:
            self.decode.append(layer, statics[1], statics[2])
            return self.decode.attend(layer, statics[0])

        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            run()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self._outputs[layer] = run()
        self._graphs[layer], self._inputs[layer] = graph, statics


def assert_close(paths: Paths, outs: Sequence[torch.Tensor], steps: Sequence[Sequence[Chunk]]) -> None:
    wanted = paths.run(paths.backend("reference"), steps)
    for out, right in zip(outs, wanted, strict=True):
        assert torch.equal(out.isnan(), right.isnan())
    given, right = ([out[~out.isnan()] for out in each] for each in (outs, wanted))
    assert error(given, right) < TOLERANCE[paths.dtype]


def random_steps(
    seed: int, spec: AttentionSpec, dtype: torch.dtype, block_size: int
) -> tuple[Paths, list[list[Chunk]]]:
    """Paths of random lengths over a common prefix; prefills, decodes and empty rows side by side."""
    draw = random.Random(seed)
    shared = draw.choice([0, 1, 64 // block_size, 320 // block_size])
    lengths = [shared * block_size + draw.choice([1, 2, 15, 17, 64, 300]) for _ in range(draw.randint(1, 12))]
    prefixes = {path: (0, shared) for path in range(1, len(lengths)) if shared}
    paths = Paths(spec, lengths, block_size, dtype, seed, prefixes)
    first: list[Chunk] = [(0, 0, lengths[0])]
    starts = [draw.choice([shared * block_size, length - 1]) for length in lengths]
    second: list[Chunk] = [
        (p, shared * block_size, starts[p] - shared * block_size) for p in range(1, len(lengths))
    ]
    third: list[Chunk] = [(p, starts[p], lengths[p] - starts[p]) for p in range(1, len(lengths))]
    draw.shuffle(third)
    return paths, [first, second, third]


@pytest.mark.parametrize("mode", ["plain", "cascade", "exact", "exact, split"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", SPECS)
def test_random_plans_equal_the_reference(name: str, dtype: torch.dtype, mode: str) -> None:
    options = FlashInferOptions(
        q_dtype=dtype,
        deterministic=mode.startswith("exact"),
        split_tokens=128 if mode == "exact, split" else None,
        cascade=CascadeGate(2, 1) if mode == "cascade" else None,
    )
    for seed in range(6):
        paths, steps = random_steps(seed, SPECS[name], dtype, (1, 16, 64)[seed % 3])
        assert_close(paths, paths.run(OnDevice(make(paths, options)), steps), steps)


@pytest.mark.parametrize("kv_dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_8_bit_kv_equals_the_reference_over_the_same_store(kv_dtype: torch.dtype) -> None:
    paths = family()
    paths.kv_dtype = kv_dtype
    steps = family_steps(paths)
    assert_close(paths, paths.run(OnDevice(make(paths)), steps), steps)


def test_cascades_on_and_off_are_equal_within_tolerance() -> None:
    paths = family(rows=32)
    steps = family_steps(paths)
    backend = make(paths)
    on = paths.run(OnDevice(backend), steps)
    off = paths.run(OnDevice(make(paths, FlashInferOptions(cascade=None))), steps)
    assert_close(paths, on, steps)
    assert_close(paths, off, steps)


@pytest.mark.parametrize("is_exact", [False, True])
@pytest.mark.parametrize("name", SPECS)
def test_graphs_equal_the_reference_while_rows_come_and_go(name: str, is_exact: bool) -> None:
    paths = Paths(SPECS[name], [70, 40, 300, 20], dtype=torch.bfloat16)
    bucket = GraphBucket(num_rows=4, padding_block=paths.spare_block, max_blocks_per_row=32)
    backend = Captured(GraphDecodeBackend(make(paths, FlashInferOptions(deterministic=is_exact)), bucket))
    steps: list[list[Chunk]] = [[(path, 0, length - 8) for path, length in enumerate(paths.lengths)]]
    steps += [[(path, paths.lengths[path] - k, 1) for path in range(4)] for k in (8, 7, 6)]
    steps += [[(path, paths.lengths[path] - k, 1) for path in (0, 2)] for k in (5, 4)]
    steps += [[(2, 300 - k, 1)] for k in (3, 2)]
    assert_close(paths, paths.run(backend, steps), steps)
    assert backend.replays == 7 * paths.spec.num_layers
    written = backend.decode.base.store.data[:, bucket.padding_block].float().cpu()
    assert written[:, :, 1:].isnan().all()


@pytest.mark.parametrize("split_tokens", [None, 128])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", SPECS)
def test_in_exact_mode_chunking_company_and_graphs_change_no_bit(
    name: str, dtype: torch.dtype, split_tokens: int | None
) -> None:
    length = 400
    paths = Paths(SPECS[name], [length, 90, 5], dtype=dtype)
    options = FlashInferOptions(deterministic=True, split_tokens=split_tokens)
    whole = paths.run(OnDevice(make(paths, options)), at_once(paths.lengths))
    cuts: dict[str, list[list[Chunk]]] = {
        "alone": chunked(length, length),
        "1": [[(0, 0, 300)]] + [[(0, start, 1)] for start in range(300, length)],
        "7": chunked(length, 7),
        "33": chunked(length, 33),
        "beside others": [[(1, 0, 90), (0, 0, length - 1)], [(2, 0, 5), (0, length - 1, 1)]],
    }
    for cut, steps in cuts.items():
        assert torch.equal(paths.run(OnDevice(make(paths, options)), steps)[0], whole[0]), cut
    bucket = GraphBucket(num_rows=4, padding_block=paths.spare_block, max_blocks_per_row=32)
    graphs = Captured(GraphDecodeBackend(make(paths, options), bucket))
    steps = [[(0, 0, 100)], *[[(0, start, 1)] for start in range(100, 140)]]
    assert torch.equal(paths.run(graphs, steps)[0][:, :140], whole[0][:, :140])
    assert graphs.replays == (40 if split_tokens is None else 28) * paths.spec.num_layers


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_fused_operations_equal_torchs(dtype: torch.dtype) -> None:
    torch_only, fused = torch_ops(), flashinfer_ops(load_flashinfer())
    x, weight = torch.randn(33, 576, device=DEVICE).to(dtype), torch.randn(576, device=DEVICE).to(dtype)
    assert error([fused.rms_norm(x, weight, 1e-5)], [torch_only.rms_norm(x, weight, 1e-5)]) < TOLERANCE[dtype]
    gate_up = torch.randn(33, 2 * 1536, device=DEVICE).to(dtype)
    assert error([fused.silu_and_mul(gate_up)], [torch_only.silu_and_mul(gate_up)]) < TOLERANCE[dtype]
    qkv, positions = torch.randn(33, 15, 64, device=DEVICE).to(dtype), torch.arange(33, device=DEVICE)
    for factor in (1.0, 0.5):
        rope = RotaryEmbedding(64, max_position=64, partial_rotary_factor=factor)
        ours, theirs = (
            ops.make_rotate(rope, torch.device(DEVICE))(qkv[:, :9], qkv[:, 9:12], positions)
            for ops in (torch_only, fused)
        )
        assert error(theirs, ours) < TOLERANCE[dtype]
