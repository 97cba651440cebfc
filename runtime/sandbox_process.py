"""The processes of `phloem.runtime.sandbox`: the nursery, and the workers that it forks. Imports no torch.

A worker has no way back: what it was given may have exhausted it, so its timer ends it by the kernel's hand, whatever code runs.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from phloem.runtime.errors import GrammarError

if TYPE_CHECKING:
    from llguidance import LLTokenizer

MEMORY_BYTES = 256 << 20
"""What a worker may take beyond what it begins with."""

MAX_TEXT = 16 << 20
"""Characters of a rendered template."""

_LENGTH = struct.Struct("<Q")


def send(connection: socket.socket, message: Mapping[str, Any]) -> None:
    """Send plain data.

    Raises:
        OSError: The other end is gone, or does not take it in time.
    """
    # ASCII, so that lone surrogates survive.
    data = json.dumps(message).encode()
    connection.sendall(_LENGTH.pack(len(data)) + data)


def receive(connection: socket.socket) -> dict[str, Any] | None:
    """Return what the other end has sent; None if it is gone.

    Raises:
        OSError: It sends nothing in time.
    """
    head = _exactly(connection, _LENGTH.size)
    data = None if head is None else _exactly(connection, _LENGTH.unpack(head)[0])
    if data is None:
        return None
    message: dict[str, Any] = json.loads(data)
    return message


def _exactly(connection: socket.socket, count: int) -> bytes | None:
    parts = []
    while count:
        part = connection.recv(min(count, 1 << 20))
        if not part:
            return None
        parts.append(part)
        count -= len(part)
    return b"".join(parts)


def main(control_fd: int) -> None:
    """Be the nursery: import what workers need, and fork one for each connection that is handed over, until the end of `control_fd`."""
    # The server ends it, by closing the connection: it needs it until its last request has been answered.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for workers
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGALRM])
    control = socket.socket(fileno=control_fd)
    setup = receive(control)
    if setup is None:
        return
    jobs = _Jobs(setup)
    send(control, {})
    while True:
        message, fds, _, _ = socket.recv_fds(control, 1, 1)
        if not message:
            return
        with socket.socket(fileno=fds[0]) as connection, contextlib.suppress(OSError):
            if os.fork() == 0:
                control.close()
                _work(connection, jobs, setup["timeout_s"])


def _work(connection: socket.socket, jobs: _Jobs, timeout_s: float) -> None:
    """Do jobs until the connection ends or a limit is reached. Does not return."""
    code = 1
    try:
        _limit_resources()
        while (job := receive(connection)) is not None:
            signal.setitimer(signal.ITIMER_REAL, timeout_s)
            answer = jobs.do(job)
            signal.setitimer(signal.ITIMER_REAL, 0)
            send(connection, answer)
        code = 0
    finally:
        os._exit(code)


def _limit_resources() -> None:
    """Limit memory where the system tells how much is used, and let nothing be written."""
    import resource  # not on every system, nor is forking

    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with contextlib.suppress(OSError):
        num_pages = int(Path("/proc/self/statm").read_text().split()[0])
        limit = num_pages * resource.getpagesize() + MEMORY_BYTES
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


class _Jobs:
    """What workers do, and what they need for it. Made once, before the forks."""

    def __init__(self, setup: Mapping[str, Any]) -> None:
        # What is imported at the first use takes a second, which no job must wait for.
        from transformers.utils.chat_template_utils import render_jinja_template

        self._render = render_jinja_template
        self._render([[{"role": "user", "content": ""}]], chat_template="{{ messages[0].content }}")
        self._setup = setup
        self._parser_tokenizer: LLTokenizer | None = None
        with contextlib.suppress(GrammarError):
            self._parser_tokenizer = self._make_parser_tokenizer()

    def do(self, job: Mapping[str, Any]) -> dict[str, Any]:
        """Return the answer to a job: with `error` if what it is about is wrong.

        Raises:
            MemoryError: It takes too much.
        """
        try:
            return {"text": self._template(job) if job["kind"] == "template" else self._grammar(job)}
        except MemoryError:
            raise
        except GrammarError as error:
            return {"error": str(error)}
        except Exception as error:
            # Whatever a template raises is about what it was given.
            return {"error": str(error) or type(error).__name__}

    def _grammar(self, job: Mapping[str, Any]) -> str:
        from phloem.runtime.grammar_matcher import make_matcher
        from phloem.runtime.grammar_source import Grammar

        tokenizer = self._parser_tokenizer or self._make_parser_tokenizer()
        grammar = None if job["grammar"] is None else Grammar(*job["grammar"])
        make_matcher(tokenizer, grammar, job["after"]).compute_bitmask()
        return ""

    def _template(self, job: Mapping[str, Any]) -> str:
        variables = job["variables"]
        rendered = self._render([variables.pop("messages")], chat_template=job["template"], **variables)
        text = rendered[0][0]
        if len(text) > MAX_TEXT:
            raise ValueError(f"it makes {len(text):,} characters of them; at most {MAX_TEXT:,} are taken")
        return text

    def _make_parser_tokenizer(self) -> LLTokenizer:
        from phloem.runtime.grammar_matcher import make_parser_tokenizer

        return make_parser_tokenizer(
            self._setup["tokenizer"], self._setup["width"], self._setup["eos_token_ids"]
        )
