"""Log-probabilities of tokens, from the model's own logits."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from phloem.runtime.outputs import TokenLogprob


def score_known(
    logits: Tensor, token_ids: Sequence[int], *, num_top: Sequence[int], rows: Sequence[int] | None = None
) -> list[TokenLogprob]:
    """Return how likely each known token was.

    Args:
        logits: `[num_rows, vocab_size]`, float32: those before the tokens.
        token_ids: The tokens that came.
        num_top: How many of the likeliest tokens to report beside each.
        rows: After which row each token came. None: after one of its own.
    """
    rows = range(len(token_ids)) if rows is None else rows
    logprobs = logits.log_softmax(dim=-1)
    places = torch.tensor([[*rows], [*token_ids]], device=logits.device)
    chosen = logprobs[places[0], places[1]].tolist()
    tops = [_top(logprobs[row], count) for row, count in zip(rows, num_top, strict=True)]
    return [TokenLogprob(*entry) for entry in zip(token_ids, chosen, tops, strict=True)]


def _top(logprobs: Tensor, count: int) -> tuple[tuple[int, float], ...]:
    if count == 0:
        return ()
    values, ids = logprobs.topk(min(count, len(logprobs)))
    return tuple(zip(ids.tolist(), values.tolist(), strict=True))
