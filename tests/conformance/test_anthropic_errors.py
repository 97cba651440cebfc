"""What is refused by `/v1/messages`, and how its requests end, by Anthropic's own client."""

import json
import re
from typing import Any

import pytest
from anthropic import (
    Anthropic,
    APIStatusError,
    APITimeoutError,
    AuthenticationError,
    NotFoundError,
    RateLimitError,
)
from anthropic_client import ASKED, TIME, client_of, create
from live_server import LiveServer, live_server

from phloem.runtime import Engine


@pytest.mark.parametrize(
    ("fields", "match"),
    [
        ({"messages": []}, "messages is empty"), ({"messages": [{"role": "user", "content": []}]}, r"messages\[0\]\.content is empty"),
        ({"messages": [{"role": "king", "content": "x"}]}, r"messages\[0\]\.role"), ({"messages": [{"role": "assistant", "content": "x"}]}, "user's"),
        ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, r"messages\[0\]\.content\[0\]: .*images"),
        ({"messages": [{"role": "user", "content": [{"type": "document", "source": {}}]}]}, r"messages\[0\]\.content\[0\]: .*documents"),
        ({"messages": [*ASKED, {"role": "assistant", "content": [{"type": "thinking", "thinking": "x"}]}]}, r"messages\[1\]\.content\[0\]: .*thinking"),
        ({"messages": [{"role": "user", "content": [{"type": "tool_use", "id": "x", "name": "f", "input": {}}]}]}, r"messages\[0\]\.content\[0\] is a tool_use"),
        ({"messages": [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": "x", "content": [{"type": "image"}]}]}]}, r"content\[0\]\.content\[0\]"),
        ({"messages": [*ASKED, {"role": "assistant", "content": "so "}]}, "white space"),
        ({"messages": [*ASKED, {"role": "assistant", "content": [{"type": "tool_use", "id": "x", "name": "f", "input": {}}]}]}, "results must follow"),
        ({"max_tokens": None}, "max_tokens"), ({"max_tokens": -1}, "max_tokens"), ({"temperature": -1}, "temperature"), ({"top_k": 0}, "top_k"),
        ({"stop_sequences": [""]}, r"stop_sequences\[0\]"), ({"stop_sequences": ["x"] * 99}, "stop_sequences"), ({"thinking": {"type": "enabled", "budget_tokens": 1024}}, "thinking"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, r"tools\[0\]\.type"), ({"tools": [TIME, TIME]}, "same name"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"), ({"tools": [TIME], "tool_choice": {"type": "tool", "name": "x"}}, "tool_choice"),
        ({"tools": [{"name": "f", "input_schema": {"type": 5}}], "tool_choice": {"type": "any"}}, "tools"), ({"mcp_servers": []}, "mcp_servers"),
        ({"output_config": {"format": {"type": "json_schema", "schema": {"type": "nothing"}}}}, "output_config"), ({"cache_salt": ""}, "cache_salt"),
        ({"messages": [{"role": "user", "content": "x" * 5000}]}, "4096"), ({"messages": [{"role": "user", "content": "\ud800"}]}, "surrogates"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_told_in_anthropics_form(
    server: LiveServer, fields: dict[str, Any], match: str
) -> None:
    with server.client() as client:
        content = json.dumps({"model": "tiny", "messages": ASKED, "max_tokens": 2, **fields})
        answer = client.post("/v1/messages", content=content, headers={"Content-Type": "application/json"})
    assert answer.status_code == 400, answer.text
    body = answer.json()
    assert (body["type"], body["error"]["type"]) == ("error", "invalid_request_error")
    assert re.search(match, body["error"]["message"]), body


def test_errors_are_the_clients_own(engine: Engine) -> None:
    key = "key-of-alice"
    with live_server(engine, api_keys=(key,), max_requests=1, max_body_bytes=5000) as server:
        with client_of(server, api_key="wrong-key") as stranger, pytest.raises(AuthenticationError) as error:
            create(stranger)
        assert error.value.type == "authentication_error"
        with client_of(server, api_key=None, auth_token=key) as bearer:
            assert create(bearer).role == "assistant"
        with client_of(server, api_key=key, default_headers={"x-api-key": key}) as client:
            with pytest.raises(NotFoundError, match="no model"):
                client.messages.create(model="claude", messages=ASKED, max_tokens=1)
            with pytest.raises(APIStatusError) as error:
                create(client, [{"role": "user", "content": "x" * 6000}])
            assert (error.value.status_code, error.value.type) == (413, "request_too_large")
            with client.messages.stream(
                model="tiny", messages=ASKED, max_tokens=4000, extra_body={"ignore_eos": True}
            ):
                with pytest.raises(RateLimitError) as limited:
                    create(client)
                assert (limited.value.type, limited.value.response.headers["Retry-After"]) == (
                    "rate_limit_error",
                    "1",
                )
            server.wait_until_idle()
            server.service.gate.draining = True
            with pytest.raises(APIStatusError) as error:
                create(client)
            assert (error.value.status_code, error.value.type) == (503, "overloaded_error")


def test_a_key_may_come_as_anthropics_own_header(engine: Engine) -> None:
    body = {"model": "tiny", "messages": ASKED, "max_tokens": 1}
    with live_server(engine, api_keys=("key-of-alice",)) as server, server.client() as client:
        for key, status in (("key-of-alice", 200), ("key-of-carol", 401)):
            headers = {"x-api-key": key, "anthropic-version": "2023-06-01"}
            assert client.post("/v1/messages", json=body, headers=headers).status_code == status


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_that_takes_too_long_is_ended(engine: Engine, stream: bool) -> None:
    options = {"model": "tiny", "messages": ASKED, "max_tokens": 4000, "extra_body": {"ignore_eos": True}}
    with live_server(engine, request_timeout_s=0.3) as server:
        with client_of(server, max_retries=2) as client, pytest.raises(APIStatusError) as error:
            list(client.messages.create(stream=stream, **options))
        assert error.value.type == "timeout_error"
        server.wait_until_idle()


def test_a_client_that_goes_ends_its_request(server: LiveServer, anthropic: Anthropic) -> None:
    before = server.engine.stats().generated_tokens
    with anthropic.messages.stream(
        model="tiny", messages=ASKED, max_tokens=4000, extra_body={"ignore_eos": True}
    ) as events:
        next(iter(events))
    server.wait_until_idle()
    with client_of(server, timeout=0.3) as hasty, pytest.raises(APITimeoutError):
        create(hasty, max_tokens=4000)
    server.wait_until_idle()
    assert server.engine.stats().generated_tokens - before < 7000
