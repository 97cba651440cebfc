"""Steps for the FlashInfer backend: backends over an emulated library, paths that share prefixes, decode through graphs."""

from dataclasses import dataclass, field

import torch
from attention_paths import Chunk, Paths
from flashinfer_emulator import Emulation

from phloem.kernels.attention import AttentionSpec
from phloem.kernels.flashinfer import FlashInferBackend
from phloem.kernels.flashinfer_graph import GraphBucket, GraphDecodeBackend
from phloem.kernels.flashinfer_options import FlashInferOptions
from phloem.kernels.plan import AttentionPlan

SMALL = AttentionSpec(num_q_heads=9, num_kv_heads=3, head_dim=64, num_layers=1)
WINDOWED = AttentionSpec(num_q_heads=4, num_kv_heads=2, head_dim=64, num_layers=3, windows=(None, 40, 7))


def make(paths: Paths, emulation: Emulation, options: FlashInferOptions | None = None) -> FlashInferBackend:
    options = options or FlashInferOptions(q_dtype=paths.dtype, workspace_bytes=1 << 20)
    return FlashInferBackend(paths.spec, paths.store(), options=options, library=emulation.library())


@dataclass
class WithGraphs:
    """What the runtime will do: decode steps through a bucket, padded and "replayed", the others through the base."""

    graph: GraphDecodeBackend
    emulation: Emulation
    steps_in_graph: int = 0
    _num_tokens: int = 0
    _runs_graph: bool = False
    _fillers: torch.Generator = field(default_factory=lambda: torch.Generator().manual_seed(1))

    def plan(self, plan: AttentionPlan) -> None:
        self.emulation.next_step()
        self._num_tokens = plan.num_tokens
        self._runs_graph = self.graph.why_not(plan) is None
        self.steps_in_graph += self._runs_graph
        (self.graph if self._runs_graph else self.graph.base).plan(plan)

    def append(self, layer: int, k: torch.Tensor, v: torch.Tensor) -> None:
        if self._runs_graph:
            self.graph.append(layer, self._pad(k), self._pad(v))
        else:
            self.graph.base.append(layer, k, v)

    def attend(self, layer: int, q: torch.Tensor) -> torch.Tensor:
        if self._runs_graph:
            return self.graph.attend(layer, self._pad(q))[: self._num_tokens]
        return self.graph.base.attend(layer, q)

    def _pad(self, x: torch.Tensor) -> torch.Tensor:
        missing = self.graph.bucket.num_rows - len(x)
        filler = torch.randn((missing, *x.shape[1:]), generator=self._fillers).to(x.dtype)
        return torch.cat((x, filler))


def with_graphs(paths: Paths, emulation: Emulation, num_rows: int, options: FlashInferOptions) -> WithGraphs:
    bucket = GraphBucket(num_rows=num_rows, padding_block=paths.spare_block, max_blocks_per_row=400)
    return WithGraphs(GraphDecodeBackend(make(paths, emulation, options), bucket), emulation)


def family(spec: AttentionSpec = SMALL, rows: int = 8, dtype: torch.dtype = torch.bfloat16) -> Paths:
    """`rows` paths that share the first 256 tokens of a path of their own, and two that share nothing."""
    prefixes = dict.fromkeys(range(1, rows + 1), (0, 16))
    return Paths(
        spec, [260, *[257 + path for path in range(1, rows + 1)], 40, 30], dtype=dtype, prefixes=prefixes
    )


def family_steps(paths: Paths) -> list[list[Chunk]]:
    first: list[Chunk] = [(0, 0, 256)]
    alone: list[Chunk] = [(len(paths.lengths) - 2, 0, 39), (len(paths.lengths) - 1, 0, 20)]
    members: list[Chunk] = [(path, 256, paths.lengths[path] - 257) for path in paths.prefixes]
    decode: list[Chunk] = [(path, paths.lengths[path] - 1, 1) for path in paths.prefixes]
    both: list[Chunk] = [(len(paths.lengths) - 2, 39, 1), *decode, (len(paths.lengths) - 1, 20, 10)]
    return [first, [*alone, *members], both]
