"""A whole engine as it is put together for a GPU, over the emulated FlashInfer: on the CPU, graphs included."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from flashinfer_emulator import Emulation
from stepped_engine import GpuRig

from phloem.kernels.fused_ops import flashinfer_ops
from phloem.kernels.plan import AttentionPlan
from phloem.runtime import Engine, EngineConfig, model_runner
from phloem.runtime.assembly import Assembler, Toolkit
from phloem.runtime.engine import start
from phloem.runtime.engine_core import EngineCore
from phloem.runtime.models.loading import load_model
from phloem.runtime.placement import Placement
from phloem.runtime.sampler import sample_on_device
from phloem.runtime.step_forward import Forward


class RunAgain:
    """What a graph does, without one: the captured computation, on what its inputs hold now."""

    def __init__(self, run: Callable[[], torch.Tensor]) -> None:
        self.replay = run
        run()


@dataclass
class CountingForward:
    """Tells the emulation where one step ends and the next begins, and keeps the plans."""

    forward: Forward
    emulation: Emulation
    plans: list[AttentionPlan]

    def run(self, token_ids: torch.Tensor, plan: AttentionPlan) -> torch.Tensor:
        self.emulation.next_step()
        self.plans.append(plan)
        return self.forward.run(token_ids, plan)


class EmulatedEngine(Engine):
    """An engine over parts that were put together outside."""

    def __init__(self, core: EngineCore, emulation: Emulation) -> None:
        self._core = core
        self.model, self.tokenizer, self.max_model_len = core.model, core.tokenizer, core.max_model_len
        self.emulation = emulation
        self.plans: list[AttentionPlan] = []
        runner = core.loop.runner
        runner.forward = CountingForward(runner.forward, emulation, self.plans)
        self.padding_block = runner.store.num_blocks - 1


def emulated_placement(config: EngineConfig) -> Placement:
    """What `place` decides on a GPU, but for the device."""
    return Placement(
        torch.device("cpu"),
        "flashinfer",
        torch.bfloat16,
        torch.bfloat16,
        config.deterministic is True,
        config.max_running or 16,
        config.max_step_tokens or 512,
        uses_graphs=config.cuda_graphs,
    )


def emulated_rig() -> GpuRig:
    """For engines that are stepped. Its arithmetic depends on tiles, splits and company, as FlashInfer's does."""
    emulation = Emulation(noise=True)
    return GpuRig(
        Toolkit(emulation.library(), RunAgain),
        place=lambda config, model: emulated_placement(config),
        watch=lambda forward: CountingForward(forward, emulation, []),
    )


@contextmanager
def emulated_gpu(
    path: Path,
    *,
    graphs: bool = True,
    deterministic: bool = False,
    noise: bool = False,
    fused: bool = True,
    runs_ahead: bool = True,
    **options: Any,
) -> Iterator[EmulatedEngine]:
    """Run an engine; at its end nothing may be left behind. Without `fused`, norms and such are torch's, as on the CPU.

    Without `runs_ahead`, each step waits for the results of the one before.
    """
    emulation = Emulation(noise=noise)
    toolkit = Toolkit(emulation.library(), RunAgain)
    ops = flashinfer_ops(toolkit.library) if fused else None
    loaded = load_model(path, dtype=torch.bfloat16, deterministic=deterministic, ops=ops)
    config = EngineConfig(
        **{"num_blocks": 128, "deterministic": deterministic, "cuda_graphs": graphs, **options}
    )
    placement = emulated_placement(config)
    with (
        # On a GPU all rows are drawn together; the emulated one's logits are on the CPU.
        patch.object(model_runner, "sample", lambda logits, rows: sample_on_device(logits, rows).tolist()),
        EmulatedEngine(start(Assembler(loaded, config, placement, toolkit)), emulation) as engine,
    ):
        if not runs_ahead:
            engine._core.loop._launcher = None
        yield engine
        engine.check()
        stats = engine.stats()
        assert stats.cache.locked == stats.cache.private - stats.kept_tails == 0
        assert stats.failed_steps == 0
