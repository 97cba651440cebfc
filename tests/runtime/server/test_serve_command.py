"""`phloem serve` as an operator runs it: its line, its refusals, its end."""

import signal
from pathlib import Path

import httpx
import pytest
from serve_process import serving
from typer.testing import CliRunner

from phloem.runtime import InvalidRequest
from phloem.runtime.cli.main import app
from phloem.runtime.cli.serve import served_name


def test_at_sigterm_it_ends_what_runs_and_then_with_0(tiny_path: Path) -> None:
    with serving(tiny_path, "--set", "num_blocks=64", "--set", "max_n=4") as (process, url):
        assert httpx.get(f"{url}/ready", timeout=30).status_code == 200
        body = {"model": "tiny", "prompt": "a", "max_tokens": 100, "ignore_eos": True, "stream": True}
        with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=30) as running:
            lines = running.iter_lines()
            next(lines)
            process.send_signal(signal.SIGTERM)
            assert list(lines)[-2:] == ["data: [DONE]", ""]
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
