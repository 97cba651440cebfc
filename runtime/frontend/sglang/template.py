"""A model's chat template in the form that SGLang's interpreter takes: a text before and after each role's words."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sglang.lang.chat_template import ChatTemplate, get_chat_template

from phloem.runtime.engine import Engine
from phloem.runtime.errors import InvalidRequest
from phloem.runtime.frontend.program.roles import Roles

_WORDS = "phloem"
"""Stands for the words of a message, to find what a template puts around them."""


class ModelTemplate(ChatTemplate):  # type: ignore[misc]
    """As found in the model's own template. A role that it has none for is refused."""

    def get_prefix_and_suffix(self, role: str, hist_messages: Sequence[Any]) -> tuple[str, str]:
        """Return what is before and after the words of a role.

        Raises:
            InvalidRequest: The model's chat template has no such role.
        """
        if role not in self.role_prefix_and_suffix:
            raise InvalidRequest(
                f"the model's chat template takes no {role!r} messages that could be appended alone; "
                f"pass chat_template= to PhloemBackend, or append the turn as text",
                field="role",
            )
        around: tuple[str, str] = self.role_prefix_and_suffix[role]
        return around


def template_of(engine: Engine) -> ChatTemplate:
    """Return the model's template; SGLang's "default" (USER:, ASSISTANT:) for a model that has none."""
    if not engine.tokenizer.has_chat_template:
        return get_chat_template("default")
    roles = Roles(engine)
    around: dict[str, tuple[str, str]] = {}
    for role in ("system", "user", "assistant"):
        try:
            around[role] = _around(engine, roles, role)
        except InvalidRequest:
            continue
    default_system = _default_system(engine, roles, around)
    return ModelTemplate("phloem", default_system, around)


def _around(engine: Engine, roles: Roles, role: str) -> tuple[str, str]:
    decode = engine.tokenizer.decode
    if role == "assistant":
        opening, closing = roles.opening(is_first=False), roles.closing()
        return decode(opening, skip_special_tokens=False), decode(closing, skip_special_tokens=False)
    is_first = role == "system"
    ids = roles.message(role, _WORDS, is_first=is_first)
    text = decode(ids[_num_bos(roles) if is_first else 0 :], skip_special_tokens=False)
    before, words, after = text.partition(_WORDS)
    if not words:
        raise InvalidRequest(f"the template does not show a {role} message's words", field="role")
    return before, after


def _num_bos(roles: Roles) -> int:
    """How many tokens a first message has more: BOS, which appending the first text brings by itself."""
    first, later = (roles.message("user", _WORDS, is_first=is_first) for is_first in (True, False))
    return len(first) - len(later)


def _default_system(engine: Engine, roles: Roles, around: dict[str, tuple[str, str]]) -> str | None:
    """The system message that the template writes when a conversation has none."""
    if not {"system", "user"} <= set(around):
        return None
    tokenizer = engine.tokenizer
    whole = tokenizer.encode_chat([{"role": "user", "content": _WORDS}], add_generation_prompt=False)
    text = tokenizer.decode(whole[_num_bos(roles) :], skip_special_tokens=False)
    (start, end), user = around["system"], _WORDS.join(around["user"])
    shown = text.removesuffix(user)
    if shown == text or not (shown.startswith(start) and shown.endswith(end)):
        return None
    return shown[len(start) : len(shown) - len(end)] or None
