"""A prompt as phloem's own endpoints take it: text, token ids or messages."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Mapping

from pydantic import BaseModel, ConfigDict, Field

from phloem.radix import Namespace
from phloem.runtime.prompts import encode, encode_continuation
from phloem.runtime.server.auth import Tenant
from phloem.runtime.server.errors import invalid
from phloem.runtime.server.openai_messages import Message, Tool, chat_messages, tool_dict
from phloem.runtime.server.service import Service


class TextFields(BaseModel):
    """Text that goes on from something: as it is, or as token ids."""

    model_config = ConfigDict(extra="forbid", strict=True)

    text: str | None = None
    token_ids: list[int] | None = None

    async def continuation(self, service: Service) -> array[int]:
        """Return the token ids; of text without special tokens around it.

        Raises:
            ApiError: Not one of the fields is given, or both are.
            InvalidRequest: It is empty, or has ids that are none.
        """
        name = _the_one(self, ("text", "token_ids"))
        [ids] = await encoded({name: getattr(self, name)}, service)
        return ids


class PromptFields(TextFields):
    """A whole prompt, and where its KV is."""

    messages: list[Message] | None = Field(None, description="As in /v1/chat/completions.")
    tools: list[Tool] | None = Field(None, description="With messages: tools that the template tells of.")
    cache_salt: str | None = Field(
        None, description="Keeps the cache of this prompt apart from other salts'."
    )

    def namespace(self, tenant: Tenant) -> Namespace:
        """Return where the prompt's KV is kept."""
        return tenant.namespace(self.cache_salt)

    async def prompt(self, service: Service, namespace: Namespace) -> array[int]:
        """Return the token ids; of messages with what asks for the next answer.

        Raises:
            ApiError: Not one of text, token_ids and messages is given, or several are; or tools without messages.
            InvalidRequest: It is empty, has ids that are none, or the template refuses it.
        """
        name = _the_one(self, ("text", "token_ids", "messages"))
        if self.messages is None:
            if self.tools is not None:
                raise invalid("tools are told by the template: give messages with them", "tools")
            return await asyncio.to_thread(
                encode,
                getattr(self, name),
                service.engine.tokenizer,
                vocab_size=service.engine.model.vocab_size,
                name=name,
            )
        messages = chat_messages(self.messages)
        tools = [tool_dict(tool.function) for tool in self.tools or ()]
        asked = await asyncio.to_thread(service.prompter.encode, messages, tools, namespace)
        return array("i", asked.token_ids)


async def encoded(texts: Mapping[str, str | list[int]], service: Service) -> list[array[int]]:
    """Return the token ids of what follows on a path, by the names of the fields that hold it.

    Raises:
        InvalidRequest: One is empty, or has ids that are none.
    """
    engine = service.engine

    def encode_all() -> list[array[int]]:
        return [
            encode_continuation(text, engine.tokenizer, vocab_size=engine.model.vocab_size, name=name)
            for name, text in texts.items()
        ]

    return await asyncio.to_thread(encode_all)


def _the_one(fields: BaseModel, names: tuple[str, ...]) -> str:
    given = [name for name in names if getattr(fields, name) is not None]
    if len(given) != 1:
        found = " and ".join(given) or "none of them"
        raise invalid(f"give one of {', '.join(names)}; the request has {found}", (given or list(names))[0])
    return given[0]
