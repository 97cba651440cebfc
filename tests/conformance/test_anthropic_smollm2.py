"""Anthropic's own client on the real model, whose tokens are words: turns with moving breakpoints, and tools."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from anthropic import Anthropic
from anthropic_client import WEATHER, client_of, total
from live_server import live_server

from phloem.runtime import Engine

pytestmark = [pytest.mark.slow, pytest.mark.model]

KEPT = {"cache_control": {"type": "ephemeral"}}
ABOUT = "You are a poet who loves rare words. " * 12


@pytest.fixture(scope="module")
def client(smollm2_path: Path) -> Iterator[Anthropic]:
    with Engine(smollm2_path, num_blocks=1024) as engine, live_server(engine) as server:
        with client_of(server, timeout=300) as client:
            yield client
        server.wait_until_idle()


def test_a_breakpoint_that_moves_along_keeps_all_that_came_before(client: Anthropic) -> None:
    system = [{"type": "text", "text": ABOUT, "cache_control": {"type": "ephemeral", "ttl": "1h"}}]
    messages: list[Any] = []
    known = 0
    for turn in range(5):
        asked = {"type": "text", "text": f"Write line {turn} of a poem with invented words."}
        answer = client.messages.create(
            model="tiny",
            system=system,
            messages=[*messages, {"role": "user", "content": [{**asked, **KEPT}]}],
            tools=[WEATHER],
            max_tokens=40,
            extra_body={"temperature": 1.3, "seed": turn},
        )
        usage = answer.usage
        assert usage.cache_read_input_tokens >= known, f"turn {turn}"
        assert usage.input_tokens <= 1
        known = total(usage) + usage.output_tokens - 1
        if turn == 0:
            plain = client.messages.count_tokens(
                model="tiny", system=ABOUT, messages=[{"role": "user", "content": "."}], tools=[WEATHER]
            )
            assert 0 <= plain.input_tokens - usage.cache_creation.ephemeral_1h_input_tokens < 16
        said = [block.model_dump() for block in answer.content]
        messages += [{"role": "user", "content": [asked]}, {"role": "assistant", "content": said}]


def test_a_called_tool_is_about_the_question(client: Anthropic) -> None:
    messages: list[Any] = [{"role": "user", "content": "What is the weather in Rome?"}]
    with client.messages.stream(
        model="tiny", messages=messages, tools=[WEATHER], tool_choice={"type": "any"}, max_tokens=80, extra_body={"temperature": 0},
    ) as events:  # fmt: skip
        made = events.get_final_message()
    [call] = made.content
    assert call.input == {"city": "Rome"}
    said = [block.model_dump() for block in made.content]
    result = [{"type": "tool_result", "tool_use_id": call.id, "content": "sun, 31 degrees"}]
    after = client.messages.create(
        model="tiny",
        messages=[*messages, {"role": "assistant", "content": said}, {"role": "user", "content": result}],
        tools=[WEATHER],
        max_tokens=40,
        extra_body={"temperature": 0},
    )
    assert "Rome" in after.content[0].text
    assert after.usage.cache_read_input_tokens > total(made.usage)
