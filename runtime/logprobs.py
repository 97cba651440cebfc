"""Log-probabilities of tokens, from the model's own logits."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from phloem.runtime.outputs import TokenLogprob


def score_known(logits: Tensor, token_ids: Sequence[int], *, num_top: Sequence[int]) -> list[TokenLogprob]:
    """Return how likely each known token was.

    Args:
        logits: `[num_tokens, vocab_size]`, float32: those before each token.
        token_ids: The tokens that came.
        num_top: How many of the likeliest tokens to report beside each, row by row.
    """
    logprobs = logits.log_softmax(dim=-1)
    chosen = logprobs.gather(1, torch.tensor(token_ids, device=logits.device)[:, None])[:, 0].tolist()
    tops = [_top(row, count) for row, count in zip(logprobs, num_top, strict=True)]
    return [TokenLogprob(*entry) for entry in zip(token_ids, chosen, tops, strict=True)]


def _top(logprobs: Tensor, count: int) -> tuple[tuple[int, float], ...]:
    if count == 0:
        return ()
    values, ids = logprobs.topk(min(count, len(logprobs)))
    return tuple(zip(ids.tolist(), values.tolist(), strict=True))
