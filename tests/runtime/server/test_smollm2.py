"""The real model behind HTTP: conversations that come back as text hit what was generated, and the schema of a tool is kept."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from live_server import live_server
from openai import OpenAI

from phloem.runtime import Engine

pytestmark = [pytest.mark.slow, pytest.mark.model]


@pytest.fixture(scope="module")
def client(smollm2_path: Path) -> Iterator[OpenAI]:
    with Engine(smollm2_path, num_blocks=1024) as engine, live_server(engine) as server:
        with OpenAI(base_url=f"{server.url}/v1", api_key="any", max_retries=0, timeout=300) as client:
            yield client
        server.wait_until_idle()


def test_b36_each_turn_computes_only_its_new_words(client: OpenAI) -> None:
    messages: list[Any] = [{"role": "system", "content": "You are a poet who loves rare words."}]
    known, num_reencoded = 0, 0
    for turn in range(8):
        messages.append({"role": "user", "content": f"Write line {turn} of a poem with invented words."})
        answer = client.chat.completions.create(
            model="tiny", messages=messages, max_tokens=40, temperature=1.3, seed=turn,
            extra_body={"return_token_ids": True},
        )  # fmt: skip
        assert answer.usage.prompt_tokens_details.cached_tokens >= known
        known = answer.usage.prompt_tokens + answer.usage.completion_tokens - 1
        text = answer.choices[0].message.content
        messages.append({"role": "assistant", "content": text})
        plain = client.completions.create(
            model="tiny", prompt=text or "a", max_tokens=1, extra_body={"return_token_ids": True}
        )
        drawn = [token for token in answer.choices[0].token_ids if token > 16]  # without special tokens
        num_reencoded += plain.choices[0].prompt_token_ids != drawn
    assert num_reencoded, "every answer was encoded as it was drawn: nothing was shown"


def test_a_forced_call_fits_its_schema_and_is_about_the_question(client: OpenAI) -> None:
    parameters = {
        "type": "object",
        "properties": {"city": {"type": "string"}, "unit": {"enum": ["celsius", "fahrenheit"]}},
        "required": ["city", "unit"],
        "additionalProperties": False,
    }
    answer = client.chat.completions.create(
        model="tiny",
        messages=[{"role": "user", "content": "What is the weather in Paris?"}],
        tools=[{"type": "function", "function": {"name": "get_weather", "parameters": parameters}}],
        tool_choice="required",
        temperature=0,
        max_tokens=80,
    )
    [call] = answer.choices[0].message.tool_calls
    assert json.loads(call.function.arguments)["city"] == "Paris"
