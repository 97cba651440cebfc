"""`/v1/responses`, by OpenAI's own client and by hand."""

import json
from collections.abc import Iterator
from typing import Any

import jsonschema
import pytest
from live_server import LiveServer, live_server
from openai import NotFoundError, OpenAI

from phloem.runtime import Engine, SamplingParams
from phloem.runtime.server.responses_store import ResponseStore

WEATHER = {
    "type": "function",
    "name": "get_weather",
    "parameters": {
        "type": "object",
        "properties": {"city": {"enum": ["Paris", "Rome"]}},
        "required": ["city"],
        "additionalProperties": False,
    },
}
GREEDY: dict[str, Any] = {"temperature": 0, "max_output_tokens": 12, "extra_body": {"ignore_eos": True}}


@pytest.fixture
def client(server: LiveServer) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{server.url}/v1", api_key="any", max_retries=0, timeout=30) as client:
        yield client


def create(client: OpenAI, asked: Any = "Name a colour.", **options: Any) -> Any:
    return client.responses.create(model="tiny", input=asked, **{**GREEDY, **options})


def test_it_answers_as_the_engine_does(client: OpenAI, server: LiveServer) -> None:
    server.engine.clear_cache()
    messages = [{"role": "system", "content": "Be terse."}, {"role": "user", "content": "Name a colour."}]
    first, second = (create(client, instructions="Be terse.") for _ in range(2))
    [done] = server.engine.generate(messages, SamplingParams(max_tokens=12, temperature=0, ignore_eos=True))
    assert first.output_text == second.output_text == done.text
    assert (first.status, first.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert first.usage.input_tokens == done.usage.prompt_tokens
    assert (first.usage.output_tokens, first.usage.input_tokens_details.cached_tokens) == (12, 0)
    assert second.usage.input_tokens_details.cached_tokens == done.usage.prompt_tokens - 1


def test_a_stream_has_the_same_in_order(client: OpenAI) -> None:
    whole = create(client, temperature=1.2, extra_body={"seed": 4, "ignore_eos": True})
    events = list(create(client, temperature=1.2, extra_body={"seed": 4, "ignore_eos": True}, stream=True))
    kinds = [event.type.removeprefix("response.") for event in events]
    deltas = [event for event in events if event.type == "response.output_text.delta"]
    assert kinds[:4] == ["created", "in_progress", "output_item.added", "content_part.added"]
    assert kinds[4 + len(deltas) :] == [
        "output_text.done",
        "content_part.done",
        "output_item.done",
        "incomplete",
    ]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert "".join(event.delta for event in deltas) == whole.output_text
    assert events[-1].response.output_text == whole.output_text
    assert events[-1].response.usage.output_tokens == 12


def test_a_response_goes_on_from_a_stored_one_and_hits_it(client: OpenAI, server: LiveServer) -> None:
    options = {"temperature": 1.4, "max_output_tokens": 40, "extra_body": {"seed": 2}}
    first = create(client, **options)
    assert "\ufffd" in first.output_text, "the random model wrote clean text; take another seed"
    second = create(client, "And another?", previous_response_id=first.id, **options)
    known = first.usage.input_tokens + first.usage.output_tokens - 1
    assert second.usage.input_tokens_details.cached_tokens >= known
    by_hand = create(
        client,
        [
            {"role": "user", "content": "Name a colour."},
            *[item.model_dump() for item in first.output],
            {"role": "user", "content": "And another?"},
        ],
        **options,
    )
    assert by_hand.output_text == second.output_text
    third = create(client, "Last?", previous_response_id=second.id, instructions="Be kind.", **options)
    assert third.usage.input_tokens > second.usage.input_tokens + second.usage.output_tokens


def test_stored_responses_are_read_listed_and_deleted(client: OpenAI) -> None:
    made = create(client, metadata={"a": "b"})
    assert client.responses.retrieve(made.id).output_text == made.output_text
    [item] = client.responses.input_items.list(made.id).data
    assert item.content[0].text == "Name a colour."
    client.responses.delete(made.id)
    for attempt in (
        lambda: client.responses.retrieve(made.id),
        lambda: client.responses.delete(made.id),
        lambda: create(client, previous_response_id=made.id),
        lambda: client.responses.retrieve(create(client, store=False).id),
    ):
        with pytest.raises(NotFoundError, match="no stored response"):
            attempt()


def test_a_stored_response_is_its_keys_alone(engine: Engine) -> None:
    keys = ("key-of-alice", "key-of-bob")
    with live_server(engine, api_keys=keys) as server:
        alice, bob = (OpenAI(base_url=f"{server.url}/v1", api_key=key, max_retries=0) for key in keys)
        with alice, bob:
            made = create(alice)
            assert alice.responses.retrieve(made.id).id == made.id
            with pytest.raises(NotFoundError):
                bob.responses.retrieve(made.id)
            with pytest.raises(NotFoundError):
                create(bob, previous_response_id=made.id)
        server.wait_until_idle()


def test_the_store_is_bounded(engine: Engine) -> None:
    with live_server(engine, stored_responses_bytes=20_000) as server:
        with OpenAI(base_url=f"{server.url}/v1", api_key="any", max_retries=0) as client:
            ids = [create(client, store=True).id for _ in range(9)]
            assert client.responses.retrieve(ids[-1])
            with pytest.raises(NotFoundError):
                client.responses.retrieve(ids[0])
        assert 0 < len(server.service.responses) < 9
    assert len(ResponseStore(1)) == 0


@pytest.mark.parametrize("stream", [False, True])
def test_a_function_is_called_and_its_result_taken(client: OpenAI, stream: bool) -> None:
    options = {"tools": [WEATHER], "max_output_tokens": 120, "temperature": 1.0, "extra_body": {}}
    if stream:
        events = list(create(client, tool_choice="required", stream=True, **options))
        made = events[-1].response
        [done] = [event for event in events if event.type == "response.function_call_arguments.done"]
        assert done.arguments == made.output[0].arguments
    else:
        made = create(client, tool_choice={"type": "function", "name": "get_weather"}, **options)
    assert made.status == "completed"
    [call] = made.output
    jsonschema.validate(json.loads(call.arguments), WEATHER["parameters"])
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "sunny"}
    after = create(client, [result], previous_response_id=made.id, tools=[WEATHER])
    # The prompt, its answer and the result: the conversation went on.
    assert after.usage.input_tokens > made.usage.input_tokens + made.usage.output_tokens
    by_hand = [{"role": "user", "content": "Name a colour."}, call.model_dump(), result]
    again = create(client, by_hand, tools=[WEATHER])
    assert again.usage.input_tokens == after.usage.input_tokens
    assert again.usage.input_tokens_details.cached_tokens == after.usage.input_tokens - 1


def test_the_text_fits_a_schema(client: OpenAI) -> None:
    schema = {"type": "json_schema", "name": "city", "schema": WEATHER["parameters"]}
    made = create(client, text={"format": schema}, max_output_tokens=60, extra_body={})
    jsonschema.validate(json.loads(made.output_text), WEATHER["parameters"])
    assert made.status == "completed"
    assert made.text.format.type == "json_schema"


def test_logprobs_are_included_when_asked_for(client: OpenAI) -> None:
    include = {"include": ["message.output_text.logprobs"], "top_logprobs": 2}
    entries = create(client, **include).output[0].content[0].logprobs
    assert len(entries) == 12
    assert entries[0].logprob == entries[0].top_logprobs[0].logprob
    streamed = list(create(client, stream=True, **include))[-1].response.output[0].content[0].logprobs
    assert streamed == entries
    assert create(client).output[0].content[0].logprobs == []


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": []}, "input"), ({"input": 5}, "input"), ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type"),
        ({"input": [{"role": "king", "content": "x"}]}, "input[0].role"), ({"input": [{"role": "user"}]}, "input[0].content"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0]"),
        ({"input": [{"type": "function_call", "name": "f", "arguments": {}}]}, "input[0].arguments"),
        ({"input": [{"type": 5}]}, "input[0].type"), ({"n": 2}, "n"), ({"max_tokens": 5}, "max_tokens"),
        ({"background": True}, "background"), ({"truncation": "auto"}, "truncation"), ({"tools": [{"type": "web", "name": "x"}]}, "tools[0].type"),
        ({"tool_choice": "required"}, "tool_choice"), ({"text": {"format": {"type": "xml"}}}, "text.format"), ({"inptu": 1}, "inptu"),
        ({"text": {"format": {"type": "json_schema", "name": "x", "schema": {"type": "nothing"}}}}, "text"),
        ({"temperature": 10**400}, "temperature"), ({"top_p": 10**400}, "top_p"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_told_with_its_field(server: LiveServer, fields: dict[str, Any], param: str) -> None:
    with server.client() as client:
        content = json.dumps({"model": "tiny", "input": "a", "max_output_tokens": 2, **fields})
        answer = client.post("/v1/responses", content=content, headers={"Content-Type": "application/json"})
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == param, answer.text


@pytest.mark.parametrize("stream", [False, True])
def test_what_utf8_and_json_can_not_hold_is_no_error_of_the_servers(server: LiveServer, stream: bool) -> None:
    odd = {**WEATHER, "parameters": {"type": "object", "minimum": float("inf")}}
    with server.client() as client:
        body = {
            "model": "tiny",
            "input": "a",
            "max_output_tokens": 2,
            "metadata": {"\ud800": "\udfff"},
            "tools": [odd],
        }
        content = json.dumps({**body, "stream": stream})
        answer = client.post("/v1/responses", content=content, headers={"Content-Type": "application/json"})
    assert answer.status_code == 200, answer.text
    assert '"?":"?"' in answer.text
