"""Capturing a computation as a CUDA graph, to be launched again at a fraction of the cost."""

from collections.abc import Callable
from typing import Any, Protocol

import torch

_WARM_UPS = 2
"""Runs before the capture, in which libraries make what can't be made during one."""


class Captured(Protocol):
    """A computation that can be run again on whatever its inputs, which stay where they are, hold by then."""

    def replay(self) -> torch.Tensor:
        """Run it; the result is overwritten by the next replay."""


Capture = Callable[[Callable[[], torch.Tensor]], Captured]


class CudaGraph:
    """A captured computation on the current device. Owner of the graph; shares its memory with others of one `pool`."""

    __slots__ = ("_graph", "_out")

    def __init__(self, run: Callable[[], torch.Tensor], pool: Any) -> None:
        """Run a few times to warm up, then capture.

        Args:
            run: Computes on the device, without asking the host for anything; reads inputs at fixed addresses.
            pool: From `torch.cuda.graph_pool_handle`; graphs that are never replayed at the same time may share one.
        """
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(_WARM_UPS):
                run()
        torch.cuda.current_stream().wait_stream(stream)
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph, pool=pool):
            self._out = run()

    def replay(self) -> torch.Tensor:
        """Run it; see `Captured.replay`."""
        self._graph.replay()
        return self._out


def make_cuda_capture() -> Capture:
    """Return a capture whose graphs share their memory, as those of one model's batch sizes can."""
    pool = torch.cuda.graph_pool_handle()
    return lambda run: CudaGraph(run, pool)
