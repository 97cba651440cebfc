"""What a chat template adds for one message, as tokens: programs append turns, they never render a conversation anew.

The delta of a message is what the template gives for a short conversation with it, less what it gives for the same without.
A first user message therefore brings no default system text; the template's BOS comes with the first message of a path.

Where the template's source shows that it puts contents out as they are, a `Form` stands for it: the text around any content. Else,
and for contents that spell special tokens, the template is rendered for each message.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile

from phloem.runtime.engine import Engine
from phloem.runtime.errors import InvalidRequest

_ASKED = ({"role": "user", "content": "A"},)
_ANSWERED = (*_ASKED, {"role": "assistant", "content": "B"})


_PROBE = "\u2003\ue000\u2003"
"""A content that comes out with its outer white space or without, in characters that templates do not have themselves."""


@dataclass(frozen=True, slots=True)
class Form:
    """What a template puts around a message's content."""

    lead: str
    trail: str
    is_trimmed: bool

    def text(self, content: str) -> str:
        """Return the message's text."""
        return self.lead + (content.strip() if self.is_trimmed else content) + self.trail


class Roles:
    """The deltas of one model's chat template. Holds what it found out; threads may share it."""

    def __init__(self, engine: Engine) -> None:
        self._tokenizer = engine.tokenizer
        self._known: dict[str, list[int]] = {}
        self._forms: dict[tuple[str, bool], Form | None] = {}

    def message(self, role: str, content: str, *, is_first: bool) -> list[int]:
        """Return the tokens of a whole message.

        Args:
            role: "system", "user" or "assistant".
            content: Special tokens' spellings in it stay text.
            is_first: Whether the path is empty so far.

        Raises:
            InvalidRequest: The template refuses the message, or rewrites earlier ones.
        """
        opens_with_system = role == "system" and is_first
        bos = [] if opens_with_system else self._bos(is_first)
        form = self._form(role, opens_with_system)
        if form is not None and _is_plain(content) and not self._tokenizer.spells_special(content):
            return bos + self._tokenizer.encode(form.text(content), add_special_tokens=False)
        return bos + self._rendered(role, content, opens_with_system)

    def opening(self, *, is_first: bool) -> list[int]:
        """Return the tokens that open the assistant's turn."""
        if "opening" not in self._known:
            asked = self._tokenizer.encode_chat(_ASKED, add_generation_prompt=False)
            opened = self._tokenizer.encode_chat(_ASKED, add_generation_prompt=True)
            self._known["opening"] = _behind(asked, opened, "assistant")
        return self._bos(is_first) + self._known["opening"]

    def closing(self) -> list[int]:
        """Return the tokens that end the assistant's turn: what two conversations with other last words end with."""
        if "closing" not in self._known:
            one, other = (
                self._tokenizer.encode_chat(
                    [*_ASKED, {"role": "assistant", "content": text}], add_generation_prompt=False
                )
                for text in ("B", "C")
            )
            pairs = takewhile(
                lambda pair: pair[0] == pair[1], zip(reversed(one), reversed(other), strict=False)
            )
            self._known["closing"] = [token for token, _ in pairs][::-1]
        return self._known["closing"]

    def _rendered(self, role: str, content: str, opens_with_system: bool) -> list[int]:
        message = {"role": role, "content": content}
        if not opens_with_system:
            return self._delta(role, _before(role), message)
        # A template that knows system texts wants them first, and a conversation after it.
        whole = self._tokenizer.encode_chat([message, *_ASKED], add_generation_prompt=False)
        user = self._user_delta()
        if whole[-len(user) :] != user:
            raise _rewrites(role)
        return whole[: -len(user)]

    def _form(self, role: str, opens_with_system: bool) -> Form | None:
        key = role, opens_with_system
        if key not in self._forms:
            self._forms[key] = self._find_form(role, opens_with_system)
        return self._forms[key]

    def _find_form(self, role: str, opens_with_system: bool) -> Form | None:
        """Return the form of a message whose text can be encoded alone; None if there is none."""
        tokenizer = self._tokenizer
        if not tokenizer.puts_contents_out:
            return None
        probe = {"role": role, "content": _PROBE}
        messages = [probe, *_ASKED] if opens_with_system else [*_before(role), probe]
        rendered = self._render(messages)
        if rendered.count(_PROBE.strip()) != 1:
            return None
        head, _, around = rendered.partition(_PROBE.strip())
        if opens_with_system:
            user = self._render([*_ANSWERED, *_ASKED]).removeprefix(self._render(_ANSWERED))
            trail, lead, is_apart = around.removesuffix(user), head, tokenizer.begins_apart(user)
        else:
            trail, lead = around, head.removeprefix(self._render(_before(role)))
            is_apart = tokenizer.begins_apart(lead)
        space = _PROBE[0]
        form = Form(lead.removesuffix(space), trail.removeprefix(space), is_trimmed=not lead.endswith(space))
        same = tokenizer.encode(form.text(_PROBE), add_special_tokens=False) == self._rendered(
            role, _PROBE, opens_with_system
        )
        return form if is_apart and same else None

    def _render(self, messages: Sequence[Mapping[str, str]]) -> str:
        return self._tokenizer.render_chat(messages, add_generation_prompt=False)

    def _delta(self, role: str, before: Sequence[Mapping[str, str]], message: Mapping[str, str]) -> list[int]:
        key = f"before {role}"
        if key not in self._known:
            self._known[key] = self._tokenizer.encode_chat(before, add_generation_prompt=False)
        return _behind(
            self._known[key],
            self._tokenizer.encode_chat([*before, message], add_generation_prompt=False),
            role,
        )

    def _user_delta(self) -> list[int]:
        if "user" not in self._known:
            self._known["user"] = self._delta("user", _ANSWERED, _ASKED[0])
        return self._known["user"]

    def _bos(self, is_first: bool) -> list[int]:
        if not is_first:
            return []
        if "bos" not in self._known:
            begins = self._tokenizer.encode_chat(_ASKED, add_generation_prompt=False)
            bos = self._tokenizer.bos_token_id
            # Not where BOS is the token that opens each message, as in SmolLM2.
            self._known["bos"] = begins[:1] if begins[0] == bos and self._user_delta()[0] != bos else []
        return self._known["bos"]


def _before(role: str) -> Sequence[Mapping[str, str]]:
    return _ASKED if role == "assistant" else _ANSWERED


def _is_plain(content: object) -> bool:
    """Whether it is a text, and not just white space, which templates may leave out."""
    return isinstance(content, str) and bool(content.strip())


def _behind(before: list[int], whole: list[int], role: str) -> list[int]:
    if whole[: len(before)] != before:
        raise _rewrites(role)
    return whole[len(before) :]


def _rewrites(role: str) -> InvalidRequest:
    return InvalidRequest(
        f"the model's chat template changes what comes before a {role} message, so the message can't be appended alone: "
        "append the turn as text instead",
        field="role",
    )
