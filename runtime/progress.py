"""Progress bars and status lines, on a terminal only."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TypeVar

from rich.console import Console
from rich.progress import track as rich_track

Item = TypeVar("Item")


def status(description: str) -> AbstractContextManager[object]:
    """Show what takes long, while it does, on standard error when that is a terminal."""
    console = Console(file=sys.stderr)
    return console.status(description) if console.is_terminal else nullcontext()


def track(items: Sequence[Item], description: str, *, show: bool) -> Iterator[Item]:
    """Iterate over `items`, with a bar on standard error when `show` is set and that is a terminal."""
    console = Console(file=sys.stderr)
    yield from rich_track(
        items, description, console=console, disable=not (show and console.is_terminal), transient=True
    )
