"""Norm, activation and rotary embedding: transformers' values, and the same bits for a row in any company."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaRMSNorm, LlamaRotaryEmbedding, apply_rotary_pos_emb

from phloem.kernels.activation import silu_and_mul
from phloem.kernels.norm import rms_norm
from phloem.kernels.rope import RopeScaling, RotaryEmbedding, attention_factor, inverse_frequencies

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def assert_row_invariant(run: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> None:
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        whole = run(x)
        for num_threads in (1, 2, 3):
            torch.set_num_threads(num_threads)
            assert torch.equal(run(x), whole)
            for size in (1, 2, 7, 33):
                assert torch.equal(torch.cat([run(part) for part in x.split(size)]), whole)
            order = torch.randperm(x.shape[0])
            assert torch.equal(run(x[order]), whole[order])
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [576, 1000, 37])
def test_rms_norm_is_row_invariant(width: int, dtype: torch.dtype) -> None:
    weight = torch.randn(width).to(dtype)
    assert_row_invariant(lambda x: rms_norm(x, weight, 1e-5), torch.randn(150, width).to(dtype))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [576, 37])
def test_rms_norm_has_the_bits_of_transformers(width: int, dtype: torch.dtype) -> None:
    norm = LlamaRMSNorm(width, eps=1e-5).to(dtype)
    norm.weight.data.normal_()
    x = torch.randn(20, width).to(dtype)
    assert torch.equal(rms_norm(x, norm.weight.data, 1e-5), norm(x).detach())


def test_rms_norm_takes_heads_too() -> None:
    x, weight = torch.randn(5, 3, 64), torch.randn(64)
    assert torch.equal(rms_norm(x, weight, 1e-6)[:, 1], rms_norm(x[:, 1], weight, 1e-6))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [1536, 1, 37, 1000, 11008, 33000])
def test_silu_and_mul_is_row_invariant(width: int, dtype: torch.dtype) -> None:
    assert_row_invariant(silu_and_mul, torch.randn(70, 2 * width).to(dtype) * 4)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "width"), [(1, 1536), (100, 1536), (3, 37), (0, 64), (2, 70000)])
def test_silu_and_mul_is_silu_times_up(rows: int, width: int, dtype: torch.dtype) -> None:
    gate, up = torch.randn(2, rows, width).to(dtype)
    out = silu_and_mul(torch.cat((gate, up), dim=-1))
    assert out.dtype == dtype
    torch.testing.assert_close(out, F.silu(gate) * up)


def test_silu_and_mul_refuses_an_odd_width() -> None:
    with pytest.raises(ValueError, match="5 columns"):
        silu_and_mul(torch.zeros(2, 5))


SCALINGS = {
    "default": RopeScaling(),
    "linear": RopeScaling("linear", factor=4.0),
    "dynamic": RopeScaling("dynamic", factor=2.0, original_max_position=512),
    "yarn": RopeScaling("yarn", factor=4.0, original_max_position=512),
    "yarn, own factors": RopeScaling(
        "yarn",
        factor=8.0,
        original_max_position=256,
        beta_fast=16.0,
        beta_slow=2.0,
        attention_factor=1.25,
        truncate=False,
    ),
    "yarn, mscales": RopeScaling(
        "yarn", factor=40.0, original_max_position=256, mscale=0.8, mscale_all_dim=1.2
    ),
    "llama3": RopeScaling(
        "llama3", factor=8.0, original_max_position=512, low_freq_factor=1.0, high_freq_factor=4.0
    ),
}
MAX_POSITION = 2048


def hf_config(scaling: RopeScaling, theta: float, partial: float) -> LlamaConfig:
    parameters = {"rope_type": scaling.kind, "rope_theta": theta, "partial_rotary_factor": partial}
    if scaling.kind != "default":
        parameters["factor"] = scaling.factor
    if scaling.kind == "llama3":
        parameters["low_freq_factor"] = scaling.low_freq_factor
        parameters["high_freq_factor"] = scaling.high_freq_factor
    if scaling.kind == "yarn":
        for name in ("beta_fast", "beta_slow", "attention_factor", "mscale", "mscale_all_dim", "truncate"):
            if getattr(scaling, name) is not None:
                parameters[name] = getattr(scaling, name)
    if scaling.kind in ("yarn", "llama3"):
        parameters["original_max_position_embeddings"] = scaling.original_max_position
    trained = scaling.original_max_position if scaling.kind == "dynamic" else MAX_POSITION
    return LlamaConfig(
        hidden_size=256, num_attention_heads=4, max_position_embeddings=trained, rope_parameters=parameters
    )


@pytest.mark.parametrize("partial", [1.0, 0.5])
@pytest.mark.parametrize("theta", [10000.0, 500000.0])
@pytest.mark.parametrize("name", [name for name in SCALINGS if name != "default"])
def test_frequencies_are_those_of_transformers(name: str, theta: float, partial: float) -> None:
    scaling = SCALINGS[name]
    config = hf_config(scaling, theta, partial)
    wanted, factor = ROPE_INIT_FUNCTIONS[scaling.kind](config, device="cpu", seq_len=MAX_POSITION)
    given = inverse_frequencies(int(64 * partial), theta=theta, scaling=scaling, max_position=MAX_POSITION)
    torch.testing.assert_close(given, wanted, rtol=1e-6, atol=0)
    assert attention_factor(scaling) == pytest.approx(factor, rel=1e-6)


@pytest.mark.parametrize("name", ["default", "linear", "llama3", "yarn"])
def test_rotation_is_that_of_transformers(name: str) -> None:
    rope = RotaryEmbedding(64, max_position=MAX_POSITION, theta=10000.0, scaling=SCALINGS[name])
    positions = torch.randint(0, MAX_POSITION, (50,))
    q, k = torch.randn(50, 4, 64), torch.randn(50, 2, 64)
    hf = LlamaRotaryEmbedding(hf_config(SCALINGS[name], 10000.0, 1.0))
    cos, sin = hf(q, positions[None])
    wanted_q, wanted_k = apply_rotary_pos_emb(q.transpose(0, 1)[None], k.transpose(0, 1)[None], cos, sin)
    given_q, given_k = rope(q, k, positions)
    torch.testing.assert_close(given_q, wanted_q[0].transpose(0, 1), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(given_k, wanted_k[0].transpose(0, 1), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("partial", [1.0, 0.5])
def test_rotation_is_row_invariant_and_keeps_the_dtype(partial: float, dtype: torch.dtype) -> None:
    rope = RotaryEmbedding(40, max_position=300, partial_rotary_factor=partial)
    q, k = torch.randn(150, 5, 40).to(dtype), torch.randn(150, 1, 40).to(dtype)

    def run(index: torch.Tensor) -> torch.Tensor:
        rotated_q, rotated_k = rope(q[index], k[index], index)
        assert rotated_q.dtype == rotated_k.dtype == dtype
        return torch.cat((rotated_q, rotated_k), dim=1)

    assert_row_invariant(run, torch.arange(150))


def test_dims_beyond_the_rotary_part_pass_unchanged() -> None:
    rope = RotaryEmbedding(64, max_position=10, partial_rotary_factor=0.25)
    q, k = torch.randn(2, 3, 4, 64)
    rotated, _ = rope(q, k, torch.tensor([1, 5, 9]))
    assert torch.equal(rotated[..., 16:], q[..., 16:])
    assert not torch.equal(rotated[..., :16], q[..., :16])


def test_a_position_beyond_the_table_is_refused() -> None:
    rope = RotaryEmbedding(64, max_position=10)
    with pytest.raises(IndexError):
        rope(torch.zeros(1, 1, 64), torch.zeros(1, 1, 64), torch.tensor([10]))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kind": "longrope"}, "unknown rope scaling 'longrope'"),
        ({"kind": "linear", "factor": 0.0}, "must be positive"),
        ({"kind": "yarn", "factor": 2.0}, "needs original_max_position"),
    ],
)
def test_a_scaling_that_no_formula_covers_is_refused(options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        RopeScaling(**options)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("head_dim", "options"), [(63, {}), (64, {"partial_rotary_factor": 1.5}), (64, {"max_position": 0})]
)
def test_a_table_that_cannot_be_is_refused(head_dim: int, options: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=r"rotary size|max_position"):
        RotaryEmbedding(head_dim, **{"max_position": 10, **options})  # type: ignore[arg-type]
