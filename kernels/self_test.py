"""A start-up check, in well under a second, that rows have the same bits in any company on this machine.

The promise "warm equals cold, bit for bit" rests on facts about torch's libraries that were measured, not documented
(`phloem.kernels.linear`, `.activation`). So they are checked where phloem runs; the engine and `phloem doctor` read the
report and say so when a machine differs.
"""

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import torch

from phloem.kernels.attention import AttentionSpec
from phloem.kernels.cpu import make_cpu_backend, make_cpu_linear, make_cpu_ops
from phloem.kernels.cpu_linear import LinearKernel
from phloem.kernels.cpu_torch import TorchBackend
from phloem.kernels.fused_ops import FusedOps
from phloem.kernels.kv_store import PagedKVStore
from phloem.kernels.linear import PackedLinear, RowLadder
from phloem.kernels.plan import AttentionPlan, PlanRow

_CUTS = (1, 5, 16)
"""Pieces, in rows, that a batch is cut into; each must give the bits of the whole."""
_NUM_ROWS = 37
_LINEAR_SHAPES = ((576, 576), (192, 1536))
_WIDTHS = (576, 1000)
_CONTEXT = 300
"""Tokens of the attention check: two spans, the second one partial."""


@dataclass(frozen=True, slots=True)
class InvarianceCheck:
    """One operation's result."""

    name: str
    """What ran, with its shape."""
    holds: bool
    """Whether every cut gave the same bits."""
    detail: str
    """How it ran, for people: row counts in use, the kernel, why a kernel is missing."""


@dataclass(frozen=True, slots=True)
class InvarianceReport:
    """What holds on this machine for one dtype."""

    dtype: torch.dtype
    num_threads: int
    checks: tuple[InvarianceCheck, ...]

    @property
    def holds(self) -> bool:
        """Whether every operation is row-invariant."""
        return all(check.holds for check in self.checks)

    @property
    def failures(self) -> tuple[InvarianceCheck, ...]:
        """The checks that don't hold."""
        return tuple(check for check in self.checks if not check.holds)


def row_invariance_report(
    dtype: torch.dtype,
    *,
    num_threads: int | None = None,
    environ: Mapping[str, str] = os.environ,
) -> InvarianceReport:
    """Run each operation on a batch and on pieces of it, and compare bits. Compiles the CPU kernel if need be.

    Args:
        dtype: float32 or bfloat16, the model's.
        num_threads: Threads of the attention kernel; None follows torch.get_num_threads().
        environ: Passed to `make_cpu_backend`.
    """
    generator = torch.Generator().manual_seed(0)
    kernel = make_cpu_linear(environ)
    checks = [_check_linear(shape, dtype, generator, kernel) for shape in _LINEAR_SHAPES]
    ops = make_cpu_ops(environ)
    for width in _WIDTHS:
        weight = torch.randn(width, generator=generator).to(dtype)
        x = torch.randn((_NUM_ROWS, width), generator=generator).to(dtype)
        checks.append(_check(f"rms_norm {width}", partial(_norm, ops, weight), x))
        gate_up = torch.randn((_NUM_ROWS, 2 * width), generator=generator).to(dtype)
        checks.append(_check(f"silu_and_mul {width}", ops.silu_and_mul, gate_up))
    checks.append(_check_attention(dtype, generator, num_threads, environ))
    return InvarianceReport(dtype, num_threads or torch.get_num_threads(), tuple(checks))


def _norm(ops: FusedOps, weight: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return ops.rms_norm(x, weight, 1e-5)


def _check(
    name: str, run: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor, detail: str = ""
) -> InvarianceCheck:
    whole = run(x)
    differing = [cut for cut in _CUTS if not torch.equal(_in_pieces(run, x, cut), whole)]
    if differing:
        detail = f"pieces of {', '.join(map(str, differing))} rows differ from {x.shape[0]} rows at once"
    return InvarianceCheck(name, not differing, detail)


def _in_pieces(run: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor, cut: int) -> torch.Tensor:
    return torch.cat([run(x[begin : begin + cut]) for begin in range(0, x.shape[0], cut)])


def _check_linear(
    shape: tuple[int, int], dtype: torch.dtype, generator: torch.Generator, kernel: LinearKernel | None
) -> InvarianceCheck:
    weight = torch.randn(shape, generator=generator).to(dtype)
    linear = PackedLinear(weight, ladder=RowLadder(), kernel=kernel)
    x = torch.randn((_NUM_ROWS, shape[1]), generator=generator).to(dtype)
    detail = "F.linear: this torch or machine has no repacked product"
    if linear.compiled is not None:
        is_tiled = linear.compiled.format.is_tiled
        detail = "compiled kernel on AMX tiles" if is_tiled else "compiled kernel"
    elif linear.is_packed:
        detail = "repacked weights"
    return _check(f"linear {shape[1]} to {shape[0]}", linear, x, detail)


def _check_attention(
    dtype: torch.dtype, generator: torch.Generator, num_threads: int | None, environ: Mapping[str, str]
) -> InvarianceCheck:
    """The last tokens of a prompt, prefilled at once and then in pieces over the KV that the first run wrote."""
    spec = AttentionSpec(num_q_heads=6, num_kv_heads=2, head_dim=64, num_layers=1)
    num_blocks = -(-_CONTEXT // 16)
    store = PagedKVStore(
        num_layers=1, num_blocks=num_blocks, block_size=16, num_kv_heads=2, head_dim=64, dtype=dtype
    )
    backend = make_cpu_backend(spec, store, num_threads=num_threads, environ=environ)
    table = torch.randperm(num_blocks, generator=generator).tolist()
    k, v = torch.randn((2, _CONTEXT, 2, 64), generator=generator).to(dtype)
    q = torch.randn((_CONTEXT, 6, 64), generator=generator).to(dtype)
    backend.plan(AttentionPlan.from_rows([PlanRow(table, 0, _CONTEXT)], block_size=16))
    backend.append(0, k, v)
    start = _CONTEXT - _NUM_ROWS
    whole = backend.attend(0, q)[start:]

    def attend_from(begin: int, count: int) -> torch.Tensor:
        backend.plan(AttentionPlan.from_rows([PlanRow(table, begin, count)], block_size=16))
        return backend.attend(0, q[begin : begin + count])

    differing = [cut for cut in _CUTS if not torch.equal(_decode_in_pieces(attend_from, start, cut), whole)]
    detail = (
        f"torch operations: {backend.build_error}" if isinstance(backend, TorchBackend) else "compiled kernel"
    )
    if differing:
        detail += f"; pieces of {', '.join(map(str, differing))} rows differ"
    return InvarianceCheck("attention", not differing, detail)


def _decode_in_pieces(attend_from: Callable[[int, int], torch.Tensor], start: int, cut: int) -> torch.Tensor:
    begins = range(start, _CONTEXT, cut)
    return torch.cat([attend_from(begin, min(cut, _CONTEXT - begin)) for begin in begins])
