"""Log-probabilities in SGLang's form: `[log-probability or null, token id, text or null]`, token by token.

SGLang's `select` scores the prompt with each choice behind it, from a token before the prompt's last one, and drops the first entry
if the prompt ends with its text. So a token's text must be what it adds to the text: where characters consist of several tokens, the
whole character stands with the last of them. After a text of one or two tokens it asks from the first token on, which has no
log-probability; two of its three methods fail on that.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import Any, TypeAlias

from phloem.runtime.outputs import TokenLogprob
from phloem.runtime.server.openai_logprobs import LEAST
from phloem.runtime.server.token_texts import TokenTexts
from phloem.runtime.tokenizer import Tokenizer

MAX_CHARACTER = 4
"""Bytes of the longest character in UTF-8, and so the most tokens that it has."""

Entry: TypeAlias = "list[float | int | str | None]"


class TokenLog:
    """The entries of a path's tokens, in order."""

    def __init__(
        self, tokenizer: Tokenizer, texts: TokenTexts, *, before: Sequence[int], with_text: bool
    ) -> None:
        """Begin behind the tokens `before`."""
        self.entries: list[Entry] = []
        self.tops: list[list[Entry] | None] = []
        """The likeliest tokens at each place; None where nothing comes before it."""

        self._tokenizer = tokenizer
        self._texts = texts
        self._with_text = with_text
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._begun: list[int] = []  # the tokens of a character whose last one is still to come
        for token_id in before[1 - MAX_CHARACTER :]:
            self._pass(token_id)

    def add_first(self, token_id: int) -> None:
        """Add a path's first token, before which there is nothing to tell how likely it was."""
        self.entries.append([None, token_id, self._text(token_id)])
        self.tops.append(None)

    def add(self, found: Sequence[TokenLogprob]) -> None:
        """Add the next tokens."""
        for each in found:
            self.entries.append([max(each.logprob, LEAST), each.token_id, self._text(each.token_id)])
            self.tops.append([self._alternative(token_id, logprob) for token_id, logprob in each.top])

    @property
    def mean(self) -> float | None:
        """The mean log-probability of the tokens that have one."""
        known = [entry[0] for entry in self.entries if isinstance(entry[0], float)]
        return sum(known) / len(known) if known else None

    def to_dict(self, kind: str, *, with_tops: bool) -> dict[str, Any]:
        """Return the lists as answers name them, for a `kind` of `input` or `output`."""
        found: dict[str, Any] = {f"{kind}_token_logprobs": self.entries}
        return found | {f"{kind}_top_logprobs": self.tops} if with_tops else found

    def _alternative(self, token_id: int, logprob: float) -> Entry:
        text = self._decoded([token_id]) if self._with_text else None
        return [max(logprob, LEAST), token_id, text]

    def _text(self, token_id: int) -> str | None:
        if not self._with_text:
            return None
        begun = self._begun if self._goes_on(token_id) else []
        self._pass(token_id)
        return self._decoded([*begun, token_id])

    def _goes_on(self, token_id: int) -> bool:
        """Whether a token goes on with the character that is begun, and is none or a broken one by itself."""
        return any(0x80 <= byte < 0xC0 for byte in self._texts.bytes_of(token_id)[:1])

    def _pass(self, token_id: int) -> None:
        """Take note of the character that a token leaves open."""
        begun = self._begun if self._goes_on(token_id) else []
        self._decoder.decode(self._texts.bytes_of(token_id))
        self._begun = [*begun, token_id] if self._decoder.getstate()[0] else []

    def _decoded(self, token_ids: Sequence[int]) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=False)
