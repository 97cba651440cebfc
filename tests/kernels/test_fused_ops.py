"""FlashInfer's fused operations, emulated, against torch's."""

import pytest
import torch
from attention_paths import error
from flashinfer_emulator import Emulation

from phloem.kernels.fused_ops import flashinfer_ops, torch_ops
from phloem.kernels.rope import RotaryEmbedding

CPU = torch.device("cpu")
TOLERANCE = {torch.float16: 1e-3, torch.bfloat16: 8e-3}
"""One rounding less than torch's."""


@pytest.fixture(params=[torch.float16, torch.bfloat16])
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    chosen: torch.dtype = request.param
    return chosen


def random(*shape: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("shape", [(5, 576), (5, 9, 64), (1, 64)])
def test_rms_norm(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x, weight = random(*shape, dtype=dtype), random(shape[-1], dtype=dtype, seed=1)
    ours, theirs = (
        ops.rms_norm(x, weight, 1e-5) for ops in (torch_ops(), flashinfer_ops(Emulation().library()))
    )
    assert theirs.dtype == dtype
    assert error([theirs], [ours]) < TOLERANCE[dtype]


def test_rms_norm_of_heads_inside_wider_rows(dtype: torch.dtype) -> None:
    """q and k are slices of one product."""
    heads, weight = random(5, 12, 64, dtype=dtype), random(64, dtype=dtype, seed=1)
    ops = flashinfer_ops(Emulation().library())
    assert torch.equal(ops.rms_norm(heads[:, :9], weight, 1e-5), ops.rms_norm(heads, weight, 1e-5)[:, :9])


@pytest.mark.parametrize("width", [576, 3])
def test_silu_and_mul(width: int, dtype: torch.dtype) -> None:
    """A width that FlashInfer can't read runs on torch."""
    gate_up = random(5, 2 * width, dtype=dtype)
    emulation = Emulation()
    ours, theirs = (ops.silu_and_mul(gate_up) for ops in (torch_ops(), flashinfer_ops(emulation.library())))
    assert error([theirs], [ours]) < TOLERANCE[dtype]


@pytest.mark.parametrize("factor", [1.0, 0.5])
def test_rope(factor: float, dtype: torch.dtype) -> None:
    rope = RotaryEmbedding(64, max_position=50, partial_rotary_factor=factor)
    qkv = random(4, 15, 64, dtype=dtype)
    q, k, positions = qkv[:, :9], qkv[:, 9:12], torch.tensor([0, 3, 3, 49])
    ours, theirs = (
        ops.make_rotate(rope, CPU)(q, k, positions)
        for ops in (torch_ops(), flashinfer_ops(Emulation().library()))
    )
    for given, wanted in zip(theirs, ours, strict=True):
        assert given.shape == wanted.shape
        assert error([given], [wanted]) < TOLERANCE[dtype]
