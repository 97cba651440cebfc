"""What the model wrote, remembered against its text, for clients that send the whole conversation back as text.

Encoding an answer's text gives other tokens than the model had drawn in about a third of all sampled turns, and the KV of the drawn
ones is what is cached. So the tokens of each answer are kept under a digest of its whole conversation, text and calls, within the
tenant's namespace: a client that sends it back word for word has its answer's tokens put in place of their text.
"""

from __future__ import annotations

import hashlib
import json
import threading
from array import array
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

BYTES_PER_ANSWER = 300
"""About what an entry takes besides its tokens and its text."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What the model wrote in one turn."""

    text: str
    """As it wrote it, calls included."""

    token_ids: array[int]
    """Without the token that ended it."""

    @property
    def num_bytes(self) -> int:
        """About the memory that it takes."""
        return BYTES_PER_ANSWER + 4 * len(self.text) + self.token_ids.itemsize * len(self.token_ids)


class AnswerMemory:
    """Answers by the digest of their conversation; the ones used longest ago make room. Threads may share it."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._answers: OrderedDict[bytes, Answer] = OrderedDict()
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._answers)

    @property
    def num_bytes(self) -> int:
        """About the memory that is used."""
        return self._num_bytes

    def find(self, digest: bytes) -> Answer | None:
        """Return the answer that ends a conversation, if it is known."""
        with self._lock:
            answer = self._answers.get(digest)
            if answer is not None:
                self._answers.move_to_end(digest)
            return answer

    def keep(self, digest: bytes, text: str, token_ids: Sequence[int]) -> None:
        """Remember an answer under the digest of the conversation that it ends."""
        answer = Answer(text, array("i", token_ids))
        with self._lock:
            old = self._answers.pop(digest, None)
            self._num_bytes += answer.num_bytes - (0 if old is None else old.num_bytes)
            self._answers[digest] = answer
            while self._num_bytes > self._max_bytes:
                self._num_bytes -= self._answers.popitem(last=False)[1].num_bytes


def digest_after(before: bytes, *message: Any) -> bytes:
    """Return the digest of a conversation from that of its part before a message. What is equal as JSON is equal."""
    text = json.dumps(message, sort_keys=True)
    return hashlib.sha256(before + text.encode()).digest()
