"""How the parts of an engine are put together: model, KV store, cache, scheduler, runner."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from functools import lru_cache

import psutil
import torch

from phloem.kernels.attention import AttentionBackend, make_backend
from phloem.kernels.cuda_graph import Capture, make_cuda_capture
from phloem.kernels.device_copy import on_device
from phloem.kernels.flashinfer import FlashInferBackend
from phloem.kernels.flashinfer_library import FlashInferLibrary, load_flashinfer
from phloem.kernels.flashinfer_options import FlashInferOptions
from phloem.kernels.flashinfer_rows import CascadeGate
from phloem.kernels.fused_ops import FusedOps, flashinfer_ops
from phloem.kernels.kv_store import PagedKVStore
from phloem.kernels.plan import AttentionPlan, PlanRow
from phloem.kernels.self_test import InvarianceReport, row_invariance_report
from phloem.radix import BlockPool, RadixCache
from phloem.runtime.config import EngineConfig
from phloem.runtime.memory import CPU_MAX_BYTES, CPU_SHARE, GPU_SHARE, pool_size
from phloem.runtime.model_runner import ModelRunner
from phloem.runtime.models.loading import LoadedModel
from phloem.runtime.path_cache import PathCache
from phloem.runtime.placement import Placement, attention_spec
from phloem.runtime.progress import status, track
from phloem.runtime.sandbox import Sandbox
from phloem.runtime.scheduler import Scheduler
from phloem.runtime.step_forward import EagerForward, Forward, GraphForward, bucket_sizes, capture_step

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Toolkit:
    """What a GPU engine computes with; the tests put an emulation here."""

    library: FlashInferLibrary
    capture: Capture

    @classmethod
    def for_gpu(cls) -> Toolkit:
        """Return the real thing.

        Raises:
            FlashInferUnavailable: FlashInfer can't run here.
        """
        return cls(load_flashinfer(), make_cuda_capture())


@dataclass(frozen=True, slots=True)
class Assembler:
    """Makes the parts for one model in one place."""

    loaded: LoadedModel
    config: EngineConfig
    placement: Placement
    toolkit: Toolkit | None = None
    """For the flashinfer backend only."""

    def store(self) -> PagedKVStore:
        """Make the KV memory: the pool's blocks, and on a GPU with graphs one more, which padding rows write to.

        Raises:
            InvalidRequest: The pool does not fit, or would not hold one block.
        """
        block_bytes = PagedKVStore.bytes_for_block(
            num_layers=self.loaded.config.num_layers,
            block_size=self.config.block_size,
            num_kv_heads=self.loaded.config.num_kv_heads,
            head_dim=self.loaded.config.head_dim,
            dtype=self.placement.kv_dtype,
        )
        available = self._available_bytes()
        default = int(available * GPU_SHARE)
        if self.placement.device.type == "cpu":
            default = min(int(available * CPU_SHARE), CPU_MAX_BYTES)
        num_blocks = pool_size(self.config, block_bytes=block_bytes, available=available, default=default)
        return self._store_of(num_blocks + self.placement.uses_graphs)

    def num_pool_blocks(self, store: PagedKVStore) -> int:
        """Blocks of the store that paths may own."""
        return store.num_blocks - self.placement.uses_graphs

    def scheduler(self, store: PagedKVStore) -> Scheduler:
        """Make the cache over the store's blocks, and the scheduler over it."""
        cache = RadixCache(
            BlockPool(self.num_pool_blocks(store)),
            block_size=store.block_size,
            policy=self.config.eviction_policy,
        )
        return Scheduler(
            PathCache(cache, prefix_cache=self.config.prefix_cache),
            max_running=self.placement.max_running,
            max_step_tokens=self.placement.max_step_tokens,
            max_waiting=self.config.max_waiting,
        )

    def runner(self, store: PagedKVStore, *, max_len: int) -> ModelRunner:
        """Make the runner; on a GPU this captures decode steps of paths up to `max_len` tokens."""
        decoder = self.loaded.decoder
        attention = self._attention(store)
        forward = self._forward(attention, max_len=max_len)
        return ModelRunner(
            decoder, store, attention, eos_ids=self.loaded.tokenizer.eos_token_ids, forward=forward
        )

    def sandbox(self) -> Sandbox | None:
        """Start the processes for grammars and templates, if they are asked for."""
        limit = self.config.sandbox_timeout_s
        if limit is None:
            return None
        return Sandbox(self.loaded.tokenizer, self.loaded.config.vocab_size, timeout_s=limit)

    def _attention(self, store: PagedKVStore) -> AttentionBackend:
        spec = attention_spec(self.loaded.config)
        if self.placement.backend != "flashinfer":
            return make_backend(self.placement.backend, spec, store, num_threads=self.config.num_threads)
        assert self.toolkit is not None
        options = FlashInferOptions(
            q_dtype=self.placement.dtype,
            deterministic=self.placement.deterministic,
            cascade=CascadeGate() if self.config.cascades else None,
        )
        return FlashInferBackend(spec, store, options=options, library=self.toolkit.library)

    def _forward(self, attention: AttentionBackend, *, max_len: int) -> Forward:
        eager = EagerForward(self.loaded.decoder, attention)
        if not self.placement.uses_graphs:
            return eager
        assert self.toolkit is not None
        assert isinstance(attention, FlashInferBackend)
        sizes = bucket_sizes(self.placement.max_running)[::-1]
        steps = []
        with torch.inference_mode():
            for num_rows in track(sizes, "Capturing decode steps", show=True):
                step = capture_step(
                    self.loaded.decoder,
                    attention,
                    self.toolkit.capture,
                    num_rows=num_rows,
                    max_len=max_len,
                    padding_block=attention.store.num_blocks - 1,
                )
                steps.append(step)
        return GraphForward(attention, eager, steps)

    def _store_of(self, num_blocks: int) -> PagedKVStore:
        model = self.loaded.config
        return PagedKVStore(
            num_layers=model.num_layers,
            num_blocks=num_blocks,
            block_size=self.config.block_size,
            num_kv_heads=model.num_kv_heads,
            head_dim=model.head_dim,
            dtype=self.placement.kv_dtype,
            device=self.placement.device,
        )

    def _available_bytes(self) -> int:
        """Memory that KV may have: what is free, on a GPU less what the largest step takes beside it (a profile run)."""
        device = self.placement.device
        if device.type == "cpu":
            return psutil.virtual_memory().available
        with on_device(device):
            torch.cuda.reset_peak_memory_stats(device)
            before = torch.cuda.memory_allocated(device)
            with status(
                "Trying the largest step (the first time on a machine this compiles kernels, for minutes)"
            ):
                self._run_largest_step()
            step_bytes = torch.cuda.max_memory_allocated(device) - before
            torch.cuda.empty_cache()
            free_bytes: int = torch.cuda.mem_get_info(device)[0]
        return max(0, free_bytes - step_bytes)

    @torch.inference_mode()
    def _run_largest_step(self) -> None:
        """One prompt of as many tokens as a step may have, over KV that is dropped again; compiles kernels, too."""
        num_tokens = min(self.placement.max_step_tokens, self.loaded.config.max_position)
        num_blocks = -(-num_tokens // self.config.block_size)
        eager = EagerForward(self.loaded.decoder, self._attention(self._store_of(num_blocks)))
        plan = AttentionPlan.from_rows(
            [PlanRow(range(num_blocks), 0, num_tokens)], block_size=self.config.block_size
        )
        hidden = eager.run(torch.zeros(num_tokens, dtype=torch.int64), plan)
        self.loaded.decoder.logits(hidden[: self.placement.max_running])


def fused_ops(toolkit: Toolkit | None) -> FusedOps | None:
    """Return the operations between matrix products for an engine with this toolkit; None for the decoder's own choice."""
    return None if toolkit is None else flashinfer_ops(toolkit.library)


def warn_if_not_exact(placement: Placement, num_threads: int | None) -> None:
    """Say so where the promise that bits don't depend on company can't be kept on this CPU."""
    if not placement.deterministic or placement.device.type != "cpu":
        return
    report = _self_test(placement.dtype, num_threads)
    if not report.holds:
        names = ", ".join(check.name for check in report.failures)
        logger.warning(
            "on this machine the bits of a result can depend on what else is computed with it (%s): answers from a warm cache "
            "may differ from cold ones in rare ties",
            names,
        )


@lru_cache
def _self_test(dtype: torch.dtype, num_threads: int | None) -> InvarianceReport:
    """Run the kernels' self-test: half a second, and a fact about the machine, so once per process."""
    return row_invariance_report(dtype, num_threads=num_threads)
