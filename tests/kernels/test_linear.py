"""PackedLinear: right, and a row has the same bits in any company."""

import pytest
import torch
import torch.nn.functional as F

from phloem.kernels import linear as linear_module
from phloem.kernels.linear import PackedLinear, RowLadder, rows_agree

SHAPES = [(576, 576), (576, 1536), (100, 72), (8, 40)]
DTYPES = [torch.float32, torch.bfloat16]


def make(
    shape: tuple[int, int], dtype: torch.dtype, *, bias: bool = False, **options: object
) -> PackedLinear:
    generator = torch.Generator().manual_seed(1)
    weight = torch.randn(shape, generator=generator).to(dtype)
    return PackedLinear(
        weight, torch.randn(shape[0], generator=generator).to(dtype) if bias else None, **options
    )  # type: ignore[arg-type]


def in_chunks(linear: PackedLinear, x: torch.Tensor, sizes: list[int]) -> torch.Tensor:
    return torch.cat([linear(part) for part in x.split(sizes)])


def random_cut(total: int, generator: torch.Generator) -> list[int]:
    sizes: list[int] = []
    while sum(sizes) < total:
        size = int(torch.randint(1, 70, (), generator=generator))
        sizes.append(min(size, total - sum(sizes)))
    return sizes


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_result_is_that_of_a_linear_layer(shape: tuple[int, int], dtype: torch.dtype, bias: bool) -> None:
    generator = torch.Generator().manual_seed(1)
    weight = torch.randn(shape, generator=generator).to(dtype)
    offset = torch.randn(shape[0], generator=generator).to(dtype) if bias else None
    linear = PackedLinear(weight, offset)
    for rows in (0, 1, 3, 16, 17, 100, 300):
        x = torch.randn(rows, shape[1]).to(dtype)
        out = linear(x)
        assert out.shape == (rows, shape[0])
        assert out.dtype == dtype
        wanted = F.linear(x.double(), weight.double(), None if offset is None else offset.double())
        if rows:
            tolerance = 1e-5 if dtype == torch.float32 else 1e-2
            assert float((out.double() - wanted).norm() / wanted.norm()) < tolerance


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_chunks_company_and_place_change_no_bit(shape: tuple[int, int], dtype: torch.dtype) -> None:
    linear = make(shape, dtype)
    generator = torch.Generator().manual_seed(2)
    x = torch.randn((350, shape[1]), generator=generator).to(dtype)
    whole = linear(x)
    for sizes in ([1] * 350, [7] * 50, [16] * 21 + [14], [33] * 10 + [20], random_cut(350, generator)):
        assert torch.equal(in_chunks(linear, x, sizes), whole)
    order = torch.randperm(350, generator=generator)
    assert torch.equal(linear(x[order]), whole[order])


@pytest.mark.parametrize("dtype", DTYPES)
def test_threads_change_no_bit(dtype: torch.dtype) -> None:
    before = torch.get_num_threads()
    linear = make((576, 1536), dtype)
    x = torch.randn((90, 1536)).to(dtype)
    try:
        outs = []
        for num_threads in (1, 2):
            torch.set_num_threads(num_threads)
            outs += [linear(x), in_chunks(linear, x, [1] * 20 + [70])]
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(out, outs[0]) for out in outs)


def test_a_ladder_only_uses_row_counts_that_agree_with_the_base() -> None:
    ladder = RowLadder(base=16)
    linear = make((576, 1536), torch.float32, ladder=ladder)
    agreeing = ladder.agreeing(linear)
    assert 16 in agreeing
    for rows in range(1, 400, 7):
        pieces = ladder.cut(rows, linear)
        assert set(pieces) <= set(agreeing)
        assert sum(pieces) >= rows > sum(pieces[:-1])


def test_a_row_count_that_differs_is_found_out() -> None:
    """A product whose sums depend on the number of rows, as a library's blocking does."""
    linear = make((64, 256), torch.float32)
    weight = torch.randn(64, 256)

    def product(x: torch.Tensor) -> torch.Tensor:
        terms = x.unsqueeze(1) * weight
        if x.shape[0] in (1, 64):
            return terms[..., :100].sum(-1) + terms[..., 100:].sum(-1)
        return terms.sum(-1)

    linear._product = product
    assert not rows_agree(linear, 1, 16)
    assert not rows_agree(linear, 64, 16)
    assert rows_agree(linear, 32, 16)


def test_layers_of_one_shape_share_the_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    tests: list[int] = []
    real = linear_module.rows_agree

    def counted(linear: PackedLinear, num_rows: int, base: int) -> bool:
        tests.append(num_rows)
        return real(linear, num_rows, base)

    monkeypatch.setattr(linear_module, "rows_agree", counted)
    ladder = RowLadder()
    for _ in range(3):
        make((64, 64), torch.float32, ladder=ladder)(torch.zeros(1, 64))
    assert len(tests) == len(set(tests)) > 0


def test_without_the_private_product_plain_linear_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear_module, "_packed_product", lambda weight, bias: None)
    linear = make((100, 72), torch.float32)
    assert not linear.is_packed
    x = torch.randn(50, 72)
    whole = linear(x)
    assert torch.equal(in_chunks(linear, x, [1] * 10 + [40]), whole)


def test_half_precision_runs_unpacked() -> None:
    linear = make((32, 64), torch.float16)
    assert not linear.is_packed
    assert linear(torch.ones(3, 64, dtype=torch.float16)).shape == (3, 32)


def test_without_determinism_a_call_is_one_call() -> None:
    linear = make((100, 72), torch.float32, deterministic=False)
    x = torch.randn(50, 72)
    assert torch.equal(linear(x), linear.product(x))


def test_shapes_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match=r"must be \[out_features, in_features\]"):
        PackedLinear(torch.zeros(3))
    with pytest.raises(ValueError, match="bias has shape"):
        PackedLinear(torch.zeros(3, 4), torch.zeros(4))
    with pytest.raises(ValueError, match="power of two"):
        RowLadder(base=12)
