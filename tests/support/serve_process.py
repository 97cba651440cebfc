"""`phloem serve` in a process of its own."""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def serving(path: Path, *options: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A server in a process of its own, and its URL."""
    command = [sys.executable, "-m", "phloem.runtime.cli.main", "serve", str(path), "--port", "0", *options]
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2] / ".src")}
    env["XDG_STATE_HOME"] = str(path.parent)
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=env) as process:
        try:
            assert process.stderr is not None
            line = process.stderr.readline()
            found = re.fullmatch(r"Serving tiny at (http://127\.0\.0\.1:\d+)\n", line)
            assert found, line + process.stderr.read()
            yield process, found[1]
        finally:
            process.kill()
