"""The compiled operations against torch's: the same values, and the same bits for a row in any company."""

import os
import platform
import shutil
from collections.abc import Callable

import pytest
import torch

from phloem.kernels.cpu import make_cpu_ops
from phloem.kernels.fused_ops import FusedOps, torch_ops
from phloem.kernels.native_build import BuildError
from phloem.kernels.rope import RotaryEmbedding

DTYPES = [torch.float32, torch.bfloat16]
TOLERANCE = {torch.float32: {"rtol": 2e-6, "atol": 2e-6}, torch.bfloat16: {"rtol": 2**-6, "atol": 1e-6}}
"""Of bfloat16: a step for each of two roundings, where another order of a sum falls to the other side."""
ARCHITECTURES = ["", "-march=x86-64", "-march=haswell"]


@pytest.fixture(params=ARCHITECTURES, ids=["this machine", "x86-64", "haswell"], scope="module")
def ops(request: pytest.FixtureRequest) -> FusedOps:
    environ = {**os.environ, "PHLOEM_CPU_KERNEL": "native"}
    if request.param:
        if platform.machine() != "x86_64" or shutil.which("g++") is None:
            pytest.skip("builds for older x86 machines")
        environ["CXX"] = f"g++ {request.param}"
    return make_cpu_ops(environ)


def assert_row_invariant(run: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> None:
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        whole = run(x)
        for num_threads in (1, 3):
            torch.set_num_threads(num_threads)
            for size in (1, 7, 33, x.shape[0]):
                assert torch.equal(torch.cat([run(part) for part in x.split(size)]), whole)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [576, 1000, 64, 37, 1])
def test_norms(ops: FusedOps, width: int, dtype: torch.dtype) -> None:
    hidden, delta = torch.randn(2, 150, width).to(dtype)
    weight = torch.randn(width).to(dtype)
    wanted_sum, wanted = torch_ops().add_norm(hidden, delta, weight, 1e-5)
    total, normed = ops.add_norm(hidden.clone(), delta, weight, 1e-5)
    assert torch.equal(total, wanted_sum)
    torch.testing.assert_close(normed, wanted, **TOLERANCE[dtype])
    assert torch.equal(ops.rms_norm(wanted_sum, weight, 1e-5), normed)
    assert_row_invariant(lambda x: ops.rms_norm(x, weight, 1e-5), hidden)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_norm_of_heads_reads_them_where_they_are(ops: FusedOps, dtype: torch.dtype) -> None:
    qkv, weight = torch.randn(9, 7, 64).to(dtype), torch.randn(64).to(dtype)
    q = qkv[:, 2:6]
    assert not q.is_contiguous()
    assert torch.equal(ops.rms_norm(q, weight, 1e-6), ops.rms_norm(q.contiguous(), weight, 1e-6))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "width"), [(1, 1536), (100, 1536), (3, 37), (0, 64), (2, 1)])
def test_silu_and_mul(ops: FusedOps, rows: int, width: int, dtype: torch.dtype) -> None:
    gate_up = torch.randn(rows, 2 * width).to(dtype) * 8
    torch.testing.assert_close(
        ops.silu_and_mul(gate_up), torch_ops().silu_and_mul(gate_up), **TOLERANCE[dtype]
    )
    if rows:
        assert_row_invariant(ops.silu_and_mul, gate_up)


def test_silu_of_extremes(ops: FusedOps) -> None:
    gate = torch.tensor([[-torch.inf, -1e30, -200.0, -0.0, 0.0, 200.0, 1e30, torch.inf, torch.nan, 1e-40]])
    out = ops.silu_and_mul(torch.cat((gate, torch.ones_like(gate)), dim=-1))
    assert out[0, 1:7].tolist() == [0.0, 0.0, 0.0, 0.0, 200.0, pytest.approx(1e30)]
    assert out[0, 7].item() == torch.inf
    assert out[0, 8].isnan()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("head_dim", "rotary_dim"), [(64, 64), (128, 128), (64, 32), (40, 40), (24, 12)])
def test_rotation(ops: FusedOps, head_dim: int, rotary_dim: int, dtype: torch.dtype) -> None:
    rope = RotaryEmbedding(head_dim, max_position=300, partial_rotary_factor=rotary_dim / head_dim)
    qkv = torch.randn(50, 8, head_dim).to(dtype)
    q, k = qkv[:, :5], qkv[:, 5:7]
    positions = torch.randint(0, 300, (50,))
    cpu = torch.device("cpu")
    rotate, slow = ops.make_rotate(rope, cpu), torch_ops().make_rotate(rope, cpu)
    for given, wanted in zip(rotate(q, k, positions), slow(q, k, positions), strict=True):
        assert given.is_contiguous()
        torch.testing.assert_close(given, wanted, **TOLERANCE[dtype])
    order = torch.randperm(50)
    assert torch.equal(rotate(q[order], k[order], positions[order])[0], rotate(q, k, positions)[0][order])


@pytest.mark.parametrize("position", [300, -1])
def test_a_position_beyond_the_table_is_refused(ops: FusedOps, position: int) -> None:
    rotate = ops.make_rotate(RotaryEmbedding(64, max_position=300), torch.device("cpu"))
    x = torch.zeros(2, 1, 64)
    with pytest.raises(IndexError, match="position"):
        rotate(x, x, torch.tensor([0, position]))


def test_bfloat16_rounds_to_nearest_even_and_keeps_nan(ops: FusedOps) -> None:
    """Through a product with 1: what torch's own rounding gives, for every kind of number."""
    bits = torch.arange(0, 2**32, 65_521, dtype=torch.int64).to(torch.int32)
    values = bits.view(torch.float32)
    values = values[: len(values) // 16 * 16].view(-1, 16)
    gate_up = torch.cat((torch.full_like(values, 1e9), values), dim=-1)
    exact = ops.silu_and_mul(gate_up)
    assert torch.equal(exact.isnan(), values.isnan())
    ones = torch.ones(values.shape[0], 16, dtype=torch.bfloat16)
    up = values.bfloat16()
    out = ops.silu_and_mul(torch.cat((ones, up), dim=-1))
    wanted = torch_ops().silu_and_mul(torch.cat((ones, up), dim=-1))
    finite = ~wanted.isnan()
    assert torch.equal(out.isnan(), wanted.isnan())
    torch.testing.assert_close(out[finite], wanted[finite], rtol=2**-7, atol=1e-37)


def test_what_there_is_no_code_for_runs_on_torch(ops: FusedOps) -> None:
    x, weight = torch.randn(4, 64).half(), torch.ones(64).half()
    assert torch.equal(ops.rms_norm(x, weight, 1e-5), torch_ops().rms_norm(x, weight, 1e-5))
    gate_up = torch.randn(4, 64).half()
    assert torch.equal(ops.silu_and_mul(gate_up), torch_ops().silu_and_mul(gate_up))


def test_without_a_compiler_torch_serves() -> None:
    broken = {**os.environ, "CXX": "/no/such/compiler", "PHLOEM_CPU_KERNEL": ""}
    assert make_cpu_ops(broken).rms_norm is torch_ops().rms_norm
    assert make_cpu_ops({"PHLOEM_CPU_KERNEL": "torch"}).rms_norm is torch_ops().rms_norm
    with pytest.raises(BuildError, match="CXX"):
        make_cpu_ops({**broken, "PHLOEM_CPU_KERNEL": "native"})
