"""Which line of a program an operation came from, for errors and traces."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from phloem.runtime.errors import PhloemError

_OURS = __name__.rpartition(".")[0]
_LIBRARIES = (_OURS, "contextlib", "concurrent.", "asyncio.", "threading")


def program_line() -> str | None:
    """Return the line of the caller's code, outside of this package, as ``file:line, in function``.

    None where this package's own code was handed to a thread: the one who waits for it knows the line.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and str(frame.f_globals.get("__name__", "")).startswith(_LIBRARIES):
        frame = frame.f_back
    if frame is None:
        return None
    code = frame.f_code
    return f"{os.path.basename(code.co_filename)}:{frame.f_lineno}, in {code.co_name}"


@contextmanager
def located() -> Iterator[None]:
    """Add the program's line to an error of phloem's that is raised inside, unless it has one.

    The error's type stays. The line is looked up where the error arises, so nothing is spent when there is none.
    """
    try:
        yield
    except PhloemError as error:
        if error.program_line is None and (line := program_line()) is not None:
            error.program_line = line
            first, *others = error.args or ("",)
            error.args = (f"{first} ({line})", *others)
        raise
