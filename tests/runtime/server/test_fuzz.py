"""No request makes the server fail: valid ones with one part replaced by something odd, and odd ones altogether."""

import copy
import json
import re
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from live_server import LiveServer, delete_all

TOOL = {"name": "f", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}}}
VALID: dict[str, dict[str, Any]] = {
    "/v1/completions": {
        "model": "tiny", "prompt": ["ab", "c"], "max_tokens": 2, "n": 1, "temperature": 0.5, "top_p": 0.9, "seed": 1, "stop": ["x"],
        "logit_bias": {"5": 1.0}, "logprobs": 1, "echo": True, "stream": False, "cache_salt": "s", "top_k": 3, "min_p": 0.1, "min_tokens": 1,
        "stop_token_ids": [3], "return_token_ids": True, "presence_penalty": 0.1,
    },
    "/v1/chat/completions": {
        "model": "tiny", "max_completion_tokens": 2, "n": 2, "logprobs": True, "top_logprobs": 1, "stream": True,
        "messages": [
            {"role": "system", "content": "s"}, {"role": "user", "content": [{"type": "text", "text": "u"}]},
            {"role": "assistant", "content": None, "tool_calls": [{"id": "1", "type": "function", "function": {"name": "f", "arguments": "{\"a\": 1}"}}]},
            {"role": "tool", "tool_call_id": "1", "content": "r"},
        ],
        "tools": [{"type": "function", "function": TOOL}], "tool_choice": "auto", "stream_options": {"include_usage": True},
        "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object"}}},
    },
    "/v1/messages": {
        "model": "tiny", "max_tokens": 2, "stream": True, "temperature": 0.5, "top_k": 3, "top_p": 0.9, "stop_sequences": ["x"], "seed": 1, "cache_salt": "s",
        "system": [{"type": "text", "text": "x-anthropic-billing-header: a\ns", "cache_control": {"type": "ephemeral", "ttl": "1h"}}],
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "u", "cache_control": {"type": "ephemeral"}}]},
            {"role": "assistant", "content": [{"type": "text", "text": "t"}, {"type": "tool_use", "id": "1", "name": "f", "input": {"a": 1}}]},
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "1", "content": "r", "is_error": True}]}, {"role": "assistant", "content": "so"},
        ],
        "tools": [{"name": "f", "input_schema": TOOL["parameters"], "cache_control": {"type": "ephemeral", "ttl": "1h"}}],
        "tool_choice": {"type": "auto", "disable_parallel_tool_use": True}, "diagnostics": {"previous_message_id": "msg_1"},
        "output_config": {"format": {"type": "json_schema", "schema": {"type": "object"}}}, "metadata": {"user_id": "k"},
    },
    "/generate": {
        "text": ["ab", "c"], "rid": ["x", "y"], "stream": False, "return_logprob": [True, None], "logprob_start_len": 0, "top_logprobs_num": [1, 2],
        "return_text_in_logprobs": True, "extra_key": "s",
        "sampling_params": {
            "max_new_tokens": 2, "min_new_tokens": 1, "n": 1, "stop": ["x"], "stop_token_ids": [3], "temperature": 0.5, "top_p": 0.9, "top_k": 3, "min_p": 0.1,
            "frequency_penalty": 0.1, "ignore_eos": True, "regex": "[a-z]+", "logit_bias": {"5": 1.0}, "sampling_seed": 1, "skip_special_tokens": True,
        },
    },
    "/v1/responses": {
        "model": "tiny", "max_output_tokens": 2, "instructions": "i", "metadata": {"k": "v"}, "store": True, "stream": False,
        "input": [
            {"role": "user", "content": [{"type": "input_text", "text": "u"}]},
            {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"}, {"type": "function_call_output", "call_id": "1", "output": "r"},
        ],
        "tools": [{"type": "function", **TOOL}], "text": {"format": {"type": "json_schema", "name": "x", "schema": {"type": "object"}}},
    },
    "/v1/branches": {
        "cache_salt": "s", "tools": [{"type": "function", "function": TOOL}],
        "messages": [{"role": "user", "content": [{"type": "text", "text": "u"}]}, {"role": "assistant", "content": "a"}],
    },
    "/v1/branches/{branch_id}/append": {"token_ids": [5, 6]},
    "/v1/branches/{branch_id}/generate": {
        "max_tokens": 2, "logprobs": 1, "stream": True, "temperature": 0.5, "seed": 1, "stop": ["x"], "logit_bias": {"5": 1.0}, "top_k": 3,
        "min_tokens": 1, "stop_token_ids": [3], "ignore_eos": True, "regex": "[a-z]+",
    },
    "/v1/branches/{branch_id}/expand": {
        "n": 2, "max_tokens": 2, "logprobs": 1, "min_p": 0.1, "presence_penalty": 0.1, "response_format": {"type": "json_object"},
    },
    "/v1/branches/{branch_id}/fork": {"n": 2, "at": 1},
    "/v1/branches/{branch_id}/score": {"continuations": ["ab", [5, 6]]},
    "/v1/cache/explain": {"token_ids": [5, 6, 7], "cache_salt": "s"},
    "/v1/cache/pins": {"text": "a" * 40, "ttl": 5.5, "cache_salt": "s"},
}  # fmt: skip

odd_text = st.sampled_from(
    ["", "\ud800", "\x00", "a" * 300, "{", "<|im_end|>", "\u2028", "null", "-1", "required"]
)
odd = st.recursive(
    st.none()
    | st.booleans()
    | st.sampled_from(
        [0, -1, 1, 2**31, 2**63, -(2**64), 10**400, 0.5, -0.0, 1e308, float("inf"), float("nan")]
    )
    | odd_text
    | st.text(max_size=3),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(odd_text | st.sampled_from(["type", "role", "name"]), inner, max_size=3)
    ),
    max_leaves=4,
)


def places_in(value: Any) -> list[tuple[Any, ...]]:
    """The paths of all parts of a value."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [(), *((key, *rest) for key, each in inner for rest in places_in(each))]


@st.composite
def bodies(draw: st.DrawFn, path: str) -> Any:
    body = {"body": copy.deepcopy(VALID[path])}
    for _ in range(draw(st.integers(1, 2))):
        *outer, last = ("body", *draw(st.sampled_from(places_in(VALID[path]))))
        place: Any = body
        try:
            for key in outer:
                place = place[key]
            place[last] = draw(odd)
        except (KeyError, IndexError, TypeError):
            continue
    return body["body"]


@pytest.mark.parametrize("path", VALID)
def test_an_odd_request_is_answered_or_refused(server: LiveServer, path: str) -> None:
    with server.client() as client:

        @settings(max_examples=100, suppress_health_check=list(HealthCheck))
        @given(bodies(path))
        def check(body: Any) -> None:
            answer = post(client, path, body)
            delete_all(client)
            assert answer.status_code < 500, answer.text
            if answer.status_code >= 400:
                assert answer.json()["error"]["message"]
            else:
                assert not {"server_error", "api_error"} & set(re.findall(r"\w+_error", answer.text))

        assert post(client, path, VALID[path]).status_code == 200
        check()


def post(client: httpx.Client, path: str, body: Any) -> httpx.Response:
    if "{branch_id}" in path:
        opened = client.post("/v1/branches", json={"text": "ab"}).json()
        path = path.format(branch_id=opened["id"])
    return client.post(path, content=json.dumps(body), headers={"Content-Type": "application/json"})


def test_the_openapi_document_names_every_operation_with_its_body(server: LiveServer) -> None:
    with server.client() as client:
        document = client.get("/openapi.json").json()
    for path in VALID:
        assert "requestBody" in document["paths"][path]["post"]
    assert "/metrics" in document["paths"]
