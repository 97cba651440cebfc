"""Rows of results, and the clock behind them."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from time import perf_counter_ns
from typing import Any, TypeVar

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Row:
    """One number. All times are medians."""

    group: str
    name: str
    value: float
    unit: str
    target: float | None = None  # the value must not be above; None: for information
    note: str = ""

    @property
    def met(self) -> bool | None:
        """Whether the target is met; None without one."""
        return None if self.target is None else self.value <= self.target


def as_json(rows: Iterable[Row]) -> list[dict[str, Any]]:
    """The rows as plain dictionaries, for ``json.dump``."""
    return [{**asdict(row), "met": row.met} for row in rows]


def median_us(action: Callable[[T], object], arguments: Iterable[T]) -> float:
    """The median time of `action` over its arguments, in microseconds. One call is one sample."""
    samples = []
    with garbage_collection_off():
        for argument in arguments:
            start = perf_counter_ns()
            action(argument)
            samples.append(perf_counter_ns() - start)
    return median(samples) / 1_000


@contextmanager
def garbage_collection_off() -> Iterator[None]:
    """Keeps the collector's pauses out of single samples."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def resident_bytes() -> int | None:
    """The process's resident memory, or None where the system does not tell (outside Linux)."""
    statm = Path("/proc/self/statm")
    if not statm.exists():
        return None
    gc.collect()
    import resource

    return int(statm.read_text().split()[1]) * resource.getpagesize()
