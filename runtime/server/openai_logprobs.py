"""Log-probabilities in OpenAI's two forms: a list of entries for chats, parallel lists for completions."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import Any

from phloem.runtime.outputs import TokenLogprob
from phloem.runtime.server.token_texts import TokenTexts

LEAST = -9999.0
"""What JSON can hold in place of minus infinity."""


def chat_logprobs(entries: Sequence[TokenLogprob], texts: TokenTexts) -> dict[str, Any]:
    """Return the form of `/v1/chat/completions`."""
    return {
        "content": [
            {
                **_entry(entry.token_id, entry.logprob, texts),
                "top_logprobs": [_entry(token_id, logprob, texts) for token_id, logprob in entry.top],
            }
            for entry in entries
        ],
        "refusal": None,
    }


def _entry(token_id: int, logprob: float, texts: TokenTexts) -> dict[str, Any]:
    found = texts.bytes_of(token_id)
    return {
        "token": found.decode("utf-8", "replace"),
        "logprob": max(logprob, LEAST),
        "bytes": list(found),
    }


class CompletionLogprobs:
    """Makes the form of `/v1/completions`, piece by piece: offsets go on from piece to piece."""

    def __init__(self, texts: TokenTexts) -> None:
        self._texts = texts
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._offset = 0

    def first(self, token_id: int) -> dict[str, Any]:
        """Return the part of a prompt's first token, before which there is nothing to tell how likely it was."""
        return self._part([token_id], [None], [None])

    def part(self, entries: Sequence[TokenLogprob]) -> dict[str, Any]:
        """Return the part of the next tokens."""
        return self._part(
            [entry.token_id for entry in entries],
            [max(entry.logprob, LEAST) for entry in entries],
            [self._top(entry) for entry in entries],
        )

    def _part(
        self,
        token_ids: Sequence[int],
        logprobs: Sequence[float | None],
        tops: Sequence[dict[str, float] | None],
    ) -> dict[str, Any]:
        offsets = []
        for token_id in token_ids:
            offsets.append(self._offset)
            if self._texts.is_special(token_id):
                continue
            self._offset += len(self._decoder.decode(self._texts.bytes_of(token_id)))
        return {
            "tokens": [self._texts.name_of(token_id) for token_id in token_ids],
            "token_logprobs": list(logprobs),
            "top_logprobs": list(tops),
            "text_offset": offsets,
        }

    def _top(self, entry: TokenLogprob) -> dict[str, float]:
        # The token itself is among them, also when it is none of the likeliest, as with OpenAI.
        pairs = (*entry.top, (entry.token_id, entry.logprob))
        return {self._texts.name_of(token_id): max(logprob, LEAST) for token_id, logprob in pairs}


def joined(parts: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return several parts as one."""
    names = ("tokens", "token_logprobs", "top_logprobs", "text_offset")
    return {name: [each for part in parts for each in part[name]] for name in names}
