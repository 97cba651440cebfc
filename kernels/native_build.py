"""Compiles the C++ kernels once per machine and keeps it in the user's cache directory.

The file's name is a digest of everything that its code depends on (source, flags, compiler, processor), so a stale or
foreign binary is never loaded. Two processes may build at once: each compiles in its own temporary folder and renames what comes out.
"""

import ctypes
import hashlib
import logging
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

SOURCES = tuple(
    Path(__file__).with_name(name)
    for name in ("cpu_attention.cpp", "cpu_ops.cpp", "cpu_linear.cpp", "cpu_decoder.cpp")
)
HEADERS = tuple(
    Path(__file__).with_name(name)
    for name in (
        "cpu_kernels.h",
        "cpu_team.h",
        "cpu_vectors.h",
        "cpu_amx.h",
        "cpu_attention_amx.h",
        "cpu_linear_amx.h",
    )
)
_COMPILERS = ("g++", "clang++", "c++")
# no -ffast-math and no contraction: the order and the fusing of operations are what the source says
_FLAGS = ("-std=c++17", "-O3", "-march=native", "-ffp-contract=off", "-fPIC")
_TIMEOUT_S = 300
_LIBRARY = "phloem.so"

_logger = logging.getLogger(__name__)


class BuildError(RuntimeError):
    """The kernel could not be compiled or loaded; the message says why and what to do."""


def load_library(environ: Mapping[str, str] = os.environ) -> ctypes.CDLL:
    """Load the compiled kernel, compiling it first where the cache has none (some five seconds).

    Args:
        environ: Where CXX, PHLOEM_CACHE and XDG_CACHE_HOME are looked up.

    Raises:
        BuildError: no compiler, or it failed, or its output can't be loaded.
    """
    compiler = find_compiler(environ)
    try:
        path = cache_directory(environ) / f"{_digest(compiler)}.so"
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            _build(compiler, path)
        return ctypes.CDLL(str(path))
    except OSError as error:
        raise BuildError(
            f"can't build or load the kernel: {error}; PHLOEM_CACHE can name another directory to build in"
        ) from error


def find_compiler(environ: Mapping[str, str] = os.environ) -> list[str]:
    """The C++ compiler's command: $CXX if set, else the first of g++, clang++ and c++ on the PATH.

    Raises:
        BuildError: there is none.
    """
    if environ.get("CXX"):
        command = shlex.split(environ["CXX"])
        if shutil.which(command[0]) is None:
            raise BuildError(f"$CXX is {environ['CXX']!r}, which is not on the PATH; unset it or correct it")
        return command
    for name in _COMPILERS:
        path = shutil.which(name)
        if path is not None:
            return [path]
    raise BuildError(
        f"no C++ compiler ({', '.join(_COMPILERS)}) on the PATH; install one for the fast CPU kernel"
    )


def cache_directory(environ: Mapping[str, str] = os.environ) -> Path:
    """Where compiled kernels are kept: $PHLOEM_CACHE, else phloem under $XDG_CACHE_HOME or ~/.cache; then kernels."""
    if environ.get("PHLOEM_CACHE"):
        return Path(environ["PHLOEM_CACHE"]) / "kernels"
    base = Path(environ["XDG_CACHE_HOME"]) if environ.get("XDG_CACHE_HOME") else Path.home() / ".cache"
    return base / "phloem" / "kernels"


def _build(compiler: list[str], path: Path) -> None:
    with tempfile.TemporaryDirectory(dir=path.parent) as name:
        folder = Path(name)
        # without OpenMP (some clang installations) the kernel still works, on one thread
        error = _compile(compiler, folder, _openmp_flags())
        if error is not None:
            _logger.info("compiling without OpenMP: %s", error)
            error = _compile(compiler, folder, [])
        if error is not None:
            raise BuildError(f"{shlex.join(compiler)} can't compile the kernels: {error}")
        library = folder / _LIBRARY
        library.chmod(0o755)
        library.replace(path)


def _compile(compiler: list[str], folder: Path, extra: list[str]) -> str | None:
    """Compile the sources side by side, and link them; None if it went well, else the end of what the compiler said."""
    # options of $CXX come last, so that they can take another -march
    command = [compiler[0], *_FLAGS, *compiler[1:]]
    objects = [folder / f"{source.stem}.o" for source in SOURCES]

    def compile_one(source: Path, target: Path) -> str | None:
        return _run([*command, "-c", str(source), "-o", str(target), *extra])

    with ThreadPoolExecutor(len(SOURCES)) as pool:
        errors = [error for error in pool.map(compile_one, SOURCES, objects) if error is not None]
    if errors:
        return errors[0]
    return _run([*command, "-shared", *map(str, objects), "-o", str(folder / _LIBRARY), *extra])


def _run(command: list[str]) -> str | None:
    """Run a command; None if it went well, else the end of what it said."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    return None if done.returncode == 0 else done.stderr[-2000:].strip() or f"exit status {done.returncode}"


def _openmp_flags() -> list[str]:
    """Link with the OpenMP library that torch brings: a second one would have its own threads, spinning against torch's.

    On Linux torch's library has the system library's name, so the loader takes the one that is loaded already; naming its
    file also covers wheels that renamed it.
    """
    folder = Path(torch.__file__).parent / "lib"
    found = sorted(folder.glob("libgomp*.so*"))
    if not found:
        return ["-fopenmp"]
    return ["-Wl,--as-needed", str(found[0]), f"-Wl,-rpath,{folder}", "-fopenmp"]


def _digest(compiler: list[str]) -> str:
    program = Path(
        compiler[0] if os.path.sep in compiler[0] else shutil.which(compiler[0]) or compiler[0]
    ).resolve()
    stat = program.stat()
    parts = [
        *(source.read_text() for source in SOURCES),
        *(header.read_text() for header in HEADERS),
        " ".join((*compiler, *_FLAGS, *_openmp_flags())),
        f"{program} {stat.st_size} {stat.st_mtime_ns}",
        _processor(),
    ]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:32]


def _processor() -> str:
    """What -march=native depends on: model and instruction sets."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return f"{platform.machine()} {platform.processor()}"
    wanted = ("flags", "features", "model name", "cpu part")
    return "\n".join(sorted({line for line in lines if line.lower().startswith(wanted)}))
