"""Progress of the slow first run: a bar on a terminal, a log line elsewhere."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

_logger = logging.getLogger(__name__)


@contextmanager
def show_progress(task: str, *, total: int | None) -> Iterator[Callable[[int], None]]:
    """Show that `task` is under way on stderr, and yield a function that takes the number of steps just done.

    Args:
        task: What is being done, as a line for the user.
        total: Steps in all; None shows a bar without an end.
    """
    if not sys.stderr.isatty():
        _logger.info("%s", task)
        yield lambda steps: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task_id = progress.add_task(task, total=total)
        yield lambda steps: progress.advance(task_id, steps)
