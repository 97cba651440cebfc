"""Which tokens at the end of a text might be others, had the text gone on: what token healing leaves out.

Kept as plain lists by token id. A program asks right after the model has run, when a call of the tokenizer's library costs more than
all the rest.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection, Mapping, Sequence
from itertools import pairwise


class Joins:
    """A vocabulary's tokens in its own spelling, in which joined tokens are joined strings. Never changes, so threads may share it."""

    def __init__(
        self, vocabulary: Mapping[str, int], added: Mapping[str, int], *, apart: Collection[int]
    ) -> None:
        """Sort a vocabulary: some 0.1 s for 50,000 tokens.

        Args:
            vocabulary: The model's own tokens.
            added: Those that were added to it, which join with others at most as a beginning of one of its own.
            apart: Ids of tokens that join with nothing: special tokens, and those that stand for a byte.
        """
        own = {token: token_id for token, token_id in vocabulary.items() if token_id not in apart}
        self._spelled = [""] * (max([*vocabulary.values(), *added.values()], default=-1) + 1)
        for token, token_id in {**added, **own}.items():
            self._spelled[token_id] = "" if token_id in apart else token
        self._sorted = sorted(own)
        self._is_begin = bytearray(len(self._spelled))
        """By token id: whether a longer token begins with it."""

        for token, following in pairwise(self._sorted):
            self._is_begin[own[token]] = following.startswith(token)
        for token, token_id in added.items():
            self._is_begin[token_id] = token_id not in apart and self._begins_longer(token)
        self._pairs = frozenset(
            token[start : start + 2] for token in self._sorted for start in range(len(token) - 1)
        )
        """All two characters that stand side by side in a token: where two others meet, no longer token goes on."""

    def spelled(self, token_id: int) -> str:
        """Return how the vocabulary spells a token; empty where it joins with nothing."""
        return self._spelled[token_id] if token_id < len(self._spelled) else ""

    def count(self, token_ids: Sequence[int]) -> int:
        """See `Tokenizer.num_joinable`."""
        if not token_ids or not (joined := self.spelled(token_ids[-1])):
            return 0
        count = self._is_begin[token_ids[-1]]
        for number in range(2, len(token_ids) + 1):
            token = self.spelled(token_ids[-number])
            if not token or token[-1] + joined[0] not in self._pairs:
                break  # no token goes on over this seam, nor does one that begins before it
            joined = token + joined
            if self._begins_longer(joined):
                count = number
        return count

    def _begins_longer(self, joined: str) -> bool:
        following = bisect_right(self._sorted, joined)
        return following < len(self._sorted) and self._sorted[following].startswith(joined)
