"""Chat messages on their way through a template: what they must be, and what of them must not become a special token.

:class:`KnownAnswers` keeps the token ids of what a model wrote: where the template puts the text of such a message, the ids take
its place, so that nothing generated is decoded and encoded again.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from phloem.runtime.errors import InvalidRequest

_PRIVATE_USE = range(0xE000, 0xF8FF)


class SpecialTextGuard:
    """Hides special tokens' spellings in messages while the template is rendered.

    Each spelling is replaced by two characters of Unicode's private use area that no message uses, so that after
    rendering only the template's own special tokens can be seen as such.
    """

    def __init__(self, special_texts: Mapping[str, int], messages: list[dict[str, Any]]) -> None:
        contents = "\n".join(_strings_in(messages))
        self._texts = [text for text in sorted(special_texts, key=len, reverse=True) if text in contents]
        unused = (chr(code) for code in _PRIVATE_USE if chr(code) not in contents)
        self._marks = {text: next(unused) for text in self._texts}

    @property
    def found(self) -> bool:
        """Whether any message spells a special token."""
        return bool(self._texts)

    def hide(self, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return the messages with a mark in place of each spelling, be it in the content, the role or deeper."""
        return [self._hidden(message) for message in messages] if self.found else messages

    def reveal(self, text: str) -> str:
        """Put the spellings back."""
        for spelling, mark in self._marks.items():
            text = text.replace(mark, spelling)
        return text

    def _hidden(self, value: Any) -> Any:
        if isinstance(value, str):
            for spelling, mark in self._marks.items():
                value = value.replace(spelling, mark)
            return value
        if isinstance(value, Mapping):
            return {self._hidden(key): self._hidden(each) for key, each in value.items()}
        if isinstance(value, list | tuple):
            return [self._hidden(each) for each in value]
        return value


@dataclass(frozen=True, slots=True)
class _Answer:
    """What a model wrote, and the white space around its text."""

    token_ids: Sequence[int]
    lead: str
    core: str
    trail: str


class KnownAnswers:
    """Puts the token ids of what a model wrote where a template puts its text.

    Before rendering, each answer's text is set between two marks, inside of its outer white space. Where they come out around the
    same text, with the same space outside, the template has left the answer as it was, and the ids take its place. Where it
    has trimmed or cut it, the template's text counts.
    """

    def __init__(self, answers: Mapping[int, Sequence[int]], messages: list[dict[str, Any]]) -> None:
        """Take ids by the index of their message.

        Raises:
            InvalidRequest: An index is none of the messages'.
        """
        for index in answers:
            if index not in range(len(messages)):
                raise InvalidRequest(
                    f"answers names message {index!r} of {len(messages)}", field=f"answers[{index!r}]"
                )
        contents = "\n".join(_strings_in(messages)) if answers else ""
        unused = (chr(code) for code in reversed(_PRIVATE_USE) if chr(code) not in contents)
        self._open, self._close = next(unused), next(unused)
        self._pattern = re.compile(
            f"{self._open}(\\d+){self._open}([^{self._open}{self._close}]*){self._close}"
        )
        self._leftover = re.compile(f"{self._open}\\d+{self._open}|{self._close}")
        self._answers = {
            index: _split_answer(messages[index]["content"], token_ids)
            for index, token_ids in answers.items()
        }

    def mark(self, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return the messages with marks around each answer that is more than white space."""
        marked = list(messages)
        for index, answer in self._answers.items():
            if answer.core:
                inside = f"{self._open}{index}{self._open}{answer.core}{self._close}"
                marked[index] = {**messages[index], "content": answer.lead + inside + answer.trail}
        return marked

    def pieces(self, rendered: str) -> Iterator[str | Sequence[int]]:
        """Yield a rendered conversation from begin to end: text, and the ids of answers that stand in it unchanged."""
        done = 0
        for match in self._pattern.finditer(rendered):
            answer = self._answers[int(match[1])]
            start, end = match.start() - len(answer.lead), match.end() + len(answer.trail)
            unchanged = (
                match[2] == answer.core
                and rendered[done : match.start()].endswith(answer.lead)
                and rendered[match.end() : end] == answer.trail
            )
            if unchanged:
                yield self._leftover.sub("", rendered[done:start])
                yield answer.token_ids
                done = end
        yield self._leftover.sub("", rendered[done:])


def _split_answer(text: str, token_ids: Sequence[int]) -> _Answer:
    core = text.strip()
    begin = len(text) - len(text.lstrip()) if core else 0
    return _Answer(token_ids, text[:begin], core, text[begin + len(core) :])


def _strings_in(value: Any) -> Iterator[str]:
    """Yield every string of nested lists and mappings, keys included."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, each in value.items():
            yield from _strings_in(key)
            yield from _strings_in(each)
    elif isinstance(value, list | tuple):
        for each in value:
            yield from _strings_in(each)


def checked_messages(messages: object) -> list[dict[str, Any]]:
    """Return copies of messages, the content of each one string.

    Raises:
        InvalidRequest: One is malformed; `field` says which.
    """
    return [_check_message(message, index) for index, message in enumerate(_check_list(messages))]


def _check_list(messages: object) -> Sequence[object]:
    if not isinstance(messages, Sequence) or isinstance(messages, str | bytes) or not messages:
        raise InvalidRequest(
            "messages must be a list of at least one {'role': ..., 'content': ...}", field="messages"
        )
    return messages


def _check_message(message: object, index: int) -> dict[str, Any]:
    """Return a copy of the message whose content is one string."""
    field = f"messages[{index}]"
    if not isinstance(message, Mapping):
        raise InvalidRequest(f"{field} must be a mapping, not {type(message).__name__}", field=field)
    role = message.get("role")
    if not isinstance(role, str) or not role:
        raise InvalidRequest(
            f"{field}.role must be a string such as 'user', not {role!r}", field=f"{field}.role"
        )
    content = message.get("content")
    if content is None and message.get("tool_calls"):
        content = ""
    return {**message, "content": content_text(content, f"{field}.content")}


def content_text(content: object, field: str) -> str:
    """Return the text of a message's content: a string, or a list of text parts.

    Raises:
        InvalidRequest: It is neither.
    """
    if isinstance(content, str):
        return content
    if not isinstance(content, Sequence) or isinstance(content, bytes):
        raise InvalidRequest(
            f"{field} must be a string or a list of text parts, not {content!r}", field=field
        )
    texts = []
    for index, part in enumerate(content):
        kind = part.get("type") if isinstance(part, Mapping) else None
        text = part.get("text") if isinstance(part, Mapping) else None
        if kind != "text" or not isinstance(text, str):
            raise InvalidRequest(
                f"{field}[{index}] must be {{'type': 'text', 'text': ...}}; only text is supported",
                field=f"{field}[{index}]",
            )
        texts.append(text)
    return "".join(texts)
