"""Progress bars, on a terminal only."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from typing import TypeVar

from rich.console import Console
from rich.progress import track as rich_track

Item = TypeVar("Item")


def track(items: Sequence[Item], description: str, *, show: bool) -> Iterator[Item]:
    """Iterate over `items`, with a bar on standard error when `show` is set and that is a terminal."""
    console = Console(file=sys.stderr)
    yield from rich_track(
        items, description, console=console, disable=not (show and console.is_terminal), transient=True
    )
