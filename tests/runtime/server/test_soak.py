"""A crowd of rude clients for a while; `make soak` lets them stay for ten minutes (PHLOEM_SOAK_S says for how many seconds)."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from live_server import live_server

from phloem.runtime import Engine

SECONDS = float(os.environ.get("PHLOEM_SOAK_S", "20"))
LONG_S = 240
"""From here on, the slope of the memory tells more than noise."""

SUPPORT = Path(__file__).parents[2] / "support"


def slope(samples: list[tuple[float, float]]) -> float:
    """The slope of the least squares line through points."""
    mean_x, mean_y = (sum(values) / len(samples) for values in zip(*samples, strict=True))
    above = sum((x - mean_x) * (y - mean_y) for x, y in samples)
    return above / sum((x - mean_x) ** 2 for x, _ in samples)


@pytest.mark.slow
def test_a_crowd_of_rude_clients_leaves_nothing_behind(tiny_path: Path) -> None:
    # What the server remembers is full soon, and grows no more.
    limits = {"answer_memory_bytes": 1 << 17, "stored_responses_bytes": 1 << 17, "send_timeout_s": 2.0}
    with (
        Engine(tiny_path, dtype="float32", num_blocks=512, sandbox_timeout_s=5) as engine,
        live_server(engine, max_requests=48, **limits) as server,
    ):
        command = [
            sys.executable,
            str(SUPPORT / "soak_clients.py"),
            server.url.rpartition(":")[2],
            str(SECONDS),
        ]
        env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
        memory: list[tuple[float, float]] = []
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=env) as crowd:
            started = time.monotonic()
            while crowd.poll() is None:
                minutes = (time.monotonic() - started) / 60
                memory.append((minutes, psutil.Process().memory_info().rss / (1 << 20)))
                time.sleep(min(1, SECONDS / 100))
            assert crowd.stdout is not None
            seen = json.load(crowd.stdout)
        idle_at = time.monotonic()
        server.wait_until_idle()
        assert time.monotonic() - idle_at < 5
        # The first third fills caches.
        grown = slope(memory[len(memory) // 3 :])
    print(f"{SECONDS:.0f} s: {seen}; {memory[-1][1]:.0f} MiB, {grown:+.2f} MiB/min")
    assert not [each for each in seen if each.startswith("5") and each != "503"], seen
    assert not {"no answer", "broken", "failed in its stream"} & set(seen), seen
    assert min(seen["200"], seen["left"], seen["400"]) >= 5, seen
    assert memory[-1][1] - memory[len(memory) // 3][1] < 48, memory
    if SECONDS >= LONG_S:
        assert grown < 1, memory
