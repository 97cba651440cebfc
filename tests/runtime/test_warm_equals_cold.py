"""BEHAVIOURS 31: whatever was cached, forked, batched, chunked, preempted or evicted, the answer is that of the request alone.

Token for token, and logits bit for bit.
"""

from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest
import torch
from comparison import Report
from programs import Limits, run_program
from stepped_engine import Lab
from tiny_model import make_tiny_model

SHORT = Limits(longest=60, num_actions=20)
TINY = Limits(longest=90, num_actions=30)
REAL = Limits(longest=120, num_actions=20)


@pytest.fixture(params=[1, 2], ids=["1 thread", "2 threads"])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def run_programs(lab: Lab, seeds: Iterable[int], limits: Limits) -> Report:
    total = Report()
    for seed in seeds:
        print(f"program {seed}")  # what pytest shows of a failure
        total.add(run_program(lab, seed, limits))
    return total


def require_variety(report: Report, *, programs: int) -> None:
    """The guard: what was compared came from the cache, was forked and scored, and memory was short."""
    assert report.cached_tokens > 100 * programs
    assert report.compared > 5 * programs
    assert report.scores > programs
    assert min(report.rows_copied, report.shared_tails, report.forks_of_running) > 0
    assert min(report.preemptions, report.evictions, report.aborts, report.tokens_led) > 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("architecture", ["llama", "mistral", "qwen3"])
def test_b31_random_programs_on_a_tiny_model(
    tmp_path: Path, threads: int, architecture: str, dtype: torch.dtype
) -> None:
    path = make_tiny_model(tmp_path / "model", architecture=architecture)
    # Three which together do all that a program can do.
    report = run_programs(Lab(path, dtype=dtype, num_threads=threads), (3, 20, 26), SHORT)
    require_variety(report, programs=3)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_b31_many_random_programs_on_a_tiny_model(tmp_path: Path, threads: int, dtype: torch.dtype) -> None:
    path = make_tiny_model(tmp_path / "model")
    report = run_programs(
        Lab(path, dtype=dtype, num_threads=threads), range(1000 * threads, 1000 * threads + 100), TINY
    )
    require_variety(report, programs=100)


@pytest.mark.slow
@pytest.mark.model
def test_b31_many_random_programs_on_the_real_model(smollm2_path: Path, threads: int) -> None:
    lab = Lab(smollm2_path, dtype=torch.bfloat16, num_threads=threads)
    require_variety(run_programs(lab, range(100, 130), REAL), programs=30)


@pytest.mark.model
def test_b31_random_programs_on_the_real_model(smollm2_path: Path) -> None:
    lab = Lab(smollm2_path, dtype=torch.bfloat16, num_threads=torch.get_num_threads())
    report = run_programs(lab, (20,), SHORT)  # one that scores, forks and preempts
    assert report.cached_tokens > 50
    assert report.compared > 5
    assert min(report.scores, report.shared_tails, report.preemptions) > 0
