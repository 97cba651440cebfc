"""The compiled linear layers: right, and a row has the same bits in any company, at any place, on any thread."""

import os
from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from emulated_amx import with_emulated_amx

from phloem.kernels.cpu import make_cpu_linear, make_cpu_ops
from phloem.kernels.cpu_linear import Format, LinearKernel, pack, quantize
from phloem.kernels.fused_ops import torch_ops
from phloem.kernels.gated_linear import GatedLinear
from phloem.kernels.linear import PackedLinear, has_amx
from phloem.kernels.native_build import BuildError

ROWS = [1, 3, 15, 16, 17, 31, 33, 64, 65, 200, 513]
SHAPES = [(576, 576), (576, 1536), (960, 96), (33, 64), (100, 1536), (1, 32), (17, 34)]
PANEL_SHAPE = (40, 13_824)
"""So wide that 32 rows are a panel: the number of panels and of rows in the last one varies with ROWS."""


EMULATED_TILES = "bfloat16 in emulated tiles"
ARITHMETICS = [
    "float32",
    "bfloat16 in lanes",
    "bfloat16 in tiles",
    pytest.param(EMULATED_TILES, marks=pytest.mark.slow),
]


@pytest.fixture
def arithmetic(request: pytest.FixtureRequest) -> str:
    chosen: str = getattr(request, "param", "")
    return chosen


@pytest.fixture
def kernel(arithmetic: str) -> LinearKernel:
    environ = {**os.environ, "PHLOEM_CPU_KERNEL": ""}
    found = make_cpu_linear(with_emulated_amx(environ) if arithmetic == EMULATED_TILES else environ)
    if found is None:
        pytest.skip("no compiler")
    return found


@pytest.fixture
def dtype(arithmetic: str, kernel: LinearKernel) -> torch.dtype:
    """Of weights and inputs; the kernel is told whether to pack them for tiles."""
    if arithmetic == "bfloat16 in tiles" and not kernel.has_tiles:
        pytest.skip("no AMX, or no compiler that knows it")
    kernel.has_tiles = "tiles" in arithmetic
    return torch.float32 if arithmetic == "float32" else torch.bfloat16


each_arithmetic = pytest.mark.parametrize("arithmetic", ARITHMETICS, indirect=True)


@pytest.fixture
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def draw(*shape: int, dtype: torch.dtype = torch.bfloat16, seed: int = 1) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def test_a_machine_with_amx_packs_tiles(kernel: LinearKernel) -> None:
    if not has_amx():
        pytest.skip("no AMX")
    assert kernel.layer(draw(64, 64)).format is Format.BF16_TILES


def test_the_type_and_the_width_decide_the_format(kernel: LinearKernel) -> None:
    assert kernel.layer(draw(8, 3, dtype=torch.float32)).format is Format.FLOAT_LANES
    assert kernel.layer(draw(8, 34)).format is Format.BF16_LANES
    kernel.has_tiles = False
    assert kernel.layer(draw(64, 64)).format is Format.BF16_LANES
    kernel.int8 = True
    assert kernel.layer(draw(64, 64)).format is Format.INT8_LANES
    assert not kernel.fits(draw(64, 34))


def test_the_environment_switches_it_off() -> None:
    assert make_cpu_linear({**os.environ, "PHLOEM_CPU_KERNEL": "torch"}) is None


def test_without_a_compiler_there_is_none_unless_it_is_insisted_on() -> None:
    broken = {**os.environ, "CXX": "/no/such/compiler", "PHLOEM_CPU_KERNEL": ""}
    assert make_cpu_linear(broken) is None
    with pytest.raises(BuildError, match="CXX"):
        make_cpu_linear({**broken, "PHLOEM_CPU_KERNEL": "native"})


@each_arithmetic
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("shape", [*SHAPES, PANEL_SHAPE])
def test_result_is_that_of_a_linear_layer(
    kernel: LinearKernel, dtype: torch.dtype, shape: tuple[int, int], has_bias: bool
) -> None:
    weight, bias = draw(*shape, dtype=dtype), draw(shape[0], dtype=dtype, seed=2) * 8 if has_bias else None
    linear = PackedLinear(weight, bias, kernel=kernel)
    assert linear.compiled is not None
    for num_rows in ROWS:
        x = draw(num_rows, shape[1], dtype=dtype, seed=num_rows)
        wanted = F.linear(x.double(), weight.double(), None if bias is None else bias.double())
        exact, rounded = linear.in_float32(x), linear(x)
        assert exact.dtype == torch.float32
        assert float((exact - wanted).norm() / wanted.norm()) < 1e-5
        assert torch.equal(rounded, exact.to(dtype))


@each_arithmetic
@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("shape", [*SHAPES, PANEL_SHAPE])
def test_company_place_and_threads_change_no_bit(
    kernel: LinearKernel, dtype: torch.dtype, shape: tuple[int, int]
) -> None:
    linear = PackedLinear(draw(*shape, dtype=dtype), draw(shape[0], dtype=dtype, seed=2), kernel=kernel)
    x = draw(600, shape[1], dtype=dtype, seed=3)
    torch.set_num_threads(1)
    whole = linear.in_float32(x)
    order = torch.randperm(600, generator=torch.Generator().manual_seed(4))
    for num_threads in (1, 2, 3):
        torch.set_num_threads(num_threads)
        assert torch.equal(linear.in_float32(x[order]), whole[order])
        for num_rows in ROWS:
            assert torch.equal(linear.in_float32(x[7 : 7 + num_rows]), whole[7 : 7 + num_rows])


@each_arithmetic
def test_a_row_of_no_number_leaves_the_others_alone(kernel: LinearKernel, dtype: torch.dtype) -> None:
    linear, x = PackedLinear(draw(64, 64, dtype=dtype), kernel=kernel), draw(40, 64, dtype=dtype)
    whole = linear(x)
    x[5], x[30] = torch.nan, torch.inf
    kept = [row for row in range(40) if row not in (5, 30)]
    out = linear(x)
    assert torch.equal(out[kept], whole[kept])
    assert out[5].isnan().all()


@each_arithmetic
@pytest.mark.parametrize("num_rows", [1, 20, 50])
def test_rows_are_read_where_they_lie(kernel: LinearKernel, dtype: torch.dtype, num_rows: int) -> None:
    linear, wide = PackedLinear(draw(48, 64, dtype=dtype), kernel=kernel), draw(num_rows, 300, dtype=dtype)
    for x in (wide[:, 100:164], wide[:, ::2][:, :64], wide[:1, :64].expand(num_rows, 64)):
        assert torch.equal(linear(x), linear(x.contiguous()))


@each_arithmetic
def test_no_rows_give_no_rows(kernel: LinearKernel, dtype: torch.dtype) -> None:
    linear, x = PackedLinear(draw(48, 64, dtype=dtype), kernel=kernel), draw(0, 64, dtype=dtype)
    assert linear(x).shape == linear.in_float32(x).shape == (0, 48)


def test_weights_in_bf16_take_float32_rows_too(kernel: LinearKernel) -> None:
    kernel.has_tiles = False
    weight, x = draw(48, 64), draw(20, 64, dtype=torch.float32)
    wanted = F.linear(x.double(), weight.double())
    given = kernel.layer(weight)(x)
    assert given.dtype == torch.float32
    assert float((given - wanted).norm() / wanted.norm()) < 3e-6


@each_arithmetic
@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("shape", [(576, 576), (33, 64), (100, 1536), (17, 36), PANEL_SHAPE])
def test_int8_gives_the_product_with_the_rounded_weight(
    kernel: LinearKernel, dtype: torch.dtype, shape: tuple[int, int]
) -> None:
    kernel.int8 = True
    weight, bias = draw(*shape, dtype=dtype), draw(shape[0], dtype=dtype, seed=2)
    steps, scale = quantize(weight)
    linear = PackedLinear(weight, bias, kernel=kernel)
    x = draw(200, shape[1], dtype=dtype, seed=3)
    wanted = F.linear(x.double(), steps.double() * scale.double()[:, None], bias.double())
    whole = linear.in_float32(x)
    assert float((whole - wanted).norm() / wanted.norm()) < 1e-5
    for num_threads in (1, 2, 3):
        torch.set_num_threads(num_threads)
        for num_rows in (1, 15, 40):
            assert torch.equal(linear.in_float32(x[7 : 7 + num_rows]), whole[7 : 7 + num_rows])


def test_int8_is_within_half_a_step_of_the_weight() -> None:
    weight = draw(40, 64, dtype=torch.float32)
    weight[3], weight[4, 5] = 0, 1000
    steps, scale = quantize(weight)
    assert steps.dtype == torch.int8
    assert steps.abs().amax() == 127
    error = (steps * scale[:, None] - weight).abs()
    assert (error <= scale[:, None] * 0.501).all()
    assert (error[3] == 0).all()


def test_a_weight_of_no_number_stays_one_in_int8(kernel: LinearKernel) -> None:
    kernel.int8 = True
    weight = draw(40, 64, dtype=torch.float32)
    weight[3, 2] = torch.nan
    weight[5, 2] = torch.inf
    out = PackedLinear(weight, kernel=kernel)(torch.ones(2, 64))
    assert not out[:, [3, 5]].isfinite().any()
    assert out[:, [0, 1, 2, 4, 6]].isfinite().all()


def test_calls_between_those_of_other_libraries(kernel: LinearKernel) -> None:
    """Both set the processor's tile registers, and neither may rely on finding its own setting."""
    weight, x = draw(576, 576), draw(40, 576)
    ours, theirs = PackedLinear(weight, kernel=kernel), PackedLinear(weight)
    alone = ours(x), theirs(x)
    for _ in range(5):
        assert torch.equal(ours(x), alone[0])
        assert torch.equal(theirs(x), alone[1])


def test_what_it_has_no_code_for_runs_as_before(kernel: LinearKernel) -> None:
    for weight in (draw(16, 41), draw(16, 64).half(), draw(16, 64).double()):
        linear = PackedLinear(weight, kernel=kernel)
        assert linear.compiled is None
        x = torch.ones(3, weight.shape[1], dtype=weight.dtype)
        assert torch.equal(linear.in_float32(x), linear(x).float())


@pytest.mark.parametrize("x", [draw(2, 64).half(), draw(2, 96), draw(64)], ids=["type", "width", "shape"])
def test_an_input_that_does_not_fit_is_refused(kernel: LinearKernel, x: torch.Tensor) -> None:
    with pytest.raises(ValueError, match=r"it must be (float32 or )?bfloat16 \[num_rows, 64\]"):
        PackedLinear(draw(16, 64), kernel=kernel)(x)


def test_a_weight_packed_for_lanes_is_stripes_of_words() -> None:
    weight = torch.arange(40 * 64).view(40, 64).short()
    packed = pack(weight, Format.BF16_LANES)
    assert packed.shape == (2, 32, 32, 2)
    assert packed[1, 3, 5, 1] == weight[32 + 5, 2 * 3 + 1]
    assert packed[1, :, 8:].sum() == 0, "outputs 40 to 63 are padding"


def test_a_weight_packed_for_tiles_is_stripes_of_steps_of_two() -> None:
    weight = torch.arange(40 * 64).view(40, 64)
    packed = pack(weight, Format.BF16_TILES)
    assert packed.shape == (2, 2, 2, 16, 16, 2)
    assert packed[0, 1, 1, 3, 5, 1] == weight[16 + 5, 32 + 2 * 3 + 1]
    assert packed[1].flatten(0, 1)[1].sum() == 0, "outputs 48 to 63 are padding"


@each_arithmetic
@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("shape", [(3072, 576), (2 * 50, 64), (2 * 7, 32)])
def test_a_gated_product_is_the_product_and_then_the_activation(
    kernel: LinearKernel, dtype: torch.dtype, shape: tuple[int, int], has_bias: bool
) -> None:
    weight, bias = draw(*shape, dtype=dtype), draw(shape[0], dtype=dtype, seed=2) if has_bias else None
    linear, silu_and_mul = PackedLinear(weight, bias, kernel=kernel), make_cpu_ops().silu_and_mul
    fused = GatedLinear(weight, bias, silu_and_mul=silu_and_mul, kernel=kernel)
    x = draw(200, shape[1], dtype=dtype, seed=3)
    wanted = silu_and_mul(linear(x))
    for num_threads in (1, 2):
        torch.set_num_threads(num_threads)
        for num_rows in (0, 1, 16, 17, 33, 200):
            assert torch.equal(fused(x[:num_rows]), wanted[:num_rows])


def test_without_a_kernel_the_activation_is_an_operation_of_its_own() -> None:
    weight, x = draw(64, 40), draw(5, 40)
    silu_and_mul = torch_ops().silu_and_mul
    assert torch.equal(
        GatedLinear(weight, silu_and_mul=silu_and_mul)(x), silu_and_mul(PackedLinear(weight)(x))
    )
    with pytest.raises(ValueError, match="as many gates as gated outputs"):
        GatedLinear(draw(3, 32), silu_and_mul=silu_and_mul)
