"""What all states of one run share, and what ends them together."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from phloem.runtime.engine import Engine
from phloem.runtime.errors import Cancelled
from phloem.runtime.frontend.program.choose import KnownOptions
from phloem.runtime.frontend.program.roles import Roles
from phloem.runtime.frontend.program.tokens import TokenPath
from phloem.runtime.frontend.program.trace import Trace

if TYPE_CHECKING:
    from phloem.runtime.frontend.program.job import Run


@dataclass(frozen=True, slots=True)
class Piece:
    """A piece of a streamed run."""

    text: str
    """Of what is generated; not what the program appends."""

    name: str | None = None
    """The capture that it will be part of."""

    state: str = "0"
    """The state that generates it: "0" is the run's, "0.1" the second child that it forked."""

    run: Run | None = None
    """In the last piece only, which has no text."""


@dataclass(slots=True, eq=False)
class Scope:
    """One run's common things. May be used from any thread."""

    engine: Engine
    roles: Roles
    options: KnownOptions
    trace: Trace
    on_piece: Callable[[Piece], None] | None = None
    _paths: set[TokenPath] = field(default_factory=set)
    _guard: threading.Lock = field(default_factory=threading.Lock)
    _is_closed: bool = False

    def add(self, path: TokenPath) -> None:
        """Take a path into care: it is released with the run.

        Raises:
            Cancelled: The run has ended already.
        """
        with self._guard:
            self._paths.add(path)
            is_closed = self._is_closed
        if is_closed:
            self.release(path)
            raise Cancelled("the run was ended")

    def release(self, path: TokenPath) -> None:
        """Release a path before the run ends."""
        with self._guard:
            self._paths.discard(path)
        path.release()

    def close(self) -> None:
        """Release all paths, which aborts what is generated on them. A second call does nothing."""
        with self._guard:
            self._is_closed = True
            paths, self._paths = self._paths, set()
        for path in paths:
            path.release()
