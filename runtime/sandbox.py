"""Work on what strangers wrote, in processes that end: compiling a grammar, rendering a chat template.

A grammar of two kilobytes can take a minute and gigabytes to compile, and a template can loop for ever; no thread that is in there can be
stopped. So both are done, first or only, in a process of their own::

    Sandbox ──control──▶ nursery: imports, the vocabulary; never sees what strangers wrote
       │                    │ fork, some milliseconds
       └──── a job ────▶ worker: a timer that kills it, limits on memory and files; used again after an answer

A worker that goes beyond its limits is gone, and the next job gets another one. Between the processes go JSON texts.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
import weakref
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from phloem.runtime.errors import GrammarError, InvalidRequest
from phloem.runtime.sandbox_process import MEMORY_BYTES, receive, send

if TYPE_CHECKING:
    from phloem.runtime.grammar_source import Grammar
    from phloem.runtime.tokenizer import Tokenizer

STARTUP_S = 60.0
"""How long the nursery may take to start; it takes about one second."""

GRACE_S = 2.0
"""After its time a worker kills itself; a machine that is too busy to let it do so is waited for no longer than this."""

MAX_IDLE = 2
"""Workers that are kept for later."""

_KEPT_VARIABLES = ("PATH", "LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH", "LANG", "LC_ALL", "TMPDIR")
_START = "import sys; sys.path[:] = sys.argv[2:]; from phloem.runtime.sandbox_process import main; main(int(sys.argv[1]))"


class Sandbox:
    """Processes for one model. Threads may share it. Close it, or drop it: its processes end either way."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, *, timeout_s: float) -> None:
        """Start the first process, without waiting for it.

        Args:
            tokenizer: The model's.
            vocab_size: The width of the model's logits.
            timeout_s: What a job may take.
        """
        self._setup = {
            "tokenizer": tokenizer.backend.to_str(),
            "width": max(vocab_size, tokenizer.vocab_size),
            "eos_token_ids": list(tokenizer.eos_token_ids),
            "timeout_s": timeout_s,
        }
        self._timeout_s = timeout_s
        self._lock = threading.Lock()
        self._nursery = _Nursery(self._setup)
        self._idle: list[socket.socket] = []

    def check_grammar(self, grammar: Grammar | None, after: str) -> None:
        """Compile a grammar as `GrammarCompiler.compile` does, and forget the result.

        Raises:
            GrammarError: The grammar is wrong, or takes too long or too much memory.
        """
        parts = None if grammar is None else [grammar.kind, grammar.text, grammar.flexible_whitespace]
        answer = self._call({"kind": "grammar", "grammar": parts, "after": after})
        if answer is None:
            raise GrammarError(
                f"the grammar takes {self._limits} to compile: make it simpler", field="grammar"
            )
        if "error" in answer:
            raise GrammarError(answer["error"], field="grammar")

    def render(self, template: str, variables: Mapping[str, Any]) -> str:
        """Render a chat template.

        Args:
            template: Its text.
            variables: What it is rendered with, as plain data.

        Raises:
            InvalidRequest: The template refuses these messages, or takes too long or too much memory over them.
        """
        answer = self._call({"kind": "template", "template": template, "variables": dict(variables)})
        if answer is None:
            raise InvalidRequest(
                f"the model's chat template takes {self._limits} for these messages: send fewer, or another template",
                field="messages",
            )
        if "error" in answer:
            raise InvalidRequest(
                f"the model's chat template refuses these messages: {answer['error']}", field="messages"
            )
        return str(answer["text"])

    def close(self) -> None:
        """End all processes. May be called twice; whatever is asked later has no answer."""
        with self._lock:
            self._nursery.close()
            while self._idle:
                self._idle.pop().close()

    @property
    def _limits(self) -> str:
        return f"more than {self._timeout_s:g} s or {MEMORY_BYTES >> 20} MiB"

    def _call(self, job: Mapping[str, Any]) -> dict[str, Any] | None:
        """Have a job done; None if its worker has not survived it."""
        worker = self._take()
        try:
            send(worker, job)
            answer = receive(worker)
        except OSError:
            answer = None
        if answer is None:
            worker.close()
        else:
            self._give_back(worker)
        return answer

    def _take(self) -> socket.socket:
        with self._lock:
            if self._idle:
                return self._idle.pop()
            ours, theirs = socket.socketpair()
            with theirs:
                try:
                    self._nursery.start_worker(theirs)
                except OSError:
                    # Killed by the system, for lack of memory for instance.
                    self._nursery.close()
                    self._nursery = _Nursery(self._setup)
                    self._nursery.start_worker(theirs)
        ours.settimeout(self._timeout_s + GRACE_S)
        return ours

    def _give_back(self, worker: socket.socket) -> None:
        with self._lock:
            if len(self._idle) < MAX_IDLE and not self._nursery.is_closed:
                self._idle.append(worker)
                return
        worker.close()


class _Nursery:
    """The process that workers are forked from."""

    def __init__(self, setup: Mapping[str, Any]) -> None:
        """Start it, without waiting for it."""
        self._control, theirs = socket.socketpair()
        environment = {name: os.environ[name] for name in _KEPT_VARIABLES if name in os.environ}
        # One thread, so that forking is safe; and nothing is fetched.
        environment |= {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        with theirs:
            process = subprocess.Popen(
                [sys.executable, "-c", _START, str(theirs.fileno()), *sys.path],
                pass_fds=[theirs.fileno()],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                # A library that panics would write there what it was given.
                stderr=subprocess.DEVNULL,
            )
        self._is_ready = False
        self._finalizer = weakref.finalize(self, _end, self._control, process)
        self._control.settimeout(STARTUP_S)
        send(self._control, setup)

    @property
    def is_closed(self) -> bool:
        """Whether it was closed."""
        return not self._finalizer.alive

    def start_worker(self, connection: socket.socket) -> None:
        """Have a worker started that takes jobs from a connection.

        Raises:
            OSError: The process has ended, or does not start.
        """
        if not self._is_ready:
            if receive(self._control) is None:
                raise ConnectionError("the process has ended")
            self._is_ready = True
        socket.send_fds(self._control, [b"w"], [connection.fileno()])

    def close(self) -> None:
        """End it. A second call does nothing."""
        self._finalizer()


def _end(control: socket.socket, process: subprocess.Popen[bytes]) -> None:
    control.close()
    process.kill()
    process.wait()
