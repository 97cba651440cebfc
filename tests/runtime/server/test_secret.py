"""The server's secret: made once, for its owner alone, and the same after a restart."""

import os
import stat
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
from serve_process import serving
from typer.testing import CliRunner

from phloem.runtime import InvalidRequest
from phloem.runtime.cli.main import app
from phloem.runtime.server.auth import KeyRing
from phloem.runtime.server.secret import load_secret
from phloem.runtime.server.settings import MIN_SECRET_BYTES

posix = pytest.mark.skipif(os.name != "posix", reason="modes are POSIX's")


@posix
def test_it_is_made_for_its_owner_alone_and_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    secret = load_secret()
    assert len(secret) >= MIN_SECRET_BYTES
    assert load_secret() == secret
    [file] = (tmp_path / "state" / "phloem").iterdir()
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert load_secret(file) == secret
    assert load_secret(tmp_path / "other") != secret


def test_a_key_has_the_same_namespace_after_a_restart(tmp_path: Path) -> None:
    rings = [KeyRing(["key-of-alice"], None, load_secret(tmp_path / "secret")) for _ in range(2)]
    first, second = (ring.tenant_of("key-of-alice").namespace("salt") for ring in rings)
    assert first == second


def test_of_processes_that_make_it_together_one_wins(tmp_path: Path) -> None:
    with ThreadPoolExecutor(8) as threads:
        found = list(threads.map(load_secret, [tmp_path / "secret"] * 32))
    assert len(set(found)) == 1
    assert [each.name for each in tmp_path.iterdir()] == ["secret"]


@posix
@pytest.mark.parametrize("mode", [0o604, 0o620, 0o666])
def test_one_that_others_may_read_is_refused(tmp_path: Path, mode: int) -> None:
    file = tmp_path / "secret"
    load_secret(file)
    file.chmod(mode)
    with pytest.raises(InvalidRequest, match="chmod 600") as error:
        load_secret(file)
    assert error.value.field == "secret"


def test_a_file_that_can_not_be_made_is_refused_but_no_home_is_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(InvalidRequest, match="name another file"):
        load_secret(tmp_path / "file" / "secret")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "file"))
    assert load_secret() != load_secret()


def test_the_command_takes_it_from_a_file_and_tells_nobody(tiny_path: Path, tmp_path: Path) -> None:
    file = tmp_path / "secret"
    with serving(tiny_path, "--set", "num_blocks=64", "--set", f"secret_file={file}") as (process, url):
        body = {"model": "tiny", "prompt": "a", "max_tokens": 1}
        assert httpx.post(f"{url}/v1/completions", json=body, timeout=30).status_code == 200
        process.terminate()
        assert process.stderr is not None
        log = process.stderr.read()
    assert file.read_text().strip()
    assert file.read_text().strip() not in log


def test_a_short_one_is_refused(tmp_path: Path, tiny_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "secret"
    file.write_text("short")
    file.chmod(0o600)
    monkeypatch.setenv("PHLOEM_SECRET_FILE", str(file))
    result = CliRunner().invoke(app, ["serve", str(tiny_path)])
    assert isinstance(result.exception, InvalidRequest)
    assert "16 bytes" in str(result.exception)
