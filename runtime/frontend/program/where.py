"""Which line of a program an operation came from, for errors and traces."""

from __future__ import annotations

import os
import sys
from types import FrameType, TracebackType

from phloem.runtime.errors import PhloemError

_OURS = __name__.rpartition(".")[0]
_LIBRARIES = (_OURS, "contextlib", "concurrent.", "asyncio.", "threading")


def program_line(num_ours: int = 0) -> str | None:
    """Return the line of the caller's code, outside of this package, as ``file:line, in function``.

    None where this package's own code was handed to a thread: the one who waits for it knows the line.

    Args:
        num_ours: So many of the nearest callers are known to be this package's own.
    """
    frame: FrameType | None = sys._getframe(num_ours + 1)
    while frame is not None and str(frame.f_globals.get("__name__", "")).startswith(_LIBRARIES):
        frame = frame.f_back
    if frame is None:
        return None
    code = frame.f_code
    return f"{code.co_filename.rpartition(os.sep)[2]}:{frame.f_lineno}, in {code.co_name}"


def locate(error: BaseException | None) -> None:
    """Add the program's line to an error of phloem's, unless it has one. The error's type stays."""
    if isinstance(error, PhloemError) and error.program_line is None and (line := program_line()) is not None:
        error.program_line = line
        first, *others = error.args or ("",)
        error.args = (f"{first} ({line})", *others)


class Located:
    """`with located:` adds the program's line to an error that is raised inside; nothing is spent when there is none."""

    def __enter__(self) -> None:
        return None

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        locate(error)


located = Located()
