"""The compiled kernel is built once, by several processes safely, and its absence is told."""

import logging
import os
import shlex
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from phloem.kernels.attention import AttentionSpec
from phloem.kernels.cpu import make_cpu_backend
from phloem.kernels.cpu_native import NativeBackend
from phloem.kernels.cpu_torch import TorchBackend
from phloem.kernels.fused_ops import torch_ops
from phloem.kernels.kv_store import PagedKVStore
from phloem.kernels.native_build import BuildError, cache_directory, find_compiler, load_library
from phloem.kernels.self_test import row_invariance_report

SPEC = AttentionSpec(num_q_heads=2, num_kv_heads=1, head_dim=32, num_layers=1)


def make_store() -> PagedKVStore:
    return PagedKVStore(
        num_layers=1, num_blocks=2, block_size=16, num_kv_heads=1, head_dim=32, dtype=torch.float32
    )


def environ(tmp_path: Path, **changes: str) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if name not in ("CXX", "PHLOEM_CPU_KERNEL")}
    return {**kept, "PHLOEM_CACHE": str(tmp_path), **changes}


def compiler(tmp_path: Path, body: str) -> str:
    script = tmp_path / "compiler"
    script.write_text(f"#!/bin/sh\n{body}\n")
    script.chmod(0o755)
    return str(script)


def test_processes_that_build_at_once_leave_one_working_file(tmp_path: Path) -> None:
    code = "from phloem.kernels.native_build import load_library; load_library().phloem_tile_rows()"
    # The code's speed is not the point: without optimisation, g++ 12 needs a third of the CPU time (9 s of 27 s).
    quick = compiler(tmp_path, f'exec {shlex.join(find_compiler())} "$@" -O0')
    variables = environ(tmp_path, CXX=quick)
    both = [subprocess.Popen([sys.executable, "-c", code], env=variables) for _ in range(2)]
    try:
        assert [process.wait(timeout=600) for process in both] == [0, 0]
    finally:
        for process in both:
            process.kill()
            process.wait()
    (built,) = (tmp_path / "kernels").iterdir()
    before = built.stat().st_mtime_ns
    assert load_library(variables).phloem_tile_rows() > 0
    assert built.stat().st_mtime_ns == before


def test_a_compiler_that_fails_is_quoted_and_torch_serves(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    broken = environ(tmp_path, CXX=compiler(tmp_path, "echo 'no such machine' >&2; exit 3"))
    with pytest.raises(BuildError, match="no such machine"):
        load_library(broken)
    assert list((tmp_path / "kernels").iterdir()) == []
    with caplog.at_level(logging.INFO, logger="phloem.kernels"):
        backend = make_cpu_backend(SPEC, make_store(), environ=broken)
    assert isinstance(backend, TorchBackend)
    assert "no such machine" in str(backend.build_error)
    assert "slower" in caplog.text


def test_a_compiler_that_writes_rubbish_is_a_build_error(tmp_path: Path) -> None:
    rubbish = 'while [ "$1" != -o ]; do shift; done; echo rubbish > "$2"'
    with pytest.raises(BuildError, match="can't build or load"):
        load_library(environ(tmp_path, CXX=compiler(tmp_path, rubbish)))


def test_no_compiler_at_all_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(BuildError, match=r"no C\+\+ compiler"):
        find_compiler({})
    with pytest.raises(BuildError, match="not on the PATH"):
        find_compiler({"CXX": "no-such-compiler -m64"})
    insisting = environ(tmp_path, PHLOEM_CPU_KERNEL="native")
    with pytest.raises(BuildError):
        make_cpu_backend(SPEC, make_store(), environ=insisting)


def test_a_cache_that_cannot_be_written_is_a_build_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(BuildError, match="PHLOEM_CACHE"):
        load_library(environ(tmp_path, PHLOEM_CACHE=str(tmp_path / "file")))


@pytest.mark.parametrize(
    ("variables", "wanted"),
    [
        ({"PHLOEM_CACHE": "/a", "XDG_CACHE_HOME": "/b"}, Path("/a/kernels")),
        ({"XDG_CACHE_HOME": "/b"}, Path("/b/phloem/kernels")),
        ({}, Path.home() / ".cache" / "phloem" / "kernels"),
    ],
)
def test_the_cache_follows_the_environment(variables: dict[str, str], wanted: Path) -> None:
    assert cache_directory(variables) == wanted


def test_the_environment_chooses_the_kernel() -> None:
    chosen = {
        name: make_cpu_backend(SPEC, make_store(), environ={**os.environ, "PHLOEM_CPU_KERNEL": name})
        for name in ("native", "torch")
    }
    assert isinstance(chosen["native"], NativeBackend)
    assert isinstance(chosen["torch"], TorchBackend)
    with pytest.raises(ValueError, match="'fast'"):
        make_cpu_backend(SPEC, make_store(), environ={"PHLOEM_CPU_KERNEL": "fast"})


@pytest.mark.parametrize("kernel", ["native", "torch"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_self_test_holds_on_this_machine(dtype: torch.dtype, kernel: str) -> None:
    report = row_invariance_report(dtype, environ={**os.environ, "PHLOEM_CPU_KERNEL": kernel})
    assert report.holds, report.failures
    assert {check.name.split()[0] for check in report.checks} == {
        "linear",
        "rms_norm",
        "silu_and_mul",
        "attention",
    }


def test_self_test_finds_an_operation_that_mixes_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    from phloem.kernels import self_test

    mixing = replace(torch_ops(), silu_and_mul=lambda x: x / x.shape[0])
    monkeypatch.setattr(self_test, "make_cpu_ops", lambda environ: mixing)
    report = row_invariance_report(torch.float32)
    assert not report.holds
    assert {check.name for check in report.failures} == {"silu_and_mul 576", "silu_and_mul 1000"}
