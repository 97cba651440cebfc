"""The operations between matrix products, compiled: `cpu_ops.cpp` in place of a dozen small torch calls each."""

import ctypes
from typing import Any

import torch

from phloem.kernels.activation import silu_and_mul
from phloem.kernels.cpu_native import DTYPES
from phloem.kernels.fused_ops import FusedOps, Rotate, torch_ops
from phloem.kernels.norm import add_norm, rms_norm
from phloem.kernels.rope import RotaryEmbedding


class _Rows(ctypes.Structure):
    """`PhloemRows` of cpu_kernels.h: the same fields in the same order."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("num_rows", "row_stride")),
        *((name, ctypes.c_int32) for name in ("num_heads", "width")),
    )


class RotaryStruct(ctypes.Structure):
    """`PhloemRotary` of cpu_kernels.h."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("cos", "signed_sin")),
        ("max_position", ctypes.c_int64),
        ("rotary_dim", ctypes.c_int32),
    )

    @classmethod
    def of(cls, rope: RotaryEmbedding) -> "RotaryStruct":
        """Describe an embedding's tables, which it must outlive."""
        cos, signed_sin = rope.tables()
        return cls(cos.data_ptr(), signed_sin.data_ptr(), *cos.shape)


class PositionCheck:
    """Refuses positions that have no place in the rotary tables."""

    def __init__(self, library: ctypes.CDLL, max_position: int) -> None:
        self._beyond = library.phloem_position_beyond
        self._beyond.argtypes = (ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64)
        self._beyond.restype = ctypes.c_int64
        self._max_position = max_position

    def __call__(self, positions: torch.Tensor) -> None:
        """Look at int64 positions, contiguous.

        Raises:
            IndexError: one is beyond the tables.
        """
        beyond: int = self._beyond(positions.data_ptr(), positions.numel(), self._max_position)
        if beyond >= 0:
            raise IndexError(f"position {beyond} is beyond the rotary table's {self._max_position}")


def native_ops(library: ctypes.CDLL) -> FusedOps:
    """Bind the compiled operations; the library is what `native_build.load_library` gives."""
    ops = _NativeOps(library)
    return FusedOps(ops.rms_norm, ops.add_norm, ops.silu_and_mul, ops.make_rotate)


class _NativeOps:
    """The library's functions, with torch's as fallback for types that they have no code for."""

    def __init__(self, library: ctypes.CDLL) -> None:
        pointer, flag = ctypes.c_void_p, ctypes.c_int32
        self._add_norm = library.phloem_add_norm
        self._add_norm.argtypes = (pointer, pointer, pointer, pointer, ctypes.c_float, flag, flag)
        self._add_norm.restype = None
        self._silu_and_mul = library.phloem_silu_and_mul
        self._silu_and_mul.argtypes = (pointer, pointer, ctypes.c_int64, ctypes.c_int32, flag, flag)
        self._silu_and_mul.restype = None
        self._rotate = library.phloem_rotate
        self._rotate.argtypes, self._rotate.restype = (*(pointer,) * 4, flag, flag), None
        self._library = library
        self._torch = torch_ops()

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """As `norm.rms_norm`."""
        if not _fits(x, weight):
            return rms_norm(x, weight, eps)
        out = torch.empty(x.shape, dtype=x.dtype)
        self._add_norm(
            _address(x), None, weight.data_ptr(), out.data_ptr(), eps, _is_bf16(x), torch.get_num_threads()
        )
        return out

    def add_norm(
        self, hidden: torch.Tensor, delta: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """As `norm.add_norm`; the sum is written over `hidden`."""
        if not _fits(hidden, weight) or delta.shape != hidden.shape or delta.dtype != hidden.dtype:
            return add_norm(hidden, delta, weight, eps)
        delta, out = delta.contiguous(), torch.empty(hidden.shape, dtype=hidden.dtype)
        self._add_norm(
            _address(hidden),
            delta.data_ptr(),
            weight.data_ptr(),
            out.data_ptr(),
            eps,
            _is_bf16(hidden),
            torch.get_num_threads(),
        )
        return hidden, out

    def silu_and_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        """As `activation.silu_and_mul`."""
        num_rows, columns = gate_up.shape
        if gate_up.dtype not in DTYPES or not gate_up.is_contiguous() or columns % 2:
            return silu_and_mul(gate_up)
        out = torch.empty((num_rows, columns // 2), dtype=gate_up.dtype)
        self._silu_and_mul(
            gate_up.data_ptr(),
            out.data_ptr(),
            num_rows,
            columns // 2,
            _is_bf16(gate_up),
            torch.get_num_threads(),
        )
        return out

    def make_rotate(self, rope: RotaryEmbedding, device: torch.device) -> Rotate:
        """As `RotaryEmbedding.__call__`."""
        slow, tables = rope.to(device), RotaryStruct.of(rope)
        check = PositionCheck(self._library, tables.max_position)

        def rotate_one(x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
            out = torch.empty(x.shape, dtype=x.dtype)
            self._rotate(
                _address(x),
                positions.data_ptr(),
                ctypes.byref(tables),
                out.data_ptr(),
                _is_bf16(x),
                torch.get_num_threads(),
            )
            return out

        def rotate(
            q: torch.Tensor, k: torch.Tensor, positions: torch.Tensor
        ) -> tuple[torch.Tensor, torch.Tensor]:
            if not all(_rows_fit(x) for x in (q, k)) or positions.dtype != torch.int64:
                return slow(q, k, positions)
            positions = positions.contiguous()
            check(positions)
            return rotate_one(q, positions), rotate_one(k, positions)

        return rotate


def _fits(x: torch.Tensor, weight: torch.Tensor) -> bool:
    return _rows_fit(x) and weight.dtype == x.dtype and weight.is_contiguous()


def _rows_fit(x: torch.Tensor) -> bool:
    """Whether x is `[num_rows, width]` or `[num_rows, num_heads, width]` with rows that are contiguous in themselves."""
    if x.dtype not in DTYPES or x.dim() not in (2, 3):
        return False
    return x.stride(-1) == 1 and (x.dim() == 2 or x.stride(1) == x.shape[2] or x.shape[1] == 1)


def _address(x: torch.Tensor) -> Any:
    """A reference to a description of x for the library."""
    num_heads = x.shape[1] if x.dim() == 3 else 1
    rows = _Rows(x.data_ptr(), x.shape[0], x.stride(0), num_heads, x.shape[-1])
    return ctypes.byref(rows)


def _is_bf16(x: torch.Tensor) -> int:
    return int(x.dtype == torch.bfloat16)
