"""From what callers pass as prompts to token ids. Runs in the caller's thread, and refuses bad input there."""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from typing import TypeAlias, cast

import numpy as np

from phloem.runtime.errors import InvalidRequest
from phloem.runtime.tokenizer import Tokenizer

Message: TypeAlias = Mapping[str, str]
Prompt: TypeAlias = "str | Sequence[int] | Sequence[Message]"
"""Text, token ids, or the messages of a chat (`{"role": ..., "content": ...}`), which the model's template turns into text."""

_WORTH_A_THREAD = 1024
"""Token ids, or characters, from which on encoding is left to a thread: below, an event loop is sooner done by itself."""
_WORTH_NUMPY = 64
"""Tokens from which on NumPy looks over an array sooner than Python does."""


def as_prompts(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """Return a list of prompts, whether one was passed or several."""
    if isinstance(prompts, np.ndarray):
        prompts = prompts.tolist()
    if isinstance(prompts, str) or not isinstance(prompts, Sequence):
        return [cast(Prompt, prompts)]
    first = prompts[0] if len(prompts) else None
    if isinstance(first, (int, Mapping)):
        return [cast(Prompt, prompts)]
    return list(cast("Sequence[Prompt]", prompts))


def encode(prompt: Prompt, tokenizer: Tokenizer, *, vocab_size: int, name: str = "prompt") -> array[int]:
    """Return the prompt's token ids as an int32 array.

    `vocab_size` is the model's, which may exceed the tokenizer's: what a model generated is a valid prompt.

    Raises:
        InvalidRequest: It is empty, of a wrong type, or has ids outside of the vocabulary. The message starts with `name`.
    """
    if isinstance(prompt, str):
        if not prompt:
            raise InvalidRequest(f"{name} is empty; it needs at least one token", field=name)
        try:
            ids: Sequence[int] = tokenizer.encode(prompt)
        except InvalidRequest as error:
            raise InvalidRequest(f"{name}: {error}", field=name) from None
    elif isinstance(prompt, Sequence) and len(prompt) and isinstance(prompt[0], Mapping):
        ids = tokenizer.encode_chat(cast("Sequence[Message]", prompt))
    else:
        ids = cast("Sequence[int]", prompt)
    return _checked_ids(ids, vocab_size, name)


def is_quick(prompts: Prompt | Sequence[Prompt]) -> bool:
    """Whether encoding takes less time than handing it to a thread: ids or text, and little of it. Chats are rendered first."""
    size = 0
    for prompt in as_prompts(prompts):
        if not isinstance(prompt, (str, Sequence, np.ndarray)) or not len(prompt):
            continue  # refused at once
        if isinstance(prompt[0], Mapping):
            return False
        size += len(prompt)
    return size < _WORTH_A_THREAD


def encode_continuation(
    continuation: str | Sequence[int], tokenizer: Tokenizer, *, vocab_size: int, name: str
) -> array[int]:
    """Return the token ids of what follows on a path: text is encoded alone, with no special tokens added.

    Raises:
        InvalidRequest: It is empty, of a wrong type, or has ids outside of the vocabulary. The message starts with `name`.
    """
    if isinstance(continuation, str):
        ids: Sequence[int] = tokenizer.encode_continuation(continuation)
    else:
        ids = continuation
    return _checked_ids(ids, vocab_size, name)


def is_list(values: object) -> bool:
    """Whether something is a list of things, and no text."""
    return isinstance(values, (Sequence, np.ndarray)) and not isinstance(values, (str, bytes, bytearray))


def _checked_ids(ids: Sequence[int], vocab_size: int, name: str) -> array[int]:
    if isinstance(ids, np.ndarray):
        ids = ids.tolist()
    if isinstance(ids, (bytes, bytearray, memoryview)) or not isinstance(ids, (Sequence, array)):
        raise InvalidRequest(
            f"{name} must be text, token ids or chat messages, not {type(ids).__name__}", field=name
        )
    if not len(ids):
        raise InvalidRequest(f"{name} is empty; it needs at least one token", field=name)
    if isinstance(ids, array) and ids.typecode == "i":
        if len(ids) < _WORTH_NUMPY:
            least, most = min(ids), max(ids)
        else:
            whole = np.frombuffer(ids, dtype=np.int32)
            least, most = int(whole.min()), int(whole.max())
        if least >= 0 and most < vocab_size:
            return ids[:]
    for index, token_id in enumerate(ids):
        if not isinstance(token_id, int) or isinstance(token_id, bool):
            raise InvalidRequest(f"{name}[{index}] must be a token id, not {token_id!r}", field=name)
        if not 0 <= token_id < vocab_size:
            raise InvalidRequest(
                f"{name}[{index}] is {token_id}; this model's token ids go from 0 to {vocab_size - 1}",
                field=name,
            )
    return array("i", ids)
