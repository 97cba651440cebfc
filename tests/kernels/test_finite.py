"""Rows that hold something that is not a number are found, wherever it stands."""

import pytest
import torch

from phloem.kernels.finite import finite_rows


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_with_nan_or_infinity_are_found(dtype: torch.dtype) -> None:
    x = torch.randn(6, 1000).to(dtype)
    x[1, 999], x[2, 0], x[3, 500] = torch.nan, torch.inf, -torch.inf
    x[4, 3], x[4, 700] = torch.inf, -torch.inf
    x[5] *= 1e30
    assert finite_rows(x).tolist() == [True, False, False, False, False, True]
