"""What this machine can do at best: how fast it reads memory and multiplies matrices. Other benchmarks are set against it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from phloem.kernels.cpu import make_cpu_linear
from phloem.kernels.cpu_linear import LinearKernel
from phloem.kernels.linear import PackedLinear
from phloem.runtime.cli.floors import FloorModel, Rates, linear_shapes
from phloem.runtime.config import EngineConfig
from phloem.runtime.models.config import ModelConfig
from phloem.runtime.placement import place


@dataclass(frozen=True, slots=True)
class LimitSizes:
    """How much is measured."""

    read_bytes: int = 1 << 30
    """More than a cache holds."""

    rows: tuple[int, ...] = (512, 2048)
    """Of the matrix products: a step of a prefill, and a long one. The faster one counts."""

    repeats: int = 7
    """The fastest counts: what disturbs a measurement only makes it slower."""


@dataclass(frozen=True, slots=True)
class Limit:
    """One rate."""

    what: str
    """`read`, `bfloat16` or `float32`."""

    num_threads: int
    per_s: float
    """Bytes, or multiplications and additions."""


def measure_limits(
    model: ModelConfig, sizes: LimitSizes, *, advance: Callable[[], None] = lambda: None
) -> list[Limit]:
    """Measure reads, and matrix products at a model's shapes, with one thread and with all that torch uses.

    Args:
        model: Whose shapes.
        sizes: How much.
        advance: Called after each of `num_limits()` measurements.
    """
    limits = []
    for threads in thread_counts():
        with _threads(threads):
            limits.append(Limit("read", threads, _read_rate(sizes)))
            advance()
            for dtype in (torch.bfloat16, torch.float32):
                name = str(dtype).removeprefix("torch.")
                limits.append(Limit(name, threads, _product_rate(model, dtype, sizes)))
                advance()
    return limits


def thread_counts() -> list[int]:
    """One, and all that torch uses."""
    return sorted({1, torch.get_num_threads()})


def num_limits() -> int:
    """How many measurements `measure_limits` makes."""
    return 3 * len(thread_counts())


def best(limits: list[Limit], what: str) -> float:
    """Return the highest rate, whatever the threads."""
    return max(limit.per_s for limit in limits if limit.what == what)


def floor_model(model: ModelConfig, config: EngineConfig, limits: list[Limit]) -> FloorModel:
    """Return the floors of an engine of this configuration, by the highest rates in its dtype."""
    placement = place(config, model)
    dtype = str(placement.dtype).removeprefix("torch.")
    rates = Rates(best(limits, "read"), best(limits, dtype))
    return FloorModel(model, placement.dtype, placement.kv_dtype, rates)


def _read_rate(sizes: LimitSizes) -> float:
    # A sum in float32 is one addition per 4 bytes, which the vector units do faster than memory delivers.
    data = torch.ones(sizes.read_bytes // 4)
    return data.nbytes / _fastest_s(data.sum, sizes.repeats)


def _product_rate(model: ModelConfig, dtype: torch.dtype, sizes: LimitSizes) -> float:
    """The best of torch's library and our own kernels: a limit is what anybody reaches."""
    kernels = {None, make_cpu_linear()}
    return max(_rate_with(kernel, model, dtype, sizes) for kernel in kernels)


def _rate_with(
    kernel: LinearKernel | None, model: ModelConfig, dtype: torch.dtype, sizes: LimitSizes
) -> float:
    layers = [
        PackedLinear(torch.randn(shape).to(dtype), deterministic=False, kernel=kernel)
        for shape in linear_shapes(model)
    ]
    rates = []
    for rows in sizes.rows:
        inputs = [torch.randn(rows, layer.in_features).to(dtype) for layer in layers]
        flops = sum(2 * rows * layer.in_features * layer.out_features for layer in layers)

        def run(inputs: list[torch.Tensor] = inputs) -> None:
            for layer, x in zip(layers, inputs, strict=True):
                layer.product(x)

        # Short, so that more of them fit between two disturbances.
        rates.append(flops / _fastest_s(run, 4 * sizes.repeats))
    return max(rates)


def _fastest_s(run: Callable[[], object], repeats: int) -> float:
    run()
    times = []
    for _ in range(repeats):
        started = time.perf_counter()
        run()
        times.append(time.perf_counter() - started)
    return min(times)


@contextmanager
def _threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
