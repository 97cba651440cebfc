"""The engine on a GPU against the engine on the CPU, and against itself. The first run compiles kernels for some minutes.

python -m pytest -m gpu tests/gpu

`PHLOEM_SOAK_S` says for how many seconds each of the two soaks runs; 30 minutes are as welcome as the default. A folder
of SmolLM2-135M-Instruct in the model cache is used if it is there; nothing is downloaded.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from gpu_engine_checks import (
    FAMILY,
    GREEDY,
    STRANGERS,
    check_branches,
    check_crowd,
    check_greedy_tokens_are_the_cpus,
    check_switches_change_no_token,
    check_warm_equals_cold,
    run_programs,
)
from programs import Limits
from stepped_engine import GpuRig, Lab
from tiny_model import make_tiny_model

from phloem.kernels.flashinfer_library import why_unavailable
from phloem.runtime import Engine
from phloem.runtime.assembly import Toolkit
from phloem.runtime.models.cache_dir import cache_dir

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(why_unavailable() is not None, reason=str(why_unavailable())),
]

SOAK_S = float(os.environ.get("PHLOEM_SOAK_S", "60")) / 2


@contextmanager
def gpu(path: Path, **options: Any) -> Iterator[Engine]:
    """An engine; at its end nothing may be left behind."""
    settings = {"device": "cuda", "num_blocks": 1024, "max_running": 16, "max_step_tokens": 512, **options}
    with Engine(path, **settings) as engine:
        yield engine
        engine.check()
        stats = engine.stats()
        assert stats.cache.locked == stats.cache.private - stats.kept_tails == 0
        assert stats.failed_steps == 0


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model with heads that FlashInfer has code for."""
    return make_tiny_model(
        tmp_path_factory.mktemp("models") / "gpu", hidden=192, num_q_heads=6, num_kv_heads=2, head_dim=64
    )


@pytest.fixture(params=["tiny", "smollm2-135m"])
def path(request: pytest.FixtureRequest, tiny: Path) -> Path:
    if request.param == "tiny":
        return tiny
    real = cache_dir() / "models" / "smollm2-135m"
    if not real.is_dir():
        pytest.skip(f"there is no {real}, and tests on a GPU download nothing")
    return real


def test_greedy_tokens_are_those_of_the_cpu_up_to_near_ties(path: Path) -> None:
    check_greedy_tokens_are_the_cpus(gpu, path)


def test_graphs_on_and_off_are_equal(path: Path) -> None:
    check_switches_change_no_token(gpu, path, STRANGERS, "cuda_graphs")


def test_cascades_on_and_off_are_equal(path: Path) -> None:
    check_switches_change_no_token(gpu, path, FAMILY, "cascades")


def test_b31_warm_equals_cold_in_deterministic_mode_bit_for_bit(path: Path) -> None:
    check_warm_equals_cold(gpu, path)


def test_branches_score_fork_and_expand(path: Path) -> None:
    check_branches(gpu, path)


@pytest.mark.parametrize("kv_dtype", ["fp8_e4m3", "fp8_e5m2"])
def test_8_bit_kv_gives_close_logprobs(tiny: Path, kv_dtype: str) -> None:
    with gpu(tiny) as engine:
        wanted = engine.generate(STRANGERS, GREEDY)
    with gpu(tiny, kv_dtype=kv_dtype) as engine:
        given = engine.generate(STRANGERS, GREEDY)
    for ours, theirs in zip(given, wanted, strict=True):
        [(_, a), *_], [(_, b), *_] = ours.logprobs[0].top, theirs.logprobs[0].top
        assert a == pytest.approx(b, abs=0.5)


@cache
def lab(path: Path) -> Lab:
    return Lab(path, dtype=torch.bfloat16, num_threads=torch.get_num_threads(), rig=GpuRig(Toolkit.for_gpu()))


def test_b31_soak_of_random_programs(tiny: Path) -> None:
    report = run_programs(lab(tiny), Limits(longest=90, num_actions=30), seconds=SOAK_S, at_least=3)
    assert report.cached_tokens > 0
    assert report.compared > 0
    print(report)


def test_soak_of_a_crowd_in_little_memory(tiny: Path) -> None:
    assert check_crowd(gpu, tiny, seconds=SOAK_S) > 0
