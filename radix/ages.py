"""The age of hits: how long what an admission reuses had not been used.

Nodes know the tick of their last use, and no time: one in every node would take memory, and a write for each node of a
path whenever it is used. So the time is sampled instead, now and then, together with the tick::

    tick    0      7      9                 31      32
    time    0.0    0.4    0.6               9.1     9.3
                   └──── a use at tick 8 was at 0.4 or a little later

A tick counts as used at the time of the last sample up to it. A sample is taken with every use, unless there is one not
`RESOLUTION_S` older. When they are many, samples are left to an older one that is near, seen from now: so there are never
more than `MAX_SAMPLES`, and an age is told too high by a sixteenth of itself at most, and `RESOLUTION_S`.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable
from dataclasses import dataclass

AGE_BOUNDS_S = (1, 5, 15, 60, 300, 900, 3_600, 14_400, 86_400)
RESOLUTION_S = 0.1
MAX_SAMPLES = 1_024
PRECISION = 16  # of an age, the part that it may be wrong by


@dataclass(frozen=True, slots=True)
class AgeHistogram:
    """How many hits had which age."""

    bounds_s: tuple[int, ...]
    counts: tuple[int, ...]  # up to each bound, above the one before; the last: above all of them
    sum_s: float


class HitAges:
    """Tells and counts the ages of hits. Owned by one `RadixCache`."""

    __slots__ = ("_clock", "_counts", "_ends_s", "_sum_s", "_ticks", "_times_s")

    def __init__(self, clock: Callable[[], float]) -> None:
        """No hits yet, at tick 0; `clock` gives seconds and never goes back."""
        self._clock = clock
        self._ticks = [0]
        self._times_s = [clock()]
        self._ends_s = self._times_s[:]  # of each sample, the time of the last one that was left to it
        self._counts = [0] * (len(AGE_BOUNDS_S) + 1)
        self._sum_s = 0.0

    def sample(self, tick: int) -> None:
        """Notes that `tick` is now, if that is worth a sample. Amortised O(1)."""
        now = self._clock()
        if now - self._times_s[-1] < RESOLUTION_S:
            return
        self._ticks.append(tick)
        self._times_s.append(now)
        self._ends_s.append(now)
        if len(self._ticks) > MAX_SAMPLES:
            self._thin(now)

    def count(self, tick: int) -> None:
        """Counts a hit on what was used at `tick` for the last time. O(log MAX_SAMPLES)."""
        age_s = self.age_s(tick)
        self._counts[bisect_left(AGE_BOUNDS_S, age_s)] += 1
        self._sum_s += age_s

    def age_s(self, tick: int) -> float:
        """How long ago a tick was. O(log MAX_SAMPLES)."""
        return self._clock() - self._times_s[bisect_right(self._ticks, tick) - 1]

    def histogram(self) -> AgeHistogram:
        """What was counted so far."""
        return AgeHistogram(AGE_BOUNDS_S, tuple(self._counts), self._sum_s)

    def _thin(self, now: float) -> None:
        """Leaves each sample to the one before, if that is near for its age. O(MAX_SAMPLES), and leaves half of them at most."""
        ticks, times_s, ends_s = self._ticks[:1], self._times_s[:1], self._ends_s[:1]
        for tick, time_s, end_s in zip(self._ticks[1:], self._times_s[1:], self._ends_s[1:], strict=True):
            if PRECISION * (end_s - times_s[-1]) < now - end_s:
                ends_s[-1] = end_s
                continue
            ticks.append(tick)
            times_s.append(time_s)
            ends_s.append(end_s)
        self._ticks, self._times_s, self._ends_s = ticks, times_s, ends_s
