"""Python functions as tools: their schemas, how a model's calls are read, and how they are made.

What a model writes wrong (no JSON, no such tool, arguments that do not fit) is told to the model as the call's result. What a
tool does wrong is the program's: it raises, as `ToolFailed`, unless the toolbox says to tell that too.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import traceback
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

from phloem.runtime.errors import InvalidRequest, ToolFailed
from phloem.runtime.frontend.session.messages import ToolCall, ToolResult
from phloem.runtime.grammar import Grammar

ToolErrors = Literal["raise", "tell"]
JSON_TYPES: Mapping[str, tuple[type, ...]] = {
    "string": (str,),
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "array": (list,),
    "object": (dict,),
    "null": (type(None),),
}


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that the model may call."""

    name: str
    function: Callable[..., Any]
    schema: Mapping[str, Any]
    """`{"type": "function", "function": {"name", "description", "parameters"}}`, as chat templates want it."""

    @property
    def parameters(self) -> Mapping[str, Any]:
        """The JSON schema of its arguments."""
        parameters: Mapping[str, Any] = self.schema["function"]["parameters"]
        return parameters

    @property
    def is_async(self) -> bool:
        """Whether it is a coroutine function."""
        return inspect.iscoroutinefunction(self.function)


class Toolbox:
    """The tools of a session, and what happens with their calls.

    Args:
        functions: Their signatures and Google docstrings become schemas: each argument needs a type and a description.
        max_rounds: How often in one turn the model may call tools and be told the results.
        errors: What to do when a tool raises: `raise` ends the turn with `ToolFailed`, `tell` tells the model.

    Raises:
        InvalidRequest: A function can't be described, two have one name, or a setting is out of range.
    """

    def __init__(
        self,
        functions: Sequence[Callable[..., Any]] = (),
        *,
        max_rounds: int = 8,
        errors: ToolErrors = "raise",
    ) -> None:
        if callable(functions) or not isinstance(functions, Sequence):
            raise InvalidRequest(f"tools must be a list of functions, not {functions!r}", field="tools")
        if not isinstance(max_rounds, int) or isinstance(max_rounds, bool) or max_rounds < 1:
            raise InvalidRequest(
                f"max_rounds must be a whole number of at least 1, not {max_rounds!r}", field="max_rounds"
            )
        if errors not in get_args(ToolErrors):
            raise InvalidRequest(
                f"errors must be one of {', '.join(get_args(ToolErrors))}, not {errors!r}", field="errors"
            )
        tools = [_describe(function, f"tools[{index}]") for index, function in enumerate(functions)]
        self._tools = {tool.name: tool for tool in tools}
        if len(self._tools) < len(tools):
            raise InvalidRequest(
                f"two tools have one name, of {', '.join(tool.name for tool in tools)}", field="tools"
            )
        self.max_rounds = max_rounds
        self.errors = errors

    def __len__(self) -> int:
        return len(self._tools)

    @property
    def schemas(self) -> list[Mapping[str, Any]]:
        """Of all tools."""
        return [tool.schema for tool in self._tools.values()]

    def parse(self, text: str) -> tuple[ToolCall, ...]:
        """Return the calls in an answer; one that can't be made says what the problem is.

        Read are the formats `<tool_call>{...}</tool_call>` (Hermes, Qwen, SmolLM2), `[TOOL_CALLS] [...]` and
        `[TOOL_CALLS]name[ARGS]{...}` (Mistral), and an answer that is nothing but a JSON object with the name of a tool (Llama 3).
        """
        if not self._tools:
            return ()
        return tuple(self._checked(call) for call in calls_in(text, self._tools.keys()))

    def grammar(self) -> Grammar:
        """Return what an answer is that can't be but one call of one of the tools."""
        options = [
            {
                "type": "object",
                "properties": {
                    "name": {"const": tool.name},
                    "arguments": {**tool.parameters, "additionalProperties": False},
                },
                "required": ["name", "arguments"],
                "additionalProperties": False,
            }
            for tool in self._tools.values()
        ]
        # The layout of `json.dumps`, as for `Grammar.json_schema`: more tokens are forced, and no run of blanks is endless.
        layout = {"item_separator": ", ", "key_separator": ": ", "whitespace_flexible": False}
        call = json.dumps({"anyOf": options, "x-guidance": layout}, ensure_ascii=False)
        return Grammar.lark(f'start: "<tool_call>\\n" call "\\n</tool_call>"\ncall: %json {call}')

    def run(self, call: ToolCall) -> ToolResult:
        """Make a call.

        Raises:
            ToolFailed: The tool raised.
            InvalidRequest: The tool is a coroutine function.
        """
        if call.problem is not None:
            return ToolResult(call, call.problem, is_error=True)
        tool = self._tools[call.name]
        if tool.is_async:
            raise InvalidRequest(f"the tool {call.name} is a coroutine function; use asay", field="tools")
        try:
            return ToolResult(call, _as_text(tool.function(**call.arguments)))
        except Exception as error:
            return self._failed(call, error)

    async def arun(self, call: ToolCall) -> ToolResult:
        """Do as `run`, for an event loop; a plain function runs in a thread."""
        if call.problem is not None or not self._tools[call.name].is_async:
            return await asyncio.to_thread(self.run, call)
        try:
            return ToolResult(call, _as_text(await self._tools[call.name].function(**call.arguments)))
        except Exception as error:
            return self._failed(call, error)

    def _failed(self, call: ToolCall, error: Exception) -> ToolResult:
        if self.errors == "tell":
            return ToolResult(call, f"{type(error).__name__}: {error}", is_error=True)
        place = traceback.extract_tb(error.__traceback__)[-1]
        raise ToolFailed(
            f"the tool {call.name}({_arguments_text(call)}) raised {type(error).__name__}: {error} "
            f"({place.filename}:{place.lineno})",
            call=call,
        ) from error

    def _checked(self, call: ToolCall) -> ToolCall:
        problem = call.problem or self._problem_with(call)
        return ToolCall(call.name, call.arguments, problem)

    def _problem_with(self, call: ToolCall) -> str | None:
        tool = self._tools.get(call.name)
        if tool is None:
            return f"there is no tool {call.name!r}; there are {', '.join(self._tools)}"
        properties = tool.parameters.get("properties", {})
        for name in tool.parameters.get("required", ()):
            if name not in call.arguments:
                return f"{call.name} needs the argument {name!r}"
        for name, value in call.arguments.items():
            if name not in properties:
                return f"{call.name} has no argument {name!r}; it has {', '.join(properties) or 'none'}"
            if not _fits(value, properties[name]):
                return f"the argument {name!r} of {call.name} must fit {json.dumps(properties[name])}, not {value!r}"
        return None


def _describe(function: Callable[..., Any], field: str) -> Tool:
    from transformers.utils.chat_template_utils import get_json_schema

    if not callable(function):
        raise InvalidRequest(f"{field} must be a function, not {function!r}", field=field)
    try:
        schema = get_json_schema(function)
    except (
        Exception
    ) as error:  # of several kinds: for a missing docstring, type or description, and for odd types
        name = getattr(function, "__name__", repr(function))
        raise InvalidRequest(
            f"{field} ({name}) can't be a tool: {error} A tool needs a docstring with a line for each argument "
            "under 'Args:', and a type for each.",
            field=field,
        ) from error
    return Tool(schema["function"]["name"], function, schema)


def calls_in(text: str, names: Collection[str]) -> list[ToolCall]:
    """Return the calls in an answer, in the formats that `Toolbox.parse` names; one that is malformed says what the problem is.

    Args:
        text: The answer.
        names: Of the tools there are; an answer that is nothing but JSON is a call only of one of these.
    """
    if "<tool_call>" in text:
        bodies = [part.partition("</tool_call>")[0] for part in text.split("<tool_call>")[1:]]
        return [call for body in bodies for call in _calls_of(body)]
    if "[TOOL_CALLS]" in text:
        body = text.partition("[TOOL_CALLS]")[2]
        return _calls_of(body) if body.lstrip().startswith(("[", "{")) else _named_calls(body)
    alone = text.strip().removeprefix("<|python_tag|>").strip()
    if not alone.startswith("{"):
        return []
    # An answer may be JSON without being a call: only one that names a tool is.
    return [call for call in _calls_of(alone) if call.problem is None and call.name in names]


def _calls_of(body: str) -> list[ToolCall]:
    """Read one call, or a list of them."""
    try:
        found = json.loads(body)
    except (ValueError, RecursionError) as error:
        return [ToolCall("", problem=f"the call is no JSON ({error}): {body.strip()!r}")]
    return [_call_of(each) for each in (found if isinstance(found, list) else [found])]


def _named_calls(body: str) -> list[ToolCall]:
    """Read `name[ARGS]{...}`, once or several times with `[TOOL_CALLS]` in between; `[CALL_ID]` and an id may follow the name."""
    calls: list[ToolCall] = []
    more = True
    while more:
        head, _, rest = body.partition("[ARGS]")
        rest = rest.lstrip()
        try:
            arguments, end = json.JSONDecoder().raw_decode(rest)
        except (ValueError, RecursionError) as error:
            return [
                *calls,
                ToolCall("", problem=f"the call is no name[ARGS]{{...}} ({error}): {body.strip()!r}"),
            ]
        calls.append(_call_of({"name": head.partition("[CALL_ID]")[0].strip(), "arguments": arguments}))
        _, mark, body = rest[end:].partition("[TOOL_CALLS]")
        more = bool(mark)
    return calls


def _call_of(found: object) -> ToolCall:
    if isinstance(found, dict) and isinstance(found.get("name"), str):
        arguments = found.get("arguments", found.get("parameters", {}))
        if isinstance(arguments, dict):
            return ToolCall(found["name"], arguments)
    return ToolCall(
        "",
        problem=f'a call is {{"name": ..., "arguments": {{...}}}}, not {json.dumps(found, ensure_ascii=False)}',
    )


def _fits(value: object, schema: Mapping[str, Any]) -> bool:
    """Tell whether a value is of a schema's type; nothing deeper is looked at."""
    if value is None and schema.get("nullable"):
        return True
    if "enum" in schema:
        return value in schema["enum"]
    kinds = schema.get("type")
    if kinds is None:
        return True
    allowed = [kind for name in ([kinds] if isinstance(kinds, str) else kinds) for kind in JSON_TYPES[name]]
    return isinstance(value, tuple(allowed)) and (not isinstance(value, bool) or bool in allowed)


def _as_text(result: object) -> str:
    return result if isinstance(result, str) else json.dumps(result, ensure_ascii=False, default=str)


def _arguments_text(call: ToolCall) -> str:
    return ", ".join(f"{name}={value!r}" for name, value in call.arguments.items())
