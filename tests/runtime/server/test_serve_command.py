"""`phloem serve` as an operator runs it: its line, its refusals, its end."""

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
from typer.testing import CliRunner

from phloem.runtime import InvalidRequest
from phloem.runtime.cli.main import app
from phloem.runtime.cli.serve import served_name


@contextmanager
def serving(path: Path, *options: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A server in a process of its own, and its URL."""
    command = [sys.executable, "-m", "phloem.runtime.cli.main", "serve", str(path), "--port", "0", *options]
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[3] / ".src")}
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=env) as process:
        try:
            assert process.stderr is not None
            line = process.stderr.readline()
            found = re.fullmatch(r"Serving tiny at (http://127\.0\.0\.1:\d+)\n", line)
            assert found, line + process.stderr.read()
            yield process, found[1]
        finally:
            process.kill()


def test_it_serves_and_ends_with_0_at_sigterm(tiny_path: Path) -> None:
    with serving(tiny_path, "--set", "num_blocks=64", "--set", "max_n=4") as (process, url):
        assert httpx.get(f"{url}/ready", timeout=30).status_code == 200
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=30) == 0


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        (["--host", "0.0.0.0"], "API key"),
        (["--set", "num_block=3"], "unknown engine option 'num_block'"),
        (["--set", "max_n=none"], "max_n must be a whole number"),
        (["--set", "max_n"], "NAME=VALUE"),
        (["--host", "host.invalid", "--api-key", "long-enough"], "can't serve at host.invalid"),
    ],
)
def test_a_wrong_setting_is_refused_before_the_model_is_loaded(options: list[str], complaint: str) -> None:
    result = CliRunner().invoke(app, ["serve", "no-such-model", *options])
    assert isinstance(result.exception, InvalidRequest)
    assert complaint in str(result.exception)


def test_a_model_in_a_directory_is_called_by_its_last_part(tmp_path: Path) -> None:
    assert served_name(str(tmp_path)) == tmp_path.name
    assert served_name("owner/model") == "owner/model"
