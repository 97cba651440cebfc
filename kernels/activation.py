"""Gated activation, with the same bits for a row in any company.

torch's vectorised SiLU and the scalar one that finishes a range differ in the last bit, and a parallel loop cuts its
ranges wherever the number of elements says. So a value could change with the number of rows or threads. Two rules
keep every element in the vector body: the width is a multiple of `_VECTOR` elements (padded if it is not), and a call
has fewer elements than torch's parallel grain, so that it is never cut.
"""

import torch
import torch.nn.functional as F

_VECTOR = 64
"""Elements of two of the widest vectors (AVX-512, 16-bit): the step of torch's vector loop."""
_GRAIN = 32768
"""at::internal::GRAIN_SIZE: an elementwise call with fewer elements runs as one range, in the calling thread."""


def silu_and_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """SiLU of the first half of each row times the second half.

    Args:
        gate_up: `[num_tokens, 2 * width]`, gate before up.

    Returns:
        `[num_tokens, width]`, same dtype. SiLU is computed in float32 and rounded before the product, as
        transformers does.

    Raises:
        ValueError: an odd number of columns.
    """
    columns = gate_up.shape[1]
    if columns % 2:
        raise ValueError(f"gate_up has {columns} columns; gate and up must have the same width")
    gate, up = gate_up.chunk(2, dim=-1)
    return _silu(gate) * up


def _silu(x: torch.Tensor) -> torch.Tensor:
    """SiLU of `[num_tokens, width]` in calls that torch runs wholly in its vector body."""
    num_tokens, width = x.shape
    padding = -width % _VECTOR
    if padding:
        return _silu(F.pad(x, (0, padding)))[:, :width]
    if x.numel() < _GRAIN:
        return F.silu(x)
    out = torch.empty((num_tokens, width), dtype=x.dtype, device=x.device)
    num_columns = min(width, _GRAIN - _VECTOR)
    num_rows = max(1, (_GRAIN - 1) // num_columns)
    for row in range(0, num_tokens, num_rows):
        for column in range(0, width, num_columns):
            piece = (slice(row, row + num_rows), slice(column, column + num_columns))
            torch.ops.aten.silu.out(x[piece], out=out[piece])
    return out
