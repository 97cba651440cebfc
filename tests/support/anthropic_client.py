"""Anthropic's own client on a server of the tests, and what it asks."""

from typing import Any

from anthropic import Anthropic
from live_server import LiveServer

ASKED: list[Any] = [{"role": "user", "content": "Name a colour."}]
LONG = "You are terse. " * 20
WEATHER: dict[str, Any] = {
    "name": "get_weather",
    "description": "The weather of a city.",
    "input_schema": {
        "type": "object",
        "properties": {"city": {"enum": ["Paris", "Rome"]}},
        "required": ["city"],
        "additionalProperties": False,
    },
}
TIME: dict[str, Any] = {
    "name": "get_time",
    "input_schema": {"type": "object", "properties": {}, "additionalProperties": False},
}
# The client has no parameter for what is not the same in all of Anthropic's models.
GREEDY: dict[str, Any] = {"max_tokens": 12, "extra_body": {"temperature": 0, "ignore_eos": True}}
DRAWN: dict[str, Any] = {"max_tokens": 40, "extra_body": {"temperature": 1.4, "seed": 2}}


def client_of(server: LiveServer, **options: Any) -> Anthropic:
    return Anthropic(
        base_url=server.url, **{"api_key": "any-key", "max_retries": 0, "timeout": 30, **options}
    )


def create(client: Anthropic, messages: Any = ASKED, **options: Any) -> Any:
    return client.messages.create(model="tiny", messages=messages, **{**GREEDY, **options})


def total(usage: Any) -> int:
    """The prompt's tokens."""
    by_ttl = usage.cache_creation
    created = by_ttl.ephemeral_5m_input_tokens + by_ttl.ephemeral_1h_input_tokens
    assert created == usage.cache_creation_input_tokens
    return int(usage.input_tokens + created + usage.cache_read_input_tokens)
