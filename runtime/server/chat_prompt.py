"""From a protocol's conversation to token ids: tools and calls in one form for every template, and known answers in their own tokens.

Templates differ in what they know of tools. One that shows them, renders calls or takes results is left to do so; for what it does not
know, the words of the Hermes format stand in the text, as in `phloem.runtime.frontend.session`. Schemas and arguments get one order
of keys, so that a client which writes them in another order has the same prompt.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from phloem.radix import Namespace
from phloem.runtime.engine import Engine
from phloem.runtime.errors import InvalidRequest
from phloem.runtime.frontend.session.steps import answer_of
from phloem.runtime.frontend.session.template import tool_text
from phloem.runtime.outputs import Completion
from phloem.runtime.sampling_params import SamplingParams
from phloem.runtime.server.answers import Answer, AnswerMemory, digest_after

_PROBE = "zeta_probe"


@dataclass(frozen=True, slots=True)
class Call:
    """A call of a tool, as a conversation holds it."""

    name: str
    arguments: Any
    """An object; or text, where what the model wrote is none."""

    id: str = ""

    @classmethod
    def from_json(cls, name: str, arguments: str, call_id: str) -> Call:
        """Read arguments that came as text."""
        try:
            found = json.loads(arguments) if arguments.strip() else {}
        except (ValueError, RecursionError):
            found = arguments
        return cls(name, ordered(found) if isinstance(found, dict) else arguments, call_id)

    @property
    def arguments_json(self) -> str:
        """The arguments as text."""
        return self.arguments if isinstance(self.arguments, str) else json.dumps(self.arguments)


@dataclass(frozen=True, slots=True)
class ChatMessage:
    """A message of a conversation, in no protocol's form."""

    role: str
    """`system`, `user`, `assistant` or `tool`."""

    content: str
    calls: tuple[Call, ...] = ()
    name: str | None = None
    """Of the tool whose result this is."""

    call_id: str | None = None
    """Of the call whose result this is."""


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """A conversation, ready to be answered."""

    token_ids: list[int]
    digest: bytes
    """Of the conversation; see `answers.py`."""

    begun: str = ""
    """What the answer begins with."""

    begun_ids: tuple[int, ...] = ()
    """Its tokens, at the end of `token_ids`."""


class Prompter:
    """Encodes conversations for one model. Threads may share it."""

    def __init__(self, engine: Engine, answers: AnswerMemory, *, max_messages: int) -> None:
        self._engine = engine
        self._max_messages = max_messages
        self._answers = answers

    def encode(
        self,
        messages: Sequence[ChatMessage],
        tools: Sequence[Mapping[str, Any]],
        namespace: Namespace,
        *,
        begun: str = "",
    ) -> ChatPrompt:
        """Return the prompt that asks for the next answer. Takes a while for long ones: call it in a thread.

        Args:
            messages: The conversation.
            tools: In OpenAI's form, `{"type": "function", "function": {...}}`.
            namespace: In which the answers were given.
            begun: What the next answer begins with.

        Raises:
            InvalidRequest: The template refuses it, or there are too many messages.
        """
        if len(messages) > self._max_messages:
            raise InvalidRequest(
                f"the conversation has {len(messages):,} messages; at most {self._max_messages:,} are taken",
                field="messages",
            )
        digest = (namespace.salt or "").encode()
        plain: list[dict[str, Any]] = []
        known: dict[int, Sequence[int]] = {}
        for message in messages:
            digest = _digest(digest, message.role, message.content, message.calls)
            answer = self._answers.find(digest) if message.role == "assistant" else None
            if answer is not None:
                known[len(plain)] = answer.token_ids
            self._add(plain, message, answer)
        options: dict[str, Any] = {}
        if tools and self._form.shows_tools:
            options["tools"] = [ordered(tool) for tool in tools]
        elif tools:
            known = self._tell_of_tools(plain, known, tool_text([ordered(tool) for tool in tools]))
        token_ids = self._engine.tokenizer.encode_chat(plain, template_options=options, answers=known)
        begun_ids = self._engine.tokenizer.encode_continuation(begun, parse_special_tokens=False)
        return ChatPrompt(token_ids + begun_ids, digest, begun, tuple(begun_ids))

    def remember(
        self,
        prompt: ChatPrompt,
        completion: Completion,
        params: SamplingParams,
        *,
        content: str,
        calls: Sequence[Call],
    ) -> None:
        """Remember the tokens of an answer against the content and the calls that the client was given."""
        if completion.finish_reason == "abort" or not completion.token_ids:
            return
        message = answer_of(completion, params, self._engine)
        digest = _digest(prompt.digest, "assistant", prompt.begun + content, calls)
        token_ids = (*prompt.begun_ids, *(message.token_ids or ()))
        self._answers.keep(digest, prompt.begun + message.content, token_ids)

    def _add(self, plain: list[dict[str, Any]], message: ChatMessage, answer: Answer | None) -> None:
        if answer is not None:
            # Calls stand in it as the model wrote them, so the template must not write them again.
            plain.append({"role": "assistant", "content": answer.text})
        elif message.role == "tool":
            self._add_result(plain, message)
        elif message.calls and self._form.renders_calls:
            calls = [
                {
                    "id": call.id,
                    "type": "function",
                    "function": {"name": call.name, "arguments": call.arguments},
                }
                for call in message.calls
            ]
            plain.append({"role": message.role, "content": message.content, "tool_calls": calls})
        else:
            parts = [message.content] if message.content or not message.calls else []
            parts += [hermes_call(call) for call in message.calls]
            plain.append({"role": message.role, "content": "\n".join(parts)})

    def _add_result(self, plain: list[dict[str, Any]], message: ChatMessage) -> None:
        if self._form.takes_results:
            result = {"role": "tool", "content": message.content}
            extras = {"name": message.name, "tool_call_id": message.call_id}
            plain.append({**result, **{name: value for name, value in extras.items() if value}})
            return
        text = f"<tool_response>\n{message.content}\n</tool_response>"
        if plain and plain[-1]["role"] == "user":
            plain[-1] = {"role": "user", "content": f"{plain[-1]['content']}\n{text}"}
        else:
            plain.append({"role": "user", "content": text})

    def _tell_of_tools(
        self, plain: list[dict[str, Any]], known: dict[int, Sequence[int]], text: str
    ) -> dict[int, Sequence[int]]:
        """Put a text into the system message; return the known answers by their indices after that."""
        if plain and plain[0]["role"] == "system":
            plain[0] = {"role": "system", "content": f"{plain[0]['content']}\n\n{text}"}
            return known
        plain.insert(0, {"role": "system", "content": text})
        return {index + 1: token_ids for index, token_ids in known.items()}

    @cached_property
    def _form(self) -> _TemplateForm:
        asked = [{"role": "user", "content": "Alpha?"}]
        tool = {"type": "function", "function": {"name": _PROBE, "description": "", "parameters": {}}}
        call = {"id": "abcdefghi", "type": "function", "function": {"name": _PROBE, "arguments": {}}}
        answer = {"role": "assistant", "content": "", "tool_calls": [call]}
        result = {"role": "tool", "content": _PROBE, "name": "beta", "tool_call_id": "abcdefghi"}
        return _TemplateForm(
            shows_tools=self._shows(asked, tools=[tool]),
            renders_calls=self._shows([*asked, answer]),
            takes_results=self._shows([*asked, answer, result])
            if self._shows([*asked, answer])
            else self._shows([*asked, {"role": "assistant", "content": "Gamma."}, result]),
        )

    def _shows(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> bool:
        tokenizer = self._engine.tokenizer
        try:
            return _PROBE in tokenizer.decode(tokenizer.encode_chat(messages, template_options=options))
        except InvalidRequest:
            return False


@dataclass(frozen=True, slots=True)
class _TemplateForm:
    """What a template does by itself."""

    shows_tools: bool
    renders_calls: bool
    takes_results: bool


def hermes_call(call: Call) -> str:
    """Return a call as a model of the Hermes format writes it."""
    arguments = call.arguments if isinstance(call.arguments, str) else json.dumps(call.arguments)
    return f'<tool_call>\n{{"name": {json.dumps(call.name)}, "arguments": {arguments}}}\n</tool_call>'


def ordered(value: Any) -> Any:
    """Return plain data with the keys of each object in one order: a tool's name and description first, then the alphabet's."""
    if isinstance(value, Mapping):
        keys = sorted(value, key=lambda key: (_FIRST.get(key, len(_FIRST)), key))
        return {key: ordered(value[key]) for key in keys}
    return [ordered(each) for each in value] if isinstance(value, list) else value


_FIRST = {"type": 0, "name": 1, "description": 2}


def _digest(before: bytes, role: str, content: str, calls: Sequence[Call]) -> bytes:
    # Not the ids of calls: they are of no meaning to the model.
    return digest_after(before, role, content, [[call.name, call.arguments] for call in calls])
