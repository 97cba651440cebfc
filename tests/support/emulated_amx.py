"""Builds the kernels with AMX in software, for machines that have AVX512 without it."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from pathlib import Path

import pytest

from phloem.kernels.native_build import BuildError, find_compiler

_HEADER = Path(__file__).with_suffix(".h")


def with_emulated_amx(environ: Mapping[str, str]) -> dict[str, str]:
    """Variables for `load_library` that make it build so. Skips the test where that can't be."""
    if "avx512bw" not in Path("/proc/cpuinfo").read_text():
        pytest.skip("AMX is emulated with AVX512")
    try:
        compiler = find_compiler(environ)
    except BuildError as error:
        pytest.skip(str(error))
    # the digest makes another header another build
    defines = f"-DPHLOEM_AMX_HEADER='\"{_HEADER}\"' -DPHLOEM_AMX_DIGEST={zlib.crc32(_HEADER.read_bytes())}"
    return {**environ, "CXX": f"{compiler[0]} {defines} -I{Path(__file__).parents[2] / 'kernels'}"}
