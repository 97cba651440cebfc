"""Calls of tools in what a model writes: forced by a grammar, found in a whole answer, or in one that is still being written."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from phloem.runtime.detokenizer import StopChecker
from phloem.runtime.frontend.session.tools import calls_in
from phloem.runtime.grammar import Grammar
from phloem.runtime.server.chat_prompt import Call, ordered
from phloem.runtime.server.errors import invalid

MARKS = ("<tool_call>", "[TOOL_CALLS]")
"""Where calls begin; a model that writes plain JSON begins with that."""

_LAYOUT = {"item_separator": ", ", "key_separator": ": ", "whitespace_flexible": False}
"""The layout of `json.dumps`, as for `Grammar.json_schema`: more tokens are forced, and no run of blanks is endless."""


@dataclass(frozen=True, slots=True)
class ToolUse:
    """Which tools an answer may call."""

    schemas: Mapping[str, Mapping[str, Any]]
    """Of the arguments, by name."""

    mode: Literal["none", "auto", "required"] = "auto"
    allows_several: bool = True

    @property
    def reads_calls(self) -> bool:
        """Whether calls are looked for in the answer."""
        return bool(self.schemas) and self.mode != "none"

    def grammar(self, schema: Mapping[str, Any] | None, *, max_bytes: int) -> Grammar | None:
        """Return what the answer may be; None if it may be anything.

        Args:
            schema: What it is to be if it is no call.
            max_bytes: Limit of all schemas together.

        Raises:
            ApiError: The schemas are larger.
            GrammarError: One is no JSON.
        """
        forced = self.reads_calls and self.mode == "required"
        if not forced and schema is None:
            return None
        if not self.reads_calls:
            assert schema is not None
            _check_size(schema, max_bytes, "response_format")
            return Grammar.json_schema(schema)
        _check_size([self.schemas, schema], max_bytes, "tools")
        several = ' ("\\n" call)*' if self.allows_several else ""
        start = f"call{several}" if forced or schema is None else f"call{several} | json"
        rules = [f"start: {start}", 'call: "<tool_call>\\n" body "\\n</tool_call>"']
        rules.append(f"body: %json {_with_layout(self._any_call())}")
        if not forced and schema is not None:
            rules.append(f"json: %json {_with_layout(schema)}")
        return Grammar.lark("\n".join(rules))

    def _any_call(self) -> dict[str, Any]:
        options = [
            {
                "type": "object",
                "properties": {"name": {"const": name}, "arguments": schema or {"type": "object"}},
                "required": ["name", "arguments"],
                "additionalProperties": False,
            }
            for name, schema in self.schemas.items()
        ]
        return options[0] if len(options) == 1 else {"anyOf": options}


@dataclass(frozen=True, slots=True)
class ReadAnswer:
    """An answer, taken apart."""

    content: str
    calls: tuple[Call, ...] = ()


def read_answer(text: str, names: Collection[str]) -> ReadAnswer:
    """Return the calls in an answer and the text before them. One whose calls are malformed is all text."""
    found = calls_in(text, names)
    if not found or any(call.problem is not None or call.name not in names for call in found):
        return ReadAnswer(text)
    begin = min((text.find(mark) for mark in MARKS if mark in text), default=0)
    calls = tuple(Call(call.name, ordered(dict(call.arguments))) for call in found)
    return ReadAnswer(text[:begin].rstrip(), calls)


class AnswerReader:
    """Reads an answer while it is written: gives text as soon as it can't be part of a call, and calls at the end."""

    def __init__(self, names: Collection[str]) -> None:
        """Look for calls of the tools of these names; of none, and all is text."""
        self._names = names
        self._marks = StopChecker(MARKS if names else ())
        self._text = ""
        self._num_given = 0
        self._held = ""

    def push(self, delta: str) -> str:
        """Take what was written; return what of it is certainly text."""
        self._text += delta
        if not self._names:
            return delta
        if self._text.lstrip().startswith(("{", "<|python_tag|>")):
            return ""
        # The spaces before a call are no part of the content.
        shown = self._held + self._marks.push(delta)
        given = shown.rstrip()
        self._held = shown[len(given) :]
        self._num_given += len(given)
        return given

    def end(self) -> ReadAnswer:
        """Return what was not given yet: the rest of the text, and the calls."""
        if not self._names:
            return ReadAnswer("")
        whole = read_answer(self._text, self._names)
        return ReadAnswer(whole.content[self._num_given :], whole.calls)


def _with_layout(schema: Mapping[str, Any]) -> str:
    return json.dumps({**schema, "x-guidance": _LAYOUT})


def _check_size(schemas: Any, max_bytes: int, field: str) -> None:
    num_bytes = len(json.dumps(schemas))
    if num_bytes > max_bytes:
        raise invalid(f"the schemas have {num_bytes:,} bytes; at most {max_bytes:,} are compiled", field)


def tool_use(
    tools: Sequence[Mapping[str, Any]],
    mode: Literal["none", "auto", "required"] | None,
    *,
    chosen: str | None = None,
    several: bool | None = None,
) -> ToolUse:
    """Return which tools an answer may call.

    Args:
        tools: In OpenAI's form, `{"type": "function", "function": {...}}`.
        mode: What the request says; None is `auto`.
        chosen: The one tool that must be called.
        several: Whether an answer may have several calls. None: if they are not forced.

    Raises:
        ApiError: Two tools have one name, or what must be called is none of them.
    """
    schemas = {tool["function"]["name"]: tool["function"].get("parameters") or {} for tool in tools}
    if len(schemas) < len(tools):
        raise invalid("two tools have the same name", "tools")
    if chosen is not None:
        if chosen not in schemas:
            raise invalid(f"tool_choice names {chosen!r}, which is none of the tools", "tool_choice")
        return ToolUse({chosen: schemas[chosen]}, "required", allows_several=False)
    if mode == "required" and not tools:
        raise invalid("tool_choice is required, but there are no tools", "tool_choice")
    return ToolUse(schemas, mode or "auto", allows_several=mode != "required" if several is None else several)
