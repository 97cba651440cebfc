"""Text from tokens that come one by one: `IncrementalDetokenizer`, and `StopChecker` for stop strings.

The deltas' sum is exactly the text of all tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

from phloem.runtime.errors import InvalidRequest
from phloem.runtime.tokenizer import Tokenizer

_REPLACEMENT = "\ufffd"
_WINDOW = 16
"""Tokens that an `IncrementalDetokenizer` decodes at most at once, in all but contrived texts."""

_KEPT = 6
"""Tokens that it keeps as context when it shortens its window: more than a character has bytes."""

_MAX_BYTE_RUN = 64
"""Byte tokens in a row after which it no longer waits for their end; see `IncrementalDetokenizer`."""

_MAX_CHARACTER = 4
"""Bytes of the longest character in UTF-8."""


class IncrementalDetokenizer:
    """Turns a growing list of token ids into text deltas.

    The deltas and the flush together are `Tokenizer.decode` of all ids, and no delta holds a part of a
    character. The cost of a token does not grow with the text: only a window of the last tokens is decoded
    again, because a token's text depends on its neighbours (bytes of one character, the space that a
    first token loses).

    In vocabularies with byte fallback one bad byte spoils a whole run of byte tokens, so a run is held back
    until it ends. After 64 byte tokens its whole characters are given out all the same; should a bad byte follow,
    then `decode` of all ids shows more replacement characters than the stream did.
    """

    def __init__(
        self, tokenizer: Tokenizer, *, context: Sequence[int] = (), skip_special_tokens: bool = True
    ) -> None:
        """Start a stream.

        Args:
            tokenizer: The tokenizer of the ids.
            context: Ids before the stream (a prompt's end; the last 16 are enough). They give no text, but with
                them a first word keeps the space before it, which some vocabularies strip from the very start.
            skip_special_tokens: Leave out the special tokens' texts.
        """
        self._tokenizer = tokenizer
        self._skipped = tokenizer.special_ids if skip_special_tokens else frozenset()
        self._byte_ids = tokenizer.byte_token_ids
        self._byte_run = 0
        self._window = [index for index in context[-_WINDOW:] if self._has_text(index)]
        # an unfinished character at the context's end belongs to the stream, which may finish it
        self._num_emitted = len(self._decode(self._window).rstrip(_REPLACEMENT))

    def push(self, token_id: int) -> str:
        """Add one token; return the text that is certain now, often empty, never a broken character."""
        if not self._has_text(token_id):
            return ""
        self._window.append(token_id)
        self._byte_run = self._byte_run + 1 if token_id in self._byte_ids else 0
        if 0 < self._byte_run < _MAX_BYTE_RUN:
            return ""
        text = self._decode(self._window)
        if self._byte_run and text.endswith(_REPLACEMENT) and self._byte_run < _MAX_BYTE_RUN + _MAX_CHARACTER:
            return ""
        self._byte_run = 0
        # all bytes before an unfinished character are decided, and an unfinished one shows as one U+FFFD
        num_certain = len(text) - text.endswith(_REPLACEMENT)
        delta = text[self._num_emitted : num_certain]
        self._num_emitted = max(self._num_emitted, num_certain)
        if len(self._window) > _WINDOW:
            self._shorten(text)
        return delta

    def flush(self) -> str:
        """Return what is still held back, such as a character that never got its last byte."""
        text = self._decode(self._window)
        delta = text[self._num_emitted :]
        self._num_emitted = max(self._num_emitted, len(text))
        self._byte_run = 0
        return delta

    def _shorten(self, text: str) -> None:
        """Cut the window where that can't change the text of what follows.

        A cut is good when the rest alone decodes to the end of the text (but for a leading space): then it lies
        between characters. What is kept is longer than a character, so the cut is before an unfinished one, too.
        """
        for cut in range(len(self._window) - _KEPT, 0, -1):
            rest = self._decode(self._window[cut:])
            if rest and text.endswith(rest):
                del self._window[:cut]
                self._num_emitted -= len(text) - len(rest)
                return

    def _has_text(self, token_id: int) -> bool:
        return token_id not in self._skipped and self._tokenizer.backend.id_to_token(token_id) is not None

    def _decode(self, token_ids: list[int]) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=False)


class StopChecker:
    """Finds stop strings in a stream of text deltas, also where they span several.

    The stop that is complete first wins (of two, the one that began first), and the text ends before it. The result
    does not depend on how the text was cut into deltas. Held back is only text that may be the beginning of a
    stop: at most the longest stop's length less one.
    """

    matched: str | None
    """The stop string that was found; None before that."""

    def __init__(self, stops: Sequence[str]) -> None:
        for index, stop in enumerate(stops):
            if not isinstance(stop, str) or not stop:
                raise InvalidRequest(
                    f"a stop must be a string of at least one character, not {stop!r}", field=f"stop[{index}]"
                )
        self._stops = tuple(stops)
        self._max_held = max((len(stop) for stop in stops), default=1) - 1
        self._held = ""
        self.matched = None

    @property
    def stopped(self) -> bool:
        """Whether a stop string was found."""
        return self.matched is not None

    def push(self, delta: str) -> str:
        """Add text; return what can be shown now. After a match this returns nothing."""
        if self.stopped:
            return ""
        text = self._held + delta
        ends = [(start + len(stop), start, stop) for stop in self._stops if (start := text.find(stop)) >= 0]
        if ends:
            _, start, self.matched = min(ends)
            self._held = ""
            return text[:start]
        num_held = self._num_held(text)
        self._held = text[len(text) - num_held :]
        return text[: len(text) - num_held]

    def flush(self) -> str:
        """Return the text held back, when the stream ended without a match."""
        held, self._held = self._held, ""
        return held

    def _num_held(self, text: str) -> int:
        """Length of the longest end of `text` that begins a stop string."""
        for length in range(min(self._max_held, len(text)), 0, -1):
            end = text[-length:]
            if any(stop.startswith(end) for stop in self._stops):
                return length
        return 0
