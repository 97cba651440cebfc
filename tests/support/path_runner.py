"""Runs token paths through a decoder without scheduler, tree or engine."""

from __future__ import annotations

import random
from collections.abc import Sequence

import torch

from phloem.kernels.attention import AttentionBackend, AttentionSpec, make_backend
from phloem.kernels.kv_store import PagedKVStore
from phloem.kernels.plan import AttentionPlan, PlanRow
from phloem.runtime.models.loading import LoadedModel


class PathRunner:
    """One decoder, one store, and paths that grow by chunks. Blocks lie at shuffled places, unused slots hold NaN."""

    def __init__(
        self,
        loaded: LoadedModel,
        *,
        num_blocks: int = 64,
        block_size: int = 16,
        backend: str = "cpu",
        kv_dtype: torch.dtype | None = None,
        seed: int = 0,
    ) -> None:
        config = loaded.config
        self.decoder = loaded.decoder
        self.block_size = block_size
        shape = {
            "num_kv_heads": config.num_kv_heads,
            "head_dim": config.head_dim,
            "num_layers": config.num_layers,
        }
        dtype = kv_dtype or loaded.dtype
        store = PagedKVStore(num_blocks=num_blocks, block_size=block_size, dtype=dtype, **shape)
        store.data.fill_(torch.nan)
        spec = AttentionSpec(num_q_heads=config.num_q_heads, windows=config.windows, **shape)
        self.attention: AttentionBackend = make_backend(backend, spec, store)
        self._free = list(range(num_blocks))
        random.Random(seed).shuffle(self._free)
        self._tables: dict[int, list[int]] = {}
        self._lengths: dict[int, int] = {}

    def step(self, chunks: dict[int, Sequence[int]]) -> dict[int, torch.Tensor]:
        """Append a chunk of tokens to each path named, in one batch; return the logits of every new token."""
        rows, token_ids = [], []
        for path, chunk in chunks.items():
            start = self._lengths.get(path, 0)
            table = self._tables.setdefault(path, [])
            while len(table) * self.block_size < start + len(chunk):
                table.append(self._free.pop())
            rows.append(PlanRow(table, start, len(chunk)))
            token_ids += chunk
            self._lengths[path] = start + len(chunk)
        plan = AttentionPlan.from_rows(rows, block_size=self.block_size)
        with torch.inference_mode():
            self.attention.plan(plan)
            hidden = self.decoder.forward(torch.tensor(token_ids), plan.positions, self.attention)
            logits = self.decoder.logits(hidden)
        return dict(zip(chunks, logits.split([len(chunk) for chunk in chunks.values()]), strict=True))

    def run(self, path: int, token_ids: Sequence[int], *, chunk_sizes: Sequence[int] = ()) -> torch.Tensor:
        """Run one path alone, in chunks of the given sizes (the rest in one); return the logits of all its tokens."""
        parts, begin = [], 0
        for size in [*chunk_sizes, len(token_ids)]:
            chunk = token_ids[begin : begin + size]
            if chunk:
                parts.append(self.step({path: chunk})[path])
            begin += len(chunk)
        return torch.cat(parts)

    def greedy(self, path: int, token_ids: Sequence[int], num_tokens: int) -> list[int]:
        """Prefill a path and decode `num_tokens` tokens, the likeliest each."""
        return self.greedy_batch({path: token_ids}, num_tokens)[path]

    def greedy_batch(self, prompts: dict[int, Sequence[int]], num_tokens: int) -> dict[int, list[int]]:
        """Prefill paths, each alone, and decode them together."""
        logits = {path: self.step({path: token_ids})[path] for path, token_ids in prompts.items()}
        outputs = {path: [int(rows[-1].argmax())] for path, rows in logits.items()}
        for _ in range(num_tokens - 1):
            logits = self.step({path: output[-1:] for path, output in outputs.items()})
            for path, rows in logits.items():
                outputs[path].append(int(rows[-1].argmax()))
        return outputs
