"""What a chat template adds for one message, as tokens: programs append turns, they never render a conversation anew.

The delta of a message is what the template gives for a short conversation with it, less what it gives for the same without.
A first user message therefore brings no default system text; the template's BOS comes with the first message of a path.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import takewhile

from phloem.runtime.engine import Engine
from phloem.runtime.errors import InvalidRequest

_ASKED = ({"role": "user", "content": "A"},)
_ANSWERED = (*_ASKED, {"role": "assistant", "content": "B"})


class Roles:
    """The deltas of one model's chat template. Holds what it found out; threads may share it."""

    def __init__(self, engine: Engine) -> None:
        self._tokenizer = engine.tokenizer
        self._known: dict[str, list[int]] = {}

    def message(self, role: str, content: str, *, is_first: bool) -> list[int]:
        """Return the tokens of a whole message.

        Args:
            role: "system", "user" or "assistant".
            content: Special tokens' spellings in it stay text.
            is_first: Whether the path is empty so far.

        Raises:
            InvalidRequest: The template refuses the message, or rewrites earlier ones.
        """
        message = {"role": role, "content": content}
        if role == "system" and is_first:
            # A template that knows system texts wants them first, and a conversation after it.
            whole = self._tokenizer.encode_chat([message, *_ASKED], add_generation_prompt=False)
            user = self._user_delta()
            if whole[-len(user) :] != user:
                raise _rewrites(role)
            return whole[: -len(user)]
        before = _ASKED if role == "assistant" else _ANSWERED
        return self._bos(is_first) + self._delta(role, before, message)

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
