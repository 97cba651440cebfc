"""Token ids as bytes.

The tree compares tokens as memory, so inside it a token path is a ``bytes`` object: four bytes a token, int32 in
the machine's own order. Everything public takes any sequence of ints as well as anything packed already; `pack` is
for callers that use a path more than once and want to pay for the packing once.

>>> from array import array
>>> pack([1, 2]) == pack((1, 2)) == pack(array("i", [1, 2])) == pack(pack([1, 2]))
True
>>> unpack(pack([7, 8, 9]))
[7, 8, 9]

What is kept for long and seldom read (ghost.py) is *narrow*: as many bytes a token as its vocabulary needs, two, three
or four. A token of two or three bytes is below 0xff00 or 0xff0000: all ones stand for what does not fit, and equal no
real token.

>>> [len(narrow_exactly(pack([7, token]), size)) for token, size in ((50_000, 2), (150_000, 3), (2**30, 4))]
[4, 6, 8]
>>> narrow_exactly(pack([7, 150_000]), 2) is None
True
>>> [token_at(narrow(pack([7, 150_000]), 2), index, token_bytes=2) for index in (0, 1)]
[7, 65535]
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Sequence
from typing import TypeAlias

from phloem.radix.errors import InvalidTokens

TOKEN_BYTES = 4
MAX_TOKEN = 2**31 - 1

# Anything with the buffer protocol counts as packed (numpy's int32 arrays too), but the type of all such things,
# `collections.abc.Buffer`, exists from Python 3.12 on only.
Tokens: TypeAlias = "Sequence[int] | bytes | bytearray | memoryview | array[int]"

_LANES = (
    (0, 1, 2, 3) if sys.byteorder == "little" else (3, 2, 1, 0)
)  # where a token's bytes are, lowest first
_TOP_BYTE = _LANES[3]
_INTEGER_FORMATS = frozenset("iIlLqQ")


def pack(tokens: Tokens) -> bytes:
    """Packs token ids into int32 bytes; `bytes` pass through uncopied. O(len(tokens)).

    A buffer of one-byte items (``bytes``, ``bytearray``) is taken as packed already. Integer buffers of four or eight
    bytes per item (``array('i')``, numpy's int32 and int64) are read as token ids.

    Args:
        tokens: Token ids of 0 to 2**31 - 1, or a packed buffer.

    Raises:
        InvalidTokens: An id is out of range or not an int, or a buffer is not int32.
    """
    if isinstance(tokens, bytes):
        return _whole(tokens)
    if isinstance(tokens, (list, tuple)):
        return _pack_ids(tokens)
    try:
        view = memoryview(tokens)  # type: ignore[arg-type]
    except TypeError:
        return _pack_ids(tokens)
    return _pack_buffer(view)


def unpack(packed: bytes | bytearray | memoryview) -> list[int]:
    """The token ids of a packed path. O(len)."""
    ids = array("i")
    ids.frombytes(packed)
    return ids.tolist()


def token_at(tokens: bytes | bytearray, index: int, *, token_bytes: int = TOKEN_BYTES) -> int:
    """One token id of a path with `token_bytes` bytes a token. O(1)."""
    return int.from_bytes(tokens[index * token_bytes : (index + 1) * token_bytes], sys.byteorder)


def common_tokens(a: bytes | bytearray, b: bytes | bytearray, *, token_bytes: int = TOKEN_BYTES) -> int:
    """The number of leading tokens that two packed paths share. O(len) of the shorter one.

    Meant for paths of about a block: the exclusive or of both, read as one large integer whose lowest bit is the first
    byte's, has its first set bit where they part.

    >>> common_tokens(pack([1, 2, 3]), pack([1, 2, 4, 5]))
    2
    """
    length = min(len(a), len(b))
    different = int.from_bytes(a[:length], "little") ^ int.from_bytes(b[:length], "little")
    if not different:
        return length // token_bytes
    lowest_bit = (different & -different).bit_length() - 1
    return lowest_bit // (8 * token_bytes)


def narrow_exactly(packed: bytes, token_bytes: int) -> bytes | None:
    """The path with `token_bytes` bytes a token, 2 to 4; None if a token does not fit. O(len)."""
    if token_bytes == TOKEN_BYTES:
        return packed
    for lane in _LANES[token_bytes:]:
        if packed[lane::TOKEN_BYTES] != bytes(len(packed) // TOKEN_BYTES):
            return None
    if 255 in packed[_LANES[token_bytes - 1] :: TOKEN_BYTES]:
        return None
    if token_bytes == 2:  # halves are picked apart faster than bytes
        return array("H", packed)[_LANES[0] // 2 :: 2].tobytes()
    return recode(packed, TOKEN_BYTES, token_bytes)


def narrow(packed: bytes, token_bytes: int) -> bytes:
    """The path with `token_bytes` bytes a token; all ones from the first token on that does not fit. O(len)."""
    narrowed = narrow_exactly(packed, token_bytes)
    if narrowed is not None:
        return narrowed
    too_much = 255 * 256 ** (token_bytes - 1)
    tokens = unpack(packed)
    fitting = next(index for index, token in enumerate(tokens) if token >= too_much)
    narrowed = recode(packed[: fitting * TOKEN_BYTES], TOKEN_BYTES, token_bytes)
    return narrowed + b"\xff" * (token_bytes * (len(tokens) - fitting))


def recode(tokens: bytes, old_bytes: int, new_bytes: int) -> bytes:
    """The same tokens, which must fit, with `new_bytes` bytes each instead of `old_bytes`. O(len)."""
    recoded = bytearray(len(tokens) // old_bytes * new_bytes)
    shared = min(old_bytes, new_bytes)
    old, new = (0, 0) if sys.byteorder == "little" else (old_bytes - shared, new_bytes - shared)
    for index in range(shared):
        recoded[new + index :: new_bytes] = tokens[old + index :: old_bytes]
    return bytes(recoded)


def _whole(packed: bytes) -> bytes:
    if len(packed) % TOKEN_BYTES:
        raise InvalidTokens(f"packed tokens are int32: a multiple of {TOKEN_BYTES} bytes, not {len(packed)}")
    return packed


def _pack_buffer(view: memoryview) -> bytes:
    if view.ndim != 1:
        raise InvalidTokens(f"a token buffer has one dimension, not {view.ndim}")
    if view.itemsize == 1:
        return _whole(view.tobytes())
    if view.format.lstrip("@=") not in _INTEGER_FORMATS:
        raise InvalidTokens(f"a token buffer holds int32, not items of format {view.format!r}")
    if view.itemsize == TOKEN_BYTES:
        return _checked(view.tobytes())
    return _pack_ids(view.tolist())


def _pack_ids(tokens: Sequence[int]) -> bytes:
    if isinstance(tokens, str):
        raise InvalidTokens("token ids are ints, not text; encode it with the tokenizer first")
    try:
        return _checked(array("i", tokens).tobytes())
    except (TypeError, OverflowError) as error:
        raise InvalidTokens(f"token ids are ints of 0 to {MAX_TOKEN}: {error}") from None


def _checked(packed: bytes) -> bytes:
    # An id is negative exactly when its top byte is 128 or more; `isascii` looks at all of them at C speed.
    if not packed[_TOP_BYTE::TOKEN_BYTES].isascii():
        raise InvalidTokens(
            f"token ids are ints of 0 to {MAX_TOKEN}; the lowest here is {min(unpack(packed))}"
        )
    return packed
