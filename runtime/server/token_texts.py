"""Single tokens as text and bytes, as protocols report them beside log-probabilities."""

from __future__ import annotations

from functools import cached_property, lru_cache

from phloem.runtime.tokenizer import Tokenizer


class TokenTexts:
    """The texts of a vocabulary's tokens. A token may be part of a character: its bytes are exact then, its text is not."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._backend = tokenizer.backend
        self._special_ids = tokenizer.special_ids
        self._byte_ids = tokenizer.byte_token_ids
        self._is_byte_level = "ByteLevel" in repr(self._backend.decoder)

    def is_special(self, token_id: int) -> bool:
        """Whether the token is no part of a completion's text."""
        return token_id in self._special_ids

    def bytes_of(self, token_id: int) -> bytes:
        """Return a token's bytes; none for an id that no text uses."""
        token = self._backend.id_to_token(token_id)
        if token is None:
            return b""
        if token_id in self._added:
            return token.encode()
        if token_id in self._byte_ids:
            return bytes([int(token[3:5], 16)])
        if self._is_byte_level:
            byte_of = _byte_of()
            return bytes(byte_of[char] for char in token if char in byte_of)
        return token.replace("\u2581", " ").encode()

    def text_of(self, token_id: int) -> str:
        """Return a token's text; bytes that are no character by themselves become U+FFFD."""
        return self.bytes_of(token_id).decode("utf-8", "replace")

    def name_of(self, token_id: int) -> str:
        r"""Return a text that tells the token from others: `bytes:\xe2\x80` for a part of a character, as OpenAI writes it."""
        found = self.bytes_of(token_id)
        try:
            return found.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in found)

    @cached_property
    def _added(self) -> frozenset[int]:
        return frozenset(self._backend.get_added_tokens_decoder())


@lru_cache(maxsize=1)
def _byte_of() -> dict[str, int]:
    """The byte that each of GPT-2's printable characters stands for."""
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    table: dict[int, str] = bytes_to_unicode()  # type: ignore[no-untyped-call]
    return {char: byte for byte, char in table.items()}
