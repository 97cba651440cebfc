"""Token paths with random tensors, run step by step through any attention backend."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from phloem.kernels.attention import AttentionBackend, AttentionSpec
from phloem.kernels.cpu import make_cpu_backend
from phloem.kernels.kv_store import PagedKVStore
from phloem.kernels.plan import AttentionPlan, PlanRow
from phloem.kernels.reference import ReferenceBackend

KERNELS = ("native", "torch")
"""The two implementations of the cpu backend."""

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2}
"""Relative error against the reference, by dtype."""

Chunk = tuple[int, int, int]
"""One row of a step: path, start, count."""


@dataclass
class Paths:
    """Token paths with random queries, keys and values, and their places in a store of NaN."""

    spec: AttentionSpec
    lengths: Sequence[int]
    block_size: int = 16
    dtype: torch.dtype = torch.float32
    seed: int = 0
    prefixes: Mapping[int, tuple[int, int]] = field(default_factory=dict)
    """Path to (an earlier path, blocks): its first blocks, and all that is in them, are that path's."""
    kv_dtype: torch.dtype | None = None
    """Of the store; None for `dtype`."""
    tables: list[list[int]] = field(init=False)

    def __post_init__(self) -> None:
        generator = torch.Generator().manual_seed(self.seed)
        spec = self.spec
        needed = [-(-length // self.block_size) for length in self.lengths]
        self.num_blocks = sum(needed) + 3
        kv = (2, spec.num_layers, spec.num_kv_heads, spec.head_dim)
        self.q = [
            torch.randn((n, spec.num_q_heads, spec.head_dim), generator=generator).to(self.dtype)
            for n in self.lengths
        ]
        self.kv = [torch.randn((n, *kv), generator=generator).to(self.dtype) for n in self.lengths]
        # last, so that paths of one seed differ in nothing but the tables
        ids = torch.randperm(self.num_blocks, generator=generator).tolist()
        self.tables = [[ids.pop() for _ in range(count)] for count in needed]
        self.spare_block = ids[0]
        for path, (other, num_blocks) in self.prefixes.items():
            shared = num_blocks * self.block_size
            self.tables[path][:num_blocks] = self.tables[other][:num_blocks]
            for values in (self.q, self.kv):
                values[path][:shared] = values[other][:shared]

    def store(self, device: str = "cpu") -> PagedKVStore:
        store = PagedKVStore(
            num_layers=self.spec.num_layers,
            num_blocks=self.num_blocks,
            block_size=self.block_size,
            num_kv_heads=self.spec.num_kv_heads,
            head_dim=self.spec.head_dim,
            dtype=self.kv_dtype or self.dtype,
            device=device,
        )
        store.data.fill_(torch.nan)
        return store

    def backend(self, kernel: str, num_threads: int | None = None) -> AttentionBackend:
        store = self.store()
        if kernel == "reference":
            return ReferenceBackend(self.spec, store)
        environ = {**os.environ, "PHLOEM_CPU_KERNEL": kernel}
        if kernel.startswith("-march"):
            environ = {**environ, "PHLOEM_CPU_KERNEL": "native", "CXX": f"g++ {kernel}"}
        return make_cpu_backend(self.spec, store, num_threads=num_threads, environ=environ)

    def run(
        self,
        backend: AttentionBackend,
        steps: Sequence[Sequence[Chunk]],
        mirrored: Mapping[int, Sequence[int]] | None = None,
    ) -> list[torch.Tensor]:
        """Outputs per path, `[num_layers, length, num_q_heads, head_dim]`; NaN where no step computed.

        `mirrored` tells which tokens of the last step a path mirrors.
        """
        spec = self.spec
        outs = [
            torch.full((spec.num_layers, n, spec.num_q_heads, spec.head_dim), torch.nan, dtype=self.dtype)
            for n in self.lengths
        ]
        for number, step in enumerate(steps, start=1):
            mirrors = mirrored if mirrored and number == len(steps) else {}
            rows = [
                PlanRow(self.tables[path], start, count, mirrors.get(path, ())) for path, start, count in step
            ]
            backend.plan(AttentionPlan.from_rows(rows, block_size=self.block_size))
            parts = [slice(start, start + count) for _, start, count in step]
            for layer in range(spec.num_layers):
                pairs = list(zip(step, parts, strict=True))
                k = torch.cat([self.kv[path][part, 0, layer] for (path, _, _), part in pairs])
                v = torch.cat([self.kv[path][part, 1, layer] for (path, _, _), part in pairs])
                q = torch.cat([self.q[path][part] for (path, _, _), part in pairs])
                backend.append(layer, k, v)
                out = backend.attend(layer, q)
                assert out.dtype == q.dtype
                assert out.shape == q.shape
                for (path, _, _), part, rows_out in zip(
                    step, parts, out.split([count for _, _, count in step]), strict=True
                ):
                    outs[path][layer, part] = rows_out
        return outs


@dataclass
class Twins:
    """Paths that begin alike, also inside a block, and go on in one step."""

    paths: Paths
    apart: list[list[Chunk]]
    """Each path computes all of its own."""
    together: list[list[Chunk]]
    """Common tokens of the last step are computed by the first path that has them."""
    mirrored: dict[int, list[int]]

    @classmethod
    def of(
        cls,
        spec: AttentionSpec,
        *,
        start: int,
        block_size: int = 16,
        dtype: torch.dtype = torch.float32,
        kv_dtype: torch.dtype | None = None,
    ) -> "Twins":
        """Five paths of `start` common tokens, of which a last step computes the rest: none is common with path 0, all, two, one, three."""
        common, own = [0, 4, 2, 1, 3], [4, 0, 3, 1, 2]
        lengths = [start + n + m for n, m in zip(common, own, strict=True)]
        paths = Paths(spec, lengths, block_size, dtype, kv_dtype=kv_dtype)
        for values in (paths.q, paths.kv):
            for path, count in enumerate(common):
                values[path][: start + count] = values[0][: start + count]
        first = [(path, 0, start) for path in range(5)]
        last = [(path, start, n + m) for path, (n, m) in enumerate(zip(common, own, strict=True))]
        less = [(path, start + n, m) for path, (n, m) in enumerate(zip(common, own, strict=True))]
        mirrored = {path: list(range(count)) for path, count in enumerate(common)}
        return cls(paths, [first, last], [first, less], mirrored)

    def results(self, backend: AttentionBackend) -> list[torch.Tensor]:
        """What the paths' own tokens of the last step come to."""
        outs = self.paths.run(backend, self.together, self.mirrored)
        return [outs[path][:, start:] for path, start, _ in self.together[-1]]

    def wanted(self, backend: AttentionBackend) -> list[torch.Tensor]:
        """The same, computed apart."""
        outs = self.paths.run(backend, self.apart)
        return [outs[path][:, start:] for path, start, _ in self.together[-1]]


def at_once(lengths: Sequence[int]) -> list[list[Chunk]]:
    return [[(path, 0, length) for path, length in enumerate(lengths)]]


def chunked(length: int, size: int, path: int = 0) -> list[list[Chunk]]:
    return [[(path, start, min(size, length - start))] for start in range(0, length, size)]


def error(given: Sequence[torch.Tensor], wanted: Sequence[torch.Tensor]) -> float:
    difference = torch.cat([(a.double() - b.double()).flatten() for a, b in zip(given, wanted, strict=True)])
    size = torch.cat([b.double().flatten() for b in wanted])
    return float(difference.norm() / size.norm())
