"""What the C library's heap holds, which Python's own counts do not show: the memory of libraries written in Rust and C++."""

import ctypes
import platform

import pytest

_FIELDS = (
    "arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost",
)  # fmt: skip
_GLIBC = "2.33"


class _Mallinfo(ctypes.Structure):
    _fields_ = tuple((name, ctypes.c_size_t) for name in _FIELDS)


def heap_bytes() -> int:
    """Bytes allocated and not freed; skips the test where the C library does not tell."""
    name, version = platform.libc_ver()
    if name != "glibc" or tuple(map(int, version.split("."))) < tuple(map(int, _GLIBC.split("."))):
        pytest.skip(f"needs glibc {_GLIBC} or later")
    tell = ctypes.CDLL(None).mallinfo2
    tell.restype = _Mallinfo
    found = tell()
    return int(found.uordblks) + int(found.hblkhd)
