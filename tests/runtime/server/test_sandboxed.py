"""A server whose engine compiles grammars and renders templates in a sandbox: what one request asks for hurts no other."""

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from live_server import LiveServer, live_server

from phloem.runtime import Engine

SLOW_SCHEMA = {
    "type": "object",
    "properties": {f"k{i}": {"type": "integer", "multipleOf": 99991 - 2 * i} for i in range(40)},
}
"""1.8 kB that take about a minute and two gigabytes to compile."""


@pytest.fixture(scope="module")
def engine(tiny_path: Path) -> Iterator[Engine]:
    with Engine(tiny_path, dtype="float32", num_blocks=512, sandbox_timeout_s=1) as engine:
        yield engine


@pytest.fixture
def server(engine: Engine) -> Iterator[LiveServer]:
    with live_server(engine) as server:
        yield server
        server.wait_until_idle()


def chat(schema: dict[str, Any] | None = None, **more: Any) -> dict[str, Any]:
    body = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 2, **more}
    if schema is not None:
        body["response_format"] = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    return body


def test_slow_grammars_are_refused_in_time_and_hold_up_no_other_request(server: LiveServer) -> None:
    with server.client() as client:
        client.post("/v1/chat/completions", json=chat({"type": "object"}))  # the sandbox has started
        answers: list[tuple[int, str, float]] = []

        def ask(index: int) -> None:
            schema = {**SLOW_SCHEMA, "description": str(index)}
            started = time.monotonic()
            answer = client.post("/v1/chat/completions", json=chat(schema))
            answers.append((answer.status_code, answer.text, time.monotonic() - started))

        threads = [threading.Thread(target=ask, args=(index,)) for index in range(8)]
        for thread in threads:
            thread.start()
        time.sleep(0.2)
        started = time.monotonic()
        for schema in (None, {"type": "object"}):
            assert client.post("/v1/chat/completions", json=chat(schema)).status_code == 200
        assert time.monotonic() - started < 2, "they take two turns of two seconds and more"
        assert not answers or min(each[2] for each in answers) < 2
        for thread in threads:
            thread.join()
    assert [status for status, _, _ in answers] == [400] * 8
    assert all('"param":"response_format"' in text and "more than 1 s" in text for _, text, _ in answers)
    assert server.engine.stats().failed_steps == 0


def test_tools_are_told_of_when_their_schemas_are_what_takes_too_long(server: LiveServer) -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": SLOW_SCHEMA}}
    with server.client() as client:
        refused = client.post("/v1/chat/completions", json=chat(tools=[tool], tool_choice="required"))
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == "tools"
