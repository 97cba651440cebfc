"""Drawing tokens for a batch of rows on the device that holds their logits.

Each row's draw is decided by a number in [0, 1) that comes with it, so that a caller who derives it from (seed, child,
position) gets the same token in any company. FlashInfer's own sampling kernels can't promise that, so they are not used:
(0.6.18) they take the seed of the whole batch from its first row and the random stream from a row's place in the batch.
"""

from dataclasses import dataclass

import torch

MIN_TEMPERATURE = 1e-6
"""Lower ones count as this: float32 would make them zero, and the draw is as good as greedy already."""


@dataclass(frozen=True, slots=True, eq=False)
class Draws:
    """How each row is drawn; all arrays `[num_rows]`, on the logits' device."""

    uniforms: torch.Tensor
    """float64 in [0, 1)."""
    temperatures: torch.Tensor
    """float32; 0 takes the likeliest token, the first of equals."""
    top_ks: torch.Tensor
    """int64: keep the k likeliest tokens; the vocabulary's size keeps all."""
    top_ps: torch.Tensor
    """float32: of those, the fewest likeliest that sum to this; 1 keeps all."""
    min_ps: torch.Tensor
    """float32: of those, the ones at least this share as likely as the likeliest; 0 keeps all."""


def draw_tokens(logits: torch.Tensor, draws: Draws) -> torch.Tensor:
    """Choose one token per row by inversion of its distribution, likeliest tokens first. O(rows * vocabulary log).

    Args:
        logits: float32 `[num_rows, vocab_size]`; -inf where a token is banned, finite somewhere in each row.
        draws: How.

    Returns:
        int64 `[num_rows]`.
    """
    ordered, ids = logits.sort(dim=-1, descending=True, stable=True)
    # the maximum goes to zero first, so that no temperature, however small, overflows
    scaled = (ordered - ordered[:, :1]) / draws.temperatures.clamp(min=MIN_TEMPERATURE).unsqueeze(1)
    places = torch.arange(logits.shape[1], device=logits.device)
    scaled.masked_fill_(places >= draws.top_ks.unsqueeze(1), -torch.inf)
    probabilities = scaled.softmax(dim=-1)
    before = probabilities.cumsum(dim=-1) - probabilities
    dropped = (before >= draws.top_ps.unsqueeze(1)) & (draws.top_ps < 1).unsqueeze(1)
    dropped |= probabilities < draws.min_ps.unsqueeze(1) * probabilities[:, :1]
    # the likeliest stays, also where top_p is 0
    dropped[:, 0] = False
    kept = probabilities.masked_fill(dropped, 0).double()
    cumulative = kept.cumsum(dim=-1)
    target = draws.uniforms.unsqueeze(1) * cumulative[:, -1:]
    # `right`: the first entry above the target, so that a token of probability 0 is never drawn
    place = torch.searchsorted(cumulative, target, right=True)
    last = (kept > 0).sum(dim=-1, keepdim=True) - 1
    place = torch.where(draws.temperatures.unsqueeze(1) > 0, torch.minimum(place, last), 0)
    return ids.gather(1, place).squeeze(1)
