"""Text to token ids and back.

The work is done by the Hugging Face *fast* tokenizers (the ``tokenizers`` library). What is added here is what an
engine needs and they leave open: a BOS that is never doubled, user text that can't forge special tokens, text that goes on
from other text, and typed errors that name the wrong field.

Text is a view of tokens. Nothing here is ever used to get from generated tokens to text and back to tokens.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from phloem.runtime.chat_messages import KnownAnswers, SpecialTextGuard, checked_messages
from phloem.runtime.chat_template import puts_contents_out
from phloem.runtime.errors import InvalidRequest, ModelCorrupted
from phloem.runtime.joins import Joins

if TYPE_CHECKING:
    from tokenizers import Tokenizer as BackendTokenizer
    from transformers import TokenizersBackend

MAX_WORDS = 4096
"""How many words' tokens the tokenizers library may remember in each thread that encodes; a word of 255 letters takes 8 kB."""


class Tokenizer:
    """A model's tokenizer and chat template.

    Holds no state that a call changes, so threads may share it.
    """

    hf: TokenizersBackend
    """The transformers tokenizer, for libraries that want one (grammars)."""

    backend: BackendTokenizer
    """The ``tokenizers`` object below it; truncation and padding are off."""

    vocab_size: int
    """Ids are below this; the model's own vocabulary may be larger, with rows that no text uses."""

    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    """Ids that end a generation: the tokenizer's own, and those of the model's config."""

    special_ids: frozenset[int]
    """Ids that `decode` leaves out by default."""

    def __init__(self, hf: TokenizersBackend, *, eos_token_ids: Iterable[int] = ()) -> None:
        self.hf = hf
        self.backend = hf.backend_tokenizer
        # tokenizer.json may carry a truncation length from training, which would cut prompts silently
        self.backend.no_truncation()
        self.backend.no_padding()
        _limit_memory(self.backend)
        self.vocab_size = self.backend.get_vocab_size(with_added_tokens=True)
        self.bos_token_id = _optional_id(hf.bos_token_id)
        own = _optional_id(hf.eos_token_id)
        ids = [*eos_token_ids, *([] if own is None else [own])]
        self.eos_token_ids = tuple(dict.fromkeys(ids))
        added = self.backend.get_added_tokens_decoder()
        self.special_ids = frozenset(index for index, token in added.items() if token.special)
        self._special_texts = {added[index].content: index for index in self.special_ids}
        self._render_elsewhere: Callable[[str, Mapping[str, Any]], str] | None = None

    def with_renderer(self, render: Callable[[str, Mapping[str, Any]], str]) -> Tokenizer:
        """Return the same tokenizer, for which a function renders chat templates, given a template and its variables.

        By default that is done in this thread, in the immutable sandbox of jinja2, where a template can change nothing but can loop
        for ever.
        """
        other = copy.copy(self)
        other._render_elsewhere = render
        return other

    @classmethod
    def from_directory(cls, directory: str | Path, *, eos_token_ids: Iterable[int] = ()) -> Tokenizer:
        """Load the tokenizer of a model directory.

        Raises:
            ModelCorrupted: There is none, it is damaged, or it is not a fast tokenizer.
        """
        from transformers import AutoTokenizer, TokenizersBackend

        way_out = "the directory needs tokenizer.json and tokenizer_config.json: download them again"
        if not (Path(directory) / "tokenizer.json").exists():
            raise ModelCorrupted(f"{directory} has no tokenizer.json; {way_out}")
        try:
            hf = AutoTokenizer.from_pretrained(str(directory), local_files_only=True)
        except Exception as error:  # the tokenizers library raises bare Exception for a damaged file
            raise ModelCorrupted(
                f"the tokenizer of {directory} can't be loaded ({error}); {way_out}"
            ) from error
        if not isinstance(hf, TokenizersBackend):
            raise ModelCorrupted(
                f"{directory} gave {type(hf).__name__}, which is not a fast tokenizer; {way_out}"
            )
        return cls(hf, eos_token_ids=eos_token_ids)

    def encode(
        self, text: str, *, add_special_tokens: bool = True, parse_special_tokens: bool = True
    ) -> list[int]:
        """Return the token ids of a text.

        Args:
            text: Any Unicode text.
            add_special_tokens: Add what the model wants around a prompt (usually BOS). A text that brings its own
                BOS, because it was rendered from a chat template, does not get a second one.
            parse_special_tokens: Read ``<|im_end|>`` and its like as the special token. False for text that
                comes from an end user: it stays text then.

        Raises:
            InvalidRequest: `text` is no string, or has lone surrogates, which no UTF-8 can hold.
        """
        if not isinstance(text, str):
            raise InvalidRequest(f"a prompt must be a string, not {type(text).__name__}", field="prompt")
        backend = self.backend if parse_special_tokens else self._plain_backend
        try:
            ids: list[int] = backend.encode(text, add_special_tokens=add_special_tokens).ids
        except (TypeError, UnicodeEncodeError) as error:
            raise InvalidRequest(
                f"the text can't be encoded as UTF-8 ({error}); remove its lone surrogates", field="prompt"
            ) from error
        if add_special_tokens and len(ids) > 1 and ids[0] == ids[1] == self.bos_token_id:
            return ids[1:]
        return ids

    def encode_continuation(self, text: str, *, parse_special_tokens: bool = True) -> list[int]:
        """Return the token ids of a text that goes on from another one: it alone, and without a space that it does not have.

        SentencePiece's vocabularies put one before every text that is encoded.

        Raises:
            InvalidRequest: As `encode`.
        """
        anchor, num_anchor_ids = self._anchor
        if not anchor or not isinstance(text, str):
            return self.encode(text, add_special_tokens=False, parse_special_tokens=parse_special_tokens)
        ids = self.encode(anchor + text, add_special_tokens=False, parse_special_tokens=parse_special_tokens)
        return ids[num_anchor_ids:]

    @cached_property
    def _anchor(self) -> tuple[str, int]:
        """A character that takes the space before it away from a text, and joins with nothing; empty where no space is put before texts.

        And how many tokens it is.
        """
        alone = self.backend.encode("a", add_special_tokens=False)
        is_spaced = "".join(alone.tokens) != "a"
        if not is_spaced or self.backend.token_to_id("<0x00>") not in self.byte_token_ids:
            return "", 0
        return "\0", len(self.encode("\0", add_special_tokens=False))

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        template_options: Mapping[str, Any] | None = None,
        answers: Mapping[int, Sequence[int]] | None = None,
    ) -> list[int]:
        """Return the token ids of a conversation under the model's chat template.

        Special tokens come from the template alone: their spellings inside a message stay text.

        Args:
            messages: Mappings with ``role`` and ``content``, a string or a list of text parts; other keys
                (``name``, ``tool_calls``) are handed to the template.
            add_generation_prompt: End with the opening of the assistant's turn.
            template_options: More variables for the template, such as ``tools``.
            answers: By the index of a message, the ids that a model generated and whose text is its content. Where the
                template leaves that text as it is, these ids stand, which encoding the text might not give.

        Raises:
            InvalidRequest: A message is malformed (`field` says which), the template refuses the conversation,
                or the model has no chat template.
        """
        checked = checked_messages(messages)
        guard = SpecialTextGuard(self._special_texts, checked)
        hidden = guard.hide(checked)
        known = KnownAnswers(answers or {}, hidden)
        rendered = self._render(known.mark(hidden), add_generation_prompt, template_options or {})
        ids: list[int] = []
        for piece in known.pieces(rendered):
            ids += self._encode_rendered(piece, guard) if isinstance(piece, str) else piece
        return ids

    def _encode_rendered(self, rendered: str, guard: SpecialTextGuard) -> list[int]:
        """Return the ids of a template's text, in which messages' own spellings of special tokens are hidden."""
        if not guard.found:
            return self.encode(rendered, add_special_tokens=False)
        ids: list[int] = []
        for piece in self._special_pattern.split(rendered):
            if piece in self._special_texts:
                ids.append(self._special_texts[piece])
            elif piece:
                text = guard.reveal(piece)
                ids += self.encode(text, add_special_tokens=False, parse_special_tokens=False)
        return ids

    def render_chat(
        self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = True
    ) -> str:
        """Return a conversation as the model's chat template puts it, where special tokens' spellings can't be told from the tokens.

        Raises:
            InvalidRequest: As `encode_chat`.
        """
        return self._render(checked_messages(messages), add_generation_prompt, {})

    def spells_special(self, text: str) -> bool:
        """Whether a text has the spelling of a special token in it."""
        return bool(self._special_texts) and self._special_pattern.search(text) is not None

    def begins_apart(self, text: str) -> bool:
        """Whether a text begins with a special token that takes no space before it: alone it is encoded as it is behind another text."""
        match = self._special_pattern.match(text) if self._special_texts else None
        if match is None:
            return False
        token = self.backend.get_added_tokens_decoder()[self._special_texts[match[0]]]
        return not (token.lstrip or token.single_word or token.normalized)

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Return the text of token ids; bytes that are no valid UTF-8 become U+FFFD."""
        text: str = self.backend.decode(token_ids, skip_special_tokens=skip_special_tokens)
        return text

    def num_joinable(self, token_ids: Sequence[int]) -> int:
        """Return how many of the last tokens might be fewer, had the text gone on: together they begin a longer token.

        0 for special tokens, and for the ``<0x..>`` tokens of vocabularies with byte fallback. O(1) in most texts, and at most
        O(tokens * log vocabulary).
        """
        return self._joins.count(token_ids)

    def text_after(self, before: Sequence[int], token_ids: Sequence[int]) -> str:
        """Return the text that tokens add to what stands before them, of which a few are enough; empty where that can't be told.

        A token's text depends on those before it: the first space of a text may be dropped, a character may be in pieces.
        """
        if not before or not token_ids:
            return ""
        if self._is_byte_level and (anchor := self._joins.spelled(before[-1])[-1:]):
            spelled = anchor
            for each in token_ids:  # a comprehension is a function of its own
                spelled += self._joins.spelled(each)
            text = _ascii_of(spelled)
            if text:
                return text[1:]
        head = self.decode(before)
        whole = self.decode([*before, *token_ids])
        return whole[len(head) :] if head and whole.startswith(head) and "\ufffd" not in whole else ""

    @cached_property
    def _joins(self) -> Joins:
        own = self.backend.get_vocab(with_added_tokens=False)
        added = {token.content: index for index, token in self.backend.get_added_tokens_decoder().items()}
        return Joins(own, added, apart=self.special_ids | self.byte_token_ids)

    @cached_property
    def _is_byte_level(self) -> bool:
        """Whether a token's spelling is its bytes, each as a character of its own, as GPT-2's are."""
        return type(self.backend.decoder).__name__ == "ByteLevel"

    @property
    def has_chat_template(self) -> bool:
        """Whether `encode_chat` can work."""
        return self.hf.chat_template is not None

    @cached_property
    def puts_contents_out(self) -> bool:
        """Whether the chat template is known to do no more with messages' contents; see `phloem.runtime.chat_template`."""
        template = self.hf.chat_template
        return isinstance(template, str) and puts_contents_out(template)

    @cached_property
    def byte_token_ids(self) -> frozenset[int]:
        """Ids of the ``<0x..>`` tokens of a vocabulary with byte fallback; empty for byte-level vocabularies."""
        if "ByteFallback" not in repr(self.backend.decoder):
            return frozenset()
        ids = (self.backend.token_to_id(f"<0x{byte:02X}>") for byte in range(256))
        return frozenset(index for index in ids if index is not None)

    @cached_property
    def _plain_backend(self) -> BackendTokenizer:
        """A second backend that reads special tokens' spellings as text: the switch is a property of the object."""
        from tokenizers import Tokenizer as BackendTokenizer

        plain = BackendTokenizer.from_str(self.backend.to_str())
        plain.encode_special_tokens = True
        _limit_memory(plain)
        return plain

    @cached_property
    def _special_pattern(self) -> re.Pattern[str]:
        longest_first = sorted(self._special_texts, key=len, reverse=True)
        return re.compile("(" + "|".join(re.escape(text) for text in longest_first) + ")")

    def _render(
        self, messages: list[dict[str, Any]], add_generation_prompt: bool, options: Mapping[str, Any]
    ) -> str:
        from jinja2 import TemplateError

        if not self.has_chat_template:
            raise InvalidRequest(
                "this model has no chat template; pass the prompt as text or token ids", field="messages"
            )
        options = {**options, "add_generation_prompt": add_generation_prompt}
        try:
            if self._render_elsewhere is None:
                return str(self.hf.apply_chat_template(messages, tokenize=False, **options))
            template = self.hf.get_chat_template(None, options.get("tools"))
            # As transformers does: templates take a missing key for one that is None, but not the other way round.
            plain = [{key: value for key, value in each.items() if value is not None} for each in messages]
            variables = {**self.hf.special_tokens_map, **options, "messages": plain}
            return self._render_elsewhere(template, variables)
        except InvalidRequest:
            raise
        except (TemplateError, TypeError, ValueError) as error:
            raise InvalidRequest(
                f"the model's chat template refuses these messages: {error}", field="messages"
            ) from error


def _ascii_of(spelled: str) -> str:
    """Return the text of a byte-level spelling; empty unless it is ASCII, and its white space only spaces and line feeds."""
    text = spelled.replace("Ġ", " ").replace("Ċ", "\n")
    return text if text.isascii() else ""


def _optional_id(value: object) -> int | None:
    return value if isinstance(value, int) else None


def _limit_memory(backend: BackendTokenizer) -> None:
    """Let the tokenizers library remember no more than it can use.

    It remembers the tokens of the first 10,000 words that it sees, in each thread anew and for ever: with pieces of prompts for words that is
    80 MiB a thread. Where a vocabulary does not cut texts into words, such a piece hardly comes again, and nothing is remembered.
    """
    resize = getattr(
        backend.model, "_resize_cache", None
    )  # a private name, and not every kind of model has such a memory
    if resize is not None:
        resize(MAX_WORDS if _cuts_words(backend) else 0)


def _cuts_words(backend: BackendTokenizer) -> bool:
    text = "one two, three four"
    if backend.normalizer is not None:
        text = backend.normalizer.normalize_str(text)
    return backend.pre_tokenizer is not None and len(backend.pre_tokenizer.pre_tokenize_str(text)) > 1
