"""Prompts of plain words, each a token of its own, so that the text and the tokens of a prompt are the same thing."""

from __future__ import annotations

import random
import re

from phloem.runtime.tokenizer import Tokenizer

_WORD = re.compile(r" [a-z]{3,}")


class Words:
    """Draws words of a tokenizer's vocabulary; without a seed's repetition, two draws share no prefix, in all likelihood."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        plain = [token for token in range(tokenizer.vocab_size) if token not in tokenizer.special_ids]
        words = [token for token in plain if _WORD.fullmatch(tokenizer.decode([token]))]
        # A tokenizer of bytes has no words; a prompt is then tokens that are no text.
        self._ids = words or plain

    def draw(self, rng: random.Random, count: int) -> list[int]:
        """Return so many token ids."""
        return rng.choices(self._ids, k=count)
