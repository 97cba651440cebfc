"""tests/gpu/run.sh, as far as it goes without a GPU."""

import os
import runpy
import subprocess
import sys
import venv
from pathlib import Path

import pytest

from phloem.kernels.flashinfer_library import why_unavailable

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "tests" / "gpu" / "run.sh"
COLLECT = """
import pytest, sys
class Keep:
    def pytest_collection_modifyitems(self, items, config):
        self.config = config
    def pytest_collection_finish(self, session):
        print("ITEMS", *(item.nodeid.replace(" ", "_") for item in session.items))
for shard in sys.argv[1:]:
    pytest.main(["--collect-only", "-qq", "-p", "no:cacheprovider", "-m", "gpu", "tests/gpu", "-k", shard], plugins=[Keep()])
"""

needs_tomllib = pytest.mark.skipif(sys.version_info < (3, 11), reason="reads pyproject.toml with tomllib")


def run(*arguments: str, python: str = sys.executable) -> subprocess.CompletedProcess[str]:
    environ = {**os.environ, "PYTHON": python}
    return subprocess.run(
        ["bash", str(SCRIPT), *arguments], env=environ, capture_output=True, text=True, check=False
    )


def test_help_says_what_it_needs() -> None:
    assert "WHEELS" in run("--help").stdout


@pytest.mark.parametrize("arguments", [(), ("/nowhere",), (".", ".", ".")])
def test_wrong_arguments_are_refused_with_the_usage(arguments: tuple[str, ...]) -> None:
    done = run(*arguments)
    assert done.returncode == 2
    assert "run.sh WHEELS" in done.stderr


@pytest.mark.slow
def test_every_test_is_in_one_shard() -> None:
    shards = run("--shards").stdout.splitlines()
    done = subprocess.run(
        [sys.executable, "-c", COLLECT, "gpu or not gpu", *shards],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    whole, *parts = [line.split()[1:] for line in done.stdout.splitlines() if line.startswith("ITEMS")]
    assert len(parts) == len(shards)
    assert all(parts)
    assert len(whole) > 50
    assert sorted(whole) == sorted(item for part in parts for item in part)


@needs_tomllib
def test_a_bare_python_is_told_what_to_bring(tmp_path: Path) -> None:
    venv.create(tmp_path / "env", with_pip=True)
    (tmp_path / "wheels").mkdir()
    done = run(str(tmp_path / "wheels"), str(tmp_path / "results"), python=str(tmp_path / "env/bin/python"))
    assert done.returncode == 3, done.stderr
    lines = [line.strip() for line in done.stdout.splitlines()]
    for requirement in (
        "torch>=2.11",
        "sortedcontainers>=2.4",
        "flashinfer-python==0.6.18.post1",
        "pytest>=9.0",
    ):
        assert requirement in lines
    assert "pip download" in done.stdout


@needs_tomllib
def test_needs_of_needs_and_versions_are_looked_at(tmp_path: Path) -> None:
    def install(name: str, version: str, *needs: str) -> None:
        folder = tmp_path / f"{name}-{version}.dist-info"
        folder.mkdir()
        lines = ["Metadata-Version: 2.1", f"Name: {name}", f"Version: {version}"]
        lines += [f"Requires-Dist: {need}" for need in needs]
        (folder / "METADATA").write_text("\n".join(lines) + "\n")

    install("a", "1.5", "b>=2", "c; extra == 'more'", "d; python_version < '3'", "e")
    install("b", "1.9", "unseen")
    install("E", "1")
    install("torch", "2.11", "cuda-things")
    missing = runpy.run_path(str(SCRIPT.with_name("missing_wheels.py")))["missing"]
    assert missing(["a>=1", "torch", "f==3"], [str(tmp_path)]) == ["b>=2", "f==3"]


@needs_tomllib
@pytest.mark.skipif(why_unavailable() is None, reason="there is a GPU here")
def test_without_a_gpu_it_says_why(tmp_path: Path) -> None:
    done = run(str(tmp_path), str(tmp_path / "results"))
    # 3 where this machine has no nvcc or ninja either
    assert done.returncode in (2, 3), done.stderr
    reason = f"no GPU to test on: {why_unavailable()}" if done.returncode == 2 else "(a program"
    assert reason in done.stdout
