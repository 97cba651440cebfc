"""`--profile FILE`: what ran while a benchmark measured, as a Chrome trace."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def chrome_trace(path: Path | None) -> Iterator[None]:
    """Record all threads' torch operations, when a file was asked for; open it in ui.perfetto.dev or chrome://tracing.

    Recording slows what it records: what is measured meanwhile counts for nothing.
    """
    if path is None:
        yield
        return
    from torch._C._profiler import _ExperimentalConfig
    from torch.profiler import ProfilerActivity, profile

    # The engine computes in a thread of its own, which was there before.
    config = _ExperimentalConfig(profile_all_threads=True)
    with profile(activities=[ProfilerActivity.CPU], experimental_config=config) as recorded:
        yield
    recorded.export_chrome_trace(str(path))
