"""A model's chat template as a session uses it, and a probe for what it does with the past.

A template is *prefix-stable* when the tokens of a conversation so far are the beginning of those of its next turn. Then a turn
appends. Many are not: they leave thinking out of earlier answers, trim spaces, or put the system text or the tools into the newest
message. Nothing has to be known of that for a right prompt: each turn's is rendered whole, what the model wrote stands in it as the
ids that it wrote, and what it has in common with the last is reused. The probe tells beforehand what that will be.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from phloem.runtime.errors import InvalidRequest
from phloem.runtime.frontend.session.messages import Message
from phloem.runtime.frontend.session.tools import Toolbox

if TYPE_CHECKING:
    from phloem.runtime.engine import Engine

ASKED, ASKED_NEXT, RESULT = "Alpha?", "Beta?", "Gamma."
PLAIN_ANSWER, SPACED_ANSWER = "Delta.", " \nDelta. \n"
THOUGHT_ANSWER = "<think>\nEpsilon.\n</think>\n\nDelta."
MAX_WORDS_OF_ITS_OWN = 2
"""Before the first message stand a role's name and the like; more is a text that nobody asked for."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class TemplateReport:
    """What the probe found."""

    rewrites: tuple[str, ...]
    """What the template does to the past, in words; empty when it is prefix-stable."""

    own_text: str
    """What it puts before the first message unasked, such as a default system text; else empty."""

    shows_tools: bool
    """Whether it tells the model of the tools; else the session does, in the system text."""

    takes_tool_results: bool
    """Whether it knows the role `tool`; else the session tells results as the user's."""

    @property
    def is_stable(self) -> bool:
        """Whether each turn only appends."""
        return not self.rewrites


class ChatTemplate:
    """Turns a session's messages into token ids. Holds no state that a call changes."""

    def __init__(
        self, engine: Engine, *, system: str | None, toolbox: Toolbox, options: Mapping[str, Any]
    ) -> None:
        """Probe the template, and say once in the log what it does to the past.

        Raises:
            InvalidRequest: The model has no template, or it refuses the system message or an option.
        """
        self._tokenizer = engine.tokenizer
        self._toolbox = toolbox
        self._options = {**options, "tools": toolbox.schemas} if len(toolbox) else dict(options)
        self._beginning = [] if system is None else [_message("system", system)]
        self._render([*self._beginning, _message("user", ASKED)])
        self.report = self._probe()
        if not self.report.shows_tools and len(toolbox):
            text = tool_text(toolbox.schemas)
            self._beginning = [_message("system", text if system is None else f"{system}\n\n{text}")]
        if not self.report.is_stable:
            _warn_once(", ".join(self.report.rewrites))

    def encode(self, messages: Sequence[Message], *, opens_answer: bool = True) -> list[int]:
        """Return the ids of the system message and these; what the model generated stands as it was generated.

        Args:
            messages: Of the turns.
            opens_answer: End with the opening of the model's next answer.

        Raises:
            InvalidRequest: The template refuses them.
        """
        plain = list(self._beginning)
        answers = {}
        for message in messages:
            if message.token_ids is not None:
                answers[len(plain)] = message.token_ids
            self._add(plain, message)
        return self._render(plain, answers, opens_answer=opens_answer) if plain else []

    def _add(self, plain: list[dict[str, Any]], message: Message) -> None:
        if message.role != "tool":
            # Calls stand in the content as the model wrote them, so the template must not write them again.
            plain.append(_message(message.role, message.content))
        elif self.report.takes_tool_results:
            plain.append({**_message("tool", message.content), "name": message.name})
        else:
            text = f"<tool_response>\n{message.content}\n</tool_response>"
            if plain and plain[-1]["role"] == "user":
                plain[-1] = _message("user", f"{plain[-1]['content']}\n{text}")
            else:
                plain.append(_message("user", text))

    def _render(
        self,
        plain: list[dict[str, Any]],
        answers: Mapping[int, Sequence[int]] | None = None,
        *,
        opens_answer: bool = True,
        shows_tools: bool = True,
    ) -> list[int]:
        options = self._options if shows_tools else {**self._options, "tools": None}
        return self._tokenizer.encode_chat(
            plain, add_generation_prompt=opens_answer, template_options=options, answers=answers
        )

    def _probe(self) -> TemplateReport:
        asked = [*self._beginning, _message("user", ASKED)]
        text = self._tokenizer.decode(self._render(asked))
        before, _, _ = text.partition(ASKED)
        called = [*asked, _message("assistant", PLAIN_ANSWER), {**_message("tool", RESULT), "name": "zeta"}]
        return TemplateReport(
            rewrites=self._rewrites(),
            own_text=before.strip()
            if not self._beginning and _num_words(before) > MAX_WORDS_OF_ITS_OWN
            else "",
            shows_tools=all(schema["function"]["name"] in text for schema in self._toolbox.schemas),
            takes_tool_results=RESULT in self._decoded(called),
        )

    def _rewrites(self) -> tuple[str, ...]:
        """Tell what becomes of an answered question when the next one is asked."""
        if not self._appends([], PLAIN_ANSWER) and self._appends([], PLAIN_ANSWER, shows_tools=False):
            found = ["moves the tools"]
        elif not self._appends([], PLAIN_ANSWER):
            found = ["renders earlier turns in another way than when they were new"]
        else:
            found = []
            if not self._appends([_message("system", RESULT)], PLAIN_ANSWER):
                found.append("moves the system text")
            if not self._appends([], SPACED_ANSWER):
                found.append("trims the spaces around earlier answers")
            if not self._appends([], THOUGHT_ANSWER):
                found.append("leaves the thinking out of earlier answers")
        return tuple(found)

    def _appends(self, beginning: list[dict[str, Any]], answer: str, *, shows_tools: bool = True) -> bool:
        asked = [*beginning, _message("user", ASKED)]
        ids = self._tokenizer.encode(answer, add_special_tokens=False)
        followed = [*asked, _message("assistant", answer), _message("user", ASKED_NEXT)]
        try:
            before = [*self._render(asked, shows_tools=shows_tools), *ids]
            after = self._render(followed, {len(asked): ids}, shows_tools=shows_tools)
        except InvalidRequest:
            return True  # it refuses a system message, say: then no session can bring it there
        return after[: len(before)] == before

    def _decoded(self, plain: list[dict[str, Any]]) -> str:
        try:
            return self._tokenizer.decode(self._render(plain))
        except InvalidRequest:
            return ""


def tool_text(schemas: Sequence[Mapping[str, Any]]) -> str:
    """Return what tells a model of its tools, in Hermes' words, where the template does not."""
    lines = "\n".join(json.dumps(schema, ensure_ascii=False) for schema in schemas)
    return (
        f"You may call functions. They are described here, one a line:\n<tools>\n{lines}\n</tools>\n"
        "To call one, answer with its name and arguments as JSON:\n"
        '<tool_call>\n{"name": "...", "arguments": {...}}\n</tool_call>'
    )


def _message(role: str, content: str) -> dict[str, Any]:
    return {"role": role, "content": content}


def _num_words(text: str) -> int:
    return len(re.findall(r"\w+", text))


@lru_cache
def _warn_once(rewrites: str) -> None:
    logger.warning(
        "the model's chat template rewrites the past (it %s): what follows a rewritten place is computed again",
        rewrites,
    )
