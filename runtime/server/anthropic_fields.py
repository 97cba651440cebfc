"""The requests of Anthropic's protocol, and what of them goes to the engine.

Unknown fields are refused, but for those of content blocks: clients send back what they were given, with whatever their SDK adds to it.
Known ones that mean nothing to one process with one model are taken and have none (`metadata`, `service_tier`, ...). `seed`, `min_p`, `min_tokens`,
`ignore_eos` and `cache_salt` are not Anthropic's; they are named as in the other protocols.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import BaseModel, BeforeValidator, ConfigDict, Discriminator, Field, Tag, field_validator

from phloem.radix import Namespace
from phloem.runtime.grammar import Grammar
from phloem.runtime.sampling_params import MAX_STOP_STRINGS, SamplingParams
from phloem.runtime.server.auth import Tenant
from phloem.runtime.server.openai_messages import Function, tool_dict
from phloem.runtime.server.tool_calls import ToolUse, tool_use


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class _Block(BaseModel):
    model_config = ConfigDict(strict=True)


class CacheControl(_Strict):
    """Marks the end of what is to be kept in the cache."""

    type: Literal["ephemeral"]
    ttl: Literal["5m", "1h"] | None = None
    """None is five minutes; they begin anew with every use."""


class TextBlock(_Block):
    """Text."""

    type: Literal["text"]
    text: str
    cache_control: CacheControl | None = None


class ToolUseBlock(_Block):
    """A call of a tool, in a message of the assistant's."""

    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]
    cache_control: CacheControl | None = None


def _as_blocks(content: object) -> object:
    """Text is short for one block of it."""
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


TextBlocks: TypeAlias = Annotated[
    list[TextBlock], BeforeValidator(_as_blocks, json_schema_input_type=str | list[TextBlock])
]


class ToolResultBlock(_Block):
    """What a call gave, in a message of the user's."""

    type: Literal["tool_result"]
    tool_use_id: str
    content: TextBlocks = Field(default_factory=list)
    is_error: bool | None = None
    cache_control: CacheControl | None = None


_BLOCKS = {"text": "TextBlock", "tool_use": "ToolUseBlock", "tool_result": "ToolResultBlock"}


def _tag_of(block: object) -> str | None:
    kind = block.get("type") if isinstance(block, Mapping) else getattr(block, "type", None)
    return _BLOCKS.get(kind) if isinstance(kind, str) else None


Block: TypeAlias = Annotated[
    Annotated[TextBlock, Tag("TextBlock")]
    | Annotated[ToolUseBlock, Tag("ToolUseBlock")]
    | Annotated[ToolResultBlock, Tag("ToolResultBlock")],
    Discriminator(
        _tag_of,
        custom_error_type="unsupported_block",
        custom_error_message="the block's type must be text, tool_use or tool_result; images, documents and thinking are not supported",
    ),
]


class Message(_Block):
    """A message of a conversation."""

    role: Literal["user", "assistant", "system"]
    content: Annotated[list[Block], BeforeValidator(_as_blocks, json_schema_input_type=str | list[Block])]


class Tool(_Block):
    """A tool that the client runs. Tools that Anthropic's servers would run are not known."""

    model_config = ConfigDict(extra="forbid", strict=True)

    type: Literal["custom"] | None = None
    name: str = Field(pattern=r"^[a-zA-Z0-9_.\-]{1,64}$")
    description: str | None = None
    input_schema: dict[str, Any]
    cache_control: CacheControl | None = None
    strict: bool | None = Field(None, description="Has no effect: a call that is forced fits its schema.")
    eager_input_streaming: bool | None = Field(None, description="Has no effect.")
    input_examples: list[dict[str, Any]] | None = Field(None, description="Has no effect.")
    allowed_callers: list[Literal["direct"]] | None = Field(None, description="Has no effect.")
    defer_loading: Literal[False] | None = None

    def to_dict(self) -> dict[str, Any]:
        """Return the tool as templates want it."""
        return tool_dict(Function(name=self.name, description=self.description, parameters=self.input_schema))


class ToolChoice(_Strict):
    """Whether a tool is called, and which."""

    type: Literal["auto", "any", "none", "tool"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class JsonSchemaFormat(_Strict):
    """JSON that fits a schema."""

    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")


class OutputConfig(_Strict):
    """What the answer is to be."""

    format: JsonSchemaFormat | None = None
    effort: str | None = Field(None, description="Has no effect.")


class Diagnostics(_Strict):
    """Asks where the prompt differs from that of an earlier message."""

    previous_message_id: str | None = None
    """None: there is none yet; only remember this one."""


class PromptFields(_Strict):
    """What makes a prompt: the fields of `/v1/messages/count_tokens`."""

    model: str
    messages: list[Message]
    system: TextBlocks | None = None
    tools: list[Tool] | None = None
    tool_choice: ToolChoice | None = None
    cache_control: CacheControl | None = None
    """A breakpoint at the end of the prompt."""

    output_config: OutputConfig | None = None
    thinking: dict[str, Any] | None = Field(None, description="Only `disabled` is supported.")
    speed: str | None = Field(None, description="Has no effect.")
    cache_salt: str | None = Field(
        None, description="Keeps the cache of this request apart from other salts'."
    )

    @field_validator("thinking")
    @classmethod
    def _no_thinking(cls, value: dict[str, Any] | None) -> dict[str, Any] | None:
        if value is not None and value.get("type") != "disabled":
            raise ValueError("thinking is not supported: leave it out, or set its type to disabled")
        return value

    def namespace(self, tenant: Tenant) -> Namespace:
        """Return where the request's KV is kept."""
        return tenant.namespace(self.cache_salt)

    def tool_dicts(self) -> list[dict[str, Any]]:
        """Return the tools as templates want them."""
        return [tool.to_dict() for tool in self.tools or ()]

    def tool_use(self) -> ToolUse:
        """Return which tools may be called.

        Raises:
            ApiError: One is chosen that there is not.
        """
        choice, tools = self.tool_choice or ToolChoice(type="auto"), self.tool_dicts()
        if choice.type == "tool":
            return tool_use(tools, None, chosen=choice.name or "")
        alone = choice.disable_parallel_tool_use
        return tool_use(tools, _MODES[choice.type], several=None if alone is None else not alone)


_MODES: Mapping[str, Literal["auto", "required", "none"]] = {
    "auto": "auto",
    "any": "required",
    "none": "none",
}


class MessageRequest(PromptFields):
    """A request of `/v1/messages`."""

    max_tokens: int
    """0: compute the prompt, and keep it where it has breakpoints."""

    stream: bool | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    stop_sequences: list[Annotated[str, Field(min_length=1)]] | None = Field(
        None, max_length=MAX_STOP_STRINGS
    )
    diagnostics: Diagnostics | None = None

    metadata: dict[str, Any] | None = Field(None, description="Has no effect.")
    service_tier: str | None = Field(None, description="Has no effect.")
    inference_geo: str | None = Field(None, description="Has no effect.")

    seed: int | None = None
    min_p: float | None = None
    min_tokens: int | None = None
    ignore_eos: bool | None = None

    def params(self, use: ToolUse, *, max_grammar_bytes: int) -> SamplingParams:
        """Return the parameters of the engine.

        Raises:
            ApiError: The schemas are larger than `max_grammar_bytes`.
            InvalidRequest: A value is out of range.
        """
        given = {
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_k": self.top_k,
            "min_p": self.min_p,
            "min_tokens": self.min_tokens,
            "ignore_eos": self.ignore_eos,
            "seed": self.seed,
            "stop": self.stop_sequences or None,
        }
        return SamplingParams(
            max_tokens=self.max_tokens,
            grammar=self._grammar(use, max_grammar_bytes),
            **{name: value for name, value in given.items() if value is not None},  # type: ignore[arg-type]
        )

    def _grammar(self, use: ToolUse, max_bytes: int) -> Grammar | None:
        wanted = None if self.output_config is None else self.output_config.format
        return use.grammar(None if wanted is None else wanted.schema_, max_bytes=max_bytes)
