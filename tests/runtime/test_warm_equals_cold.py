"""BEHAVIOURS 31: whatever was cached, batched, chunked, preempted or evicted, the answer is that of the request alone.

Token for token, and logits bit for bit.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from programs import Lab, run_program
from tiny_model import make_tiny_model

PROGRAMS = 24


@pytest.fixture(params=[1, 2], ids=["1 thread", "2 threads"])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("architecture", ["llama", "mistral", "qwen3"])
@torch.inference_mode()
def test_b31_random_programs_on_a_tiny_model(
    tmp_path: Path, threads: int, architecture: str, dtype: torch.dtype
) -> None:
    path = make_tiny_model(tmp_path / "model", architecture=architecture)
    lab = Lab(path, num_blocks=256, block_size=8, dtype=dtype)
    reports = [run_program(lab, seed, num_requests=12, longest=90) for seed in range(PROGRAMS // 6)]
    # The guard: what was compared really came from the cache, and memory really was short.
    assert sum(report.cached_tokens for report in reports) > 300
    assert sum(report.compared for report in reports) > 30
    assert sum(report.evictions for report in reports) > 0


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@torch.inference_mode()
def test_b31_many_random_programs_on_a_tiny_model(tmp_path: Path, threads: int, dtype: torch.dtype) -> None:
    lab = Lab(make_tiny_model(tmp_path / "model"), num_blocks=256, block_size=8, dtype=dtype)
    reports = [run_program(lab, seed, num_requests=12, longest=90) for seed in range(1000, 1075)]
    assert sum(report.preemptions for report in reports) > 0
    assert sum(report.evictions for report in reports) > 0
    assert sum(report.cached_tokens for report in reports) > 5000


@pytest.mark.model
@torch.inference_mode()
def test_b31_random_programs_on_the_real_model(smollm2_path: Path) -> None:
    lab = Lab(smollm2_path, num_blocks=128, block_size=16, dtype=torch.bfloat16)
    reports = [run_program(lab, seed, num_requests=5, longest=200) for seed in range(2)]
    assert sum(report.cached_tokens for report in reports) > 100


@pytest.mark.slow
@pytest.mark.model
@torch.inference_mode()
def test_b31_many_random_programs_on_the_real_model(smollm2_path: Path, threads: int) -> None:
    lab = Lab(smollm2_path, num_blocks=128, block_size=16, dtype=torch.bfloat16)
    reports = [run_program(lab, seed, num_requests=8, longest=300) for seed in range(100, 115)]
    assert sum(report.cached_tokens for report in reports) > 5000
