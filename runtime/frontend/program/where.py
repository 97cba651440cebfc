"""Which line of a program an operation came from, for errors and traces."""

from __future__ import annotations

import os
import sys
from types import CodeType, FrameType, TracebackType

from phloem.runtime.errors import PhloemError

_OURS = __name__.rpartition(".")[0]
_LIBRARIES = (_OURS, "contextlib", "concurrent.", "asyncio.", "threading")


def line_of(code: CodeType, instruction: int) -> str:
    """Return the line of an instruction, given by its offset in bytes, as ``file:line, in function``. O(instructions before it)."""
    number = next(line for start, end, line in code.co_lines() if start <= instruction < end)
    return f"{code.co_filename.rpartition(os.sep)[2]}:{number}, in {code.co_name}"


def program_frame(num_ours: int = 0) -> FrameType | None:
    """Return the frame of the caller's code, outside of this package.

    None where this package's own code was handed to a thread: the one who waits for it knows the line.

    Args:
        num_ours: So many of the nearest callers are known to be this package's own.
    """
    frame: FrameType | None = sys._getframe(num_ours + 1)
    while frame is not None and str(frame.f_globals.get("__name__", "")).startswith(_LIBRARIES):
        frame = frame.f_back
    return frame


def locate(error: BaseException | None) -> None:
    """Add the program's line to an error of phloem's, unless it has one. The error's type stays."""
    if not isinstance(error, PhloemError) or error.program_line is not None:
        return
    frame = program_frame()
    if frame is None:
        return
    error.program_line = line_of(frame.f_code, frame.f_lasti)
    first, *others = error.args or ("",)
    error.args = (f"{first} ({error.program_line})", *others)


class Located:
    """`with located:` adds the program's line to an error that is raised inside; nothing is spent when there is none."""

    def __enter__(self) -> None:
        return None

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        locate(error)


located = Located()
