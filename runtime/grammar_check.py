"""Why a grammar can't be used: the place, the reason and a way out, for the messages of `GrammarError`.

llguidance says what is wrong with a JSON schema, but not where. The place is found by compiling parts of the
schema alone: the deepest part that fails in the same way is it. That costs a compilation for each part on the
way down, on failure only. Schemas whose values could never end (a list whose ``next`` is required) pass
llguidance; `refuse_endless` finds those.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from phloem.runtime.errors import GrammarError

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions

_Container = TypeVar("_Container", list[Any], dict[str, Any])

_MAX_PROBES = 1000
"""Parts compiled in search of a place; after that the place is the best one so far."""

_MAX_SHOWN = 40
"""Characters of a pattern that a message shows, before and after the place."""

_SCHEMA_MAPS = ("properties", "patternProperties")
_SCHEMA_LISTS = ("prefixItems", "anyOf", "oneOf", "allOf", "items")
_SCHEMAS = ("items", "additionalItems", "additionalProperties", "not", "if", "then", "else")

_WAYS_OUT = (
    ("Unsatisfiable", "no value satisfies this: relax what contradicts"),
    (
        "Unimplemented",
        "this keyword is not supported: remove it, or say it with type, properties, items, enum, anyOf",
    ),
    ("oneOf", "the alternatives overlap: make them exclusive by a const or a type, or use anyOf"),
    (
        "Unknown format",
        "use pattern, or one of date-time, date, time, duration, email, hostname, ipv4, ipv6, uuid, uri",
    ),
    ("look", "look-around and word boundaries are not supported: rewrite the pattern without"),
    ("backreference", "rewrite the pattern without"),
    ("Pointer", "a $ref must point to a part of this schema, such as #/$defs/name"),
    ("Resource", "put the definition under $defs: nothing is fetched, and $schema must be a known draft"),
    ("recursion limit", "it is nested too deeply: move parts to $defs"),
)

_TRACE = "\n  while processing"
"""Begins the lines in which llguidance adds the references that it followed."""

_ANCHORS = {"WordUnicodeNegate": r"\B", "WordUnicode": r"\b", "Start": "^", "End": "$"}
"""llguidance's names of the anchors, which it refuses without a position."""


def json_grammar(schema: str, *, flexible_whitespace: bool) -> str:
    """Return a JSON schema, which must be an object, as llguidance takes it.

    Raises:
        GrammarError: It is nested beyond what llguidance reads (about 120 levels).
    """
    from llguidance import LLMatcher

    if flexible_whitespace:
        # bounded, or a model that likes blanks would never end
        layout: JsonCompileOptions = {"whitespace_pattern": r"[\x20\x0A\x0D\x09]{1,64}"}
    else:
        layout = {"item_separator": ", ", "key_separator": ": ", "whitespace_flexible": False}
    try:
        # "lenient" in a schema's x-guidance would drop the keywords that are not supported
        return LLMatcher.grammar_from_json_schema(schema, layout, {"lenient": False})
    except ValueError as error:
        raise GrammarError(
            f"the JSON schema can't be used: {error}; {_way_out(str(error))}", field="grammar"
        ) from error


def explain(kind: str, text: str, message: str) -> GrammarError:
    """Return the error for a grammar that llguidance refuses.

    Args:
        kind: The `Grammar`'s kind.
        text: Its text.
        message: What llguidance said.
    """
    if kind == "json_schema":
        root = json.loads(text)
        pointer, message = _SchemaSearch(root).find(message)
        refused = _resolve(root, pointer)
        pattern = refused if pointer.endswith("/pattern") and isinstance(refused, str) else None
        reason = f"the JSON schema can't be used, at #{pointer}: {_reason(message, pattern)}"
    elif kind == "lark":
        place = re.match(r"(?:at )?(\d+)\((\d+)\): (.*)", message, re.DOTALL)
        at = f", at line {place[1]}, column {place[2]}" if place else ""
        reason = f"the Lark grammar can't be used{at}: {_reason(place[3] if place else message)}"
    else:
        reason = f"the {kind} can't be used: {_reason(message, text)}"
    return GrammarError(f"{reason}; {_way_out(message)}", field="grammar")


def _way_out(message: str) -> str:
    return next((way for sign, way in _WAYS_OUT if sign in message), "correct it there")


def _reason(message: str, pattern: str | None = None) -> str:
    """Return llguidance's message in one line, with the position in the pattern if it is about one.

    Args:
        message: What llguidance said.
        pattern: The pattern as the user wrote it, where llguidance shows another spelling of it.
    """
    error = re.search(r"regex parse error:\n    (.*)\n( *)\^[ ^]*\nerror: (.*)", message)
    refused = re.search(r"lookarounds not supported yet; (\w+) in regex /(.*)/", message)
    if error:
        shown, position, what = error[1], len(error[2]) - 4, error[3]
    elif refused and (anchor := _ANCHORS.get(refused[1])) and anchor in refused[2]:
        shown, position, what = refused[2], refused[2].index(anchor), f"{anchor} is not supported there"
    else:
        # a pattern of several lines is shown in a table, with the reason at its end
        spread = re.search(r"\nerror: (.*)", message)
        return spread[1] if spread else message.partition("\n")[0]
    if pattern is not None:
        shown, position = pattern, _own_position(pattern, position)
    near = shown[max(0, position - _MAX_SHOWN) : position + _MAX_SHOWN]
    return f"{what}, at character {position} of the pattern{'' if near == shown else ', near'} {near!r}"


def _own_position(pattern: str, shown_position: int) -> int:
    r"""Return the position in the user's pattern: llguidance shows ``/`` as ``\/``, line ends as ``\n``."""
    position = num_shown = 0
    while num_shown < shown_position and position < len(pattern):
        width = 2 if pattern[position] == "\\" else 1
        num_shown += 2 if width == 2 or pattern[position] in "/\n" else 1
        position += width
    return position


@dataclass(frozen=True, slots=True)
class _Part:
    """A part of a schema, usually a schema itself, and its JSON pointer."""

    pointer: str
    schema: object


class _SchemaSearch:
    """Finds the part of a schema that llguidance refuses."""

    def __init__(self, root: dict[str, Any]) -> None:
        self._root = root
        self._num_probes = 0

    def find(self, message: str) -> tuple[str, str]:
        """Return the JSON pointer of what is refused with `message`, and the message about that very part."""
        part = _Part("", self._root)
        seen = {part.pointer}
        while True:
            for child in _children(part, self._root):
                if child.pointer in seen or not isinstance(child.schema, dict | bool):
                    continue
                if (said := self._probe(child.schema)) and _same_cause(message, said):
                    seen.add(child.pointer)
                    part, message = child, said
                    break
            else:
                return part.pointer + self._keyword(part.schema, message), message

    def _keyword(self, schema: object, message: str) -> str:
        """Return the keyword to blame, ``/`` in front: the first without which the message is another.

        ``type`` comes last, since without it nearly everything is allowed.
        """
        if not isinstance(schema, dict):
            return ""
        for key in sorted(schema, key=lambda key: key == "type"):
            rest = {other: value for other, value in schema.items() if other != key}
            said = self._probe(rest)
            if key not in ("$defs", "definitions") and said is not None and said != message:
                return f"/{_escape(key)}"
        return ""

    def _probe(self, schema: object) -> str | None:
        """Return what llguidance says of this part alone, empty if nothing; None if enough was asked."""
        from llguidance import LLMatcher

        self._num_probes += 1
        if self._num_probes > _MAX_PROBES:
            return None
        if not isinstance(schema, dict):
            text = json.dumps({"allOf": [schema]})
        else:
            text = json.dumps(schema)
            kept = ("$schema", "$defs", "definitions") if '"$ref"' in text else ("$schema",)
            text = json.dumps({**{key: self._root[key] for key in kept if key in self._root}, **schema})
        return LLMatcher.validate_grammar(json_grammar(text, flexible_whitespace=False))


def refuse_endless(root: dict[str, Any]) -> None:
    """Raise `GrammarError` if every value of a schema would contain another one, without end.

    A part can end if each of its requirements has an alternative that can end: a least fixed point over the
    parts that are required. Linear in the schema, but for chains of references against their order.
    """
    requirements: dict[str, list[list[str]]] = {}
    todo = [""]
    while todo:
        pointer = todo.pop()
        if pointer not in requirements:
            requirements[pointer] = list(_requirements(pointer, _resolve(root, pointer)))
            todo += [part for group in requirements[pointer] for part in group]
    ending: set[str] = set()
    grown = True
    while grown:
        before = len(ending)
        for pointer in reversed(requirements):
            if all(any(part in ending for part in group) for group in requirements[pointer]):
                ending.add(pointer)
        grown = len(ending) > before
    if "" not in ending:
        endless = next(pointer for pointer in reversed(requirements) if pointer not in ending)
        raise GrammarError(
            f"the JSON schema can't be satisfied, at #{endless}: "
            "each value requires another one inside, without end; "
            "make the property that leads back optional, or allow null there",
            field="grammar",
        )


def _requirements(pointer: str, schema: object) -> Iterator[list[str]]:
    """Yield what a value of this part must contain or be: groups of pointers, one of each group."""
    if not isinstance(schema, dict) or "enum" in schema or "const" in schema:
        return
    if (target := _target(schema)) is not None:
        yield [target]
    for index in range(len(_get(schema, "allOf", list))):
        yield [f"{pointer}/allOf/{index}"]
    for key in ("anyOf", "oneOf"):
        if alternatives := _get(schema, key, list):
            yield [f"{pointer}/{key}/{index}" for index in range(len(alternatives))]
    # without a type, or with several, a value of another type ends it
    if schema.get("type") == "object":
        # a name that is no property leads to no part, which requires nothing
        yield from ([f"{pointer}/properties/{_escape(name)}"] for name in _get(schema, "required", list))
    elif schema.get("type") == "array":
        num_prefixed, num_required = len(_get(schema, "prefixItems", list)), int(schema.get("minItems", 0))
        yield from ([f"{pointer}/prefixItems/{index}"] for index in range(min(num_required, num_prefixed)))
        yield from ([f"{pointer}/items"] for _ in range(num_required > num_prefixed))


def _children(part: _Part, root: dict[str, Any]) -> Iterator[_Part]:
    """Yield the parts of a part that llguidance compiles with it."""
    pointer, schema = part.pointer, part.schema
    if not isinstance(schema, dict):
        return
    if (target := _target(schema)) is not None:
        yield _Part(target, _resolve(root, target))
    required = _get(schema, "required", list)
    for key in _SCHEMA_MAPS:
        parts = _get(schema, key, dict)
        # a required property first: an optional one may be unsatisfiable without harm
        for name in sorted(parts, key=lambda name: name not in required):
            yield _Part(f"{pointer}/{key}/{_escape(name)}", parts[name])
    for key in _SCHEMA_LISTS:
        for index, schema_of_list in enumerate(_get(schema, key, list)):
            yield _Part(f"{pointer}/{key}/{index}", schema_of_list)
    for key in _SCHEMAS:
        if key in schema:
            yield _Part(f"{pointer}/{key}", schema[key])


def _target(schema: dict[str, Any]) -> str | None:
    """Return the pointer that a part refers to inside its own schema, if it does."""
    reference = schema.get("$ref")
    if isinstance(reference, str) and (reference == "#" or reference.startswith("#/")):
        return reference[1:]
    return None


def _get(schema: dict[str, Any], key: str, kind: type[_Container]) -> _Container:
    """Return a keyword's value, empty if there is none or if it is malformed."""
    value = schema.get(key)
    return value if isinstance(value, kind) else kind()


def _same_cause(message: str, part_message: str) -> bool:
    """Whether a part's failure is the whole's, which says the same or that a part can't be satisfied."""
    if re.match(r"Unsatisfiable schema: (required|prefixItems).* is unsatisfiable", message):
        return part_message.startswith("Unsatisfiable")
    return message.partition(_TRACE)[0] == part_message.partition(_TRACE)[0]


def _resolve(root: dict[str, Any], pointer: str) -> object:
    """Return the part at a JSON pointer; None if there is none."""
    part: Any = root
    for token in pointer.split("/")[1:]:
        key = token.replace("~1", "/").replace("~0", "~")
        if isinstance(part, list) and key.isdecimal() and int(key) < len(part):
            part = part[int(key)]
        elif isinstance(part, dict) and key in part:
            part = part[key]
        else:
            return None
    return part


def _escape(key: str) -> str:
    return key.replace("~", "~0").replace("/", "~1")
