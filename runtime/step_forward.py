"""How the tokens of a step run through the decoder: kernel by kernel, or, decode steps on a GPU, as a captured graph."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from phloem.kernels.attention import AttentionBackend
from phloem.kernels.cuda_graph import Capture
from phloem.kernels.device_copy import on_device, stage
from phloem.kernels.flashinfer import FlashInferBackend
from phloem.kernels.flashinfer_graph import GraphBucket, GraphDecodeBackend
from phloem.kernels.plan import AttentionPlan, PlanRow
from phloem.runtime.models.decoder import Decoder

_SMALL_BUCKETS = (1, 2, 4)
_BUCKET_STEP = 8


class Forward(Protocol):
    """Runs a step."""

    def run(self, token_ids: Tensor, plan: AttentionPlan) -> Tensor:
        """Compute a step and write its KV.

        Args:
            token_ids: int64 `[num_tokens]`, the tokens of all rows of the plan; on the host, or on the device already.
            plan: Where they stand and what they read.

        Returns:
            `[num_tokens, hidden_size]` on the decoder's device, valid until the next step.
        """


class EagerForward:
    """Any step, kernel by kernel."""

    def __init__(self, decoder: Decoder, attention: AttentionBackend) -> None:
        self._decoder = decoder
        self._attention = attention

    def run(self, token_ids: Tensor, plan: AttentionPlan) -> Tensor:
        """Compute a step. See `Forward.run`."""
        self._attention.plan(plan)
        token_ids, positions = _inputs(token_ids, plan, self._decoder.device)
        return self._decoder.forward(token_ids, positions, self._attention)


class GraphForward:
    """Decode steps as graphs of fixed batch sizes, filled up with padding rows; all others kernel by kernel.

    A step whose rows share a prefix long enough for a cascade runs eagerly too: it reads that prefix once, which no graph does.
    """

    def __init__(self, base: FlashInferBackend, eager: EagerForward, steps: Sequence[CapturedStep]) -> None:
        """Take captured steps of different sizes."""
        self._base = base
        self._eager = eager
        self._steps = sorted(steps, key=lambda step: step.num_rows)

    def run(self, token_ids: Tensor, plan: AttentionPlan) -> Tensor:
        """Compute a step. See `Forward.run`."""
        for step in self._steps:
            if step.fits(plan):
                return self._eager.run(token_ids, plan) if self._cascades(plan) else step.run(token_ids, plan)
        return self._eager.run(token_ids, plan)

    def _cascades(self, plan: AttentionPlan) -> bool:
        return bool(self._base.shared_groups(plan))


class CapturedStep:
    """A decode step of one batch size. Owner of its graph and of the buffers that it reads its tokens from."""

    def __init__(self, decoder: Decoder, backend: GraphDecodeBackend, capture: Capture) -> None:
        """Warm up and capture. Nothing may be cached yet: the warm-up writes to block 0."""
        self.num_rows = backend.bucket.num_rows
        self._backend = backend
        device = decoder.device
        self._token_ids = torch.zeros(self.num_rows, dtype=torch.int64, device=device)
        self._positions = torch.zeros(self.num_rows, dtype=torch.int64, device=device)
        backend.plan(AttentionPlan.from_rows([PlanRow([0], 0, 1)], block_size=backend.base.store.block_size))
        with on_device(device):
            self._graph = capture(lambda: decoder.forward(self._token_ids, self._positions, backend))

    def fits(self, plan: AttentionPlan) -> bool:
        """Whether the step can run here."""
        return self._backend.why_not(plan) is None

    def run(self, token_ids: Tensor, plan: AttentionPlan) -> Tensor:
        """Compute a step. See `Forward.run`."""
        self._backend.plan(plan)
        token_ids, positions = _inputs(token_ids, plan, self._token_ids.device)
        # What stands in the rest is a token and a position too, of an earlier step.
        self._token_ids[: plan.num_tokens].copy_(token_ids)
        self._positions[: plan.num_tokens].copy_(positions)
        return self._graph.replay()[: plan.num_tokens]


def _inputs(token_ids: Tensor, plan: AttentionPlan, device: torch.device) -> tuple[Tensor, Tensor]:
    """A step's tokens and positions on the device, sent in one copy, or positions alone where the tokens are there."""
    if token_ids.device.type == device.type != "cpu":
        return token_ids, stage({"positions": plan.positions}, device)["positions"]
    there = stage({"token_ids": token_ids, "positions": plan.positions}, device)
    return there["token_ids"], there["positions"]


def capture_step(
    decoder: Decoder,
    base: FlashInferBackend,
    capture: Capture,
    *,
    num_rows: int,
    max_len: int,
    padding_block: int,
) -> CapturedStep:
    """Capture decode steps of up to `num_rows` rows. From the largest down, so that the others find its memory.

    Args:
        decoder: The model.
        base: Its attention.
        capture: Makes a graph of a computation.
        num_rows: The batch size.
        max_len: Longest path, in tokens.
        padding_block: A block that no path will ever own.
    """
    bucket = GraphBucket(
        num_rows=num_rows,
        padding_block=padding_block,
        max_blocks_per_row=-(-max_len // base.store.block_size),
    )
    return CapturedStep(decoder, GraphDecodeBackend(base, bucket), capture)


def bucket_sizes(max_rows: int) -> list[int]:
    """Return the batch sizes to capture: 1, 2, 4, then every eighth, and the largest batch itself."""
    sizes = {*_SMALL_BUCKETS, *range(_BUCKET_STEP, max_rows, _BUCKET_STEP), max_rows}
    return sorted(size for size in sizes if size <= max_rows)
