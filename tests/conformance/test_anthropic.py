"""`/v1/messages`, by Anthropic's own client."""

import json
from collections.abc import Iterator
from typing import Any

import jsonschema
import pytest
from anthropic import (
    Anthropic,
)
from live_server import LiveServer, live_server

from phloem.runtime import Engine, SamplingParams

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


@pytest.fixture
def client(server: LiveServer) -> Iterator[Anthropic]:
    with client_of(server) as client:
        yield client


def client_of(server: LiveServer, **options: Any) -> Anthropic:
    return Anthropic(
        base_url=server.url, **{"api_key": "any-key", "max_retries": 0, "timeout": 30, **options}
    )


def create(client: Anthropic, messages: Any = ASKED, **options: Any) -> Any:
    return client.messages.create(model="tiny", messages=messages, **{**GREEDY, **options})


def total(usage: Any) -> int:
    """The prompt's tokens."""
    created = usage.cache_creation
    if created is not None:
        by_ttl = created.ephemeral_5m_input_tokens + created.ephemeral_1h_input_tokens
        assert by_ttl == usage.cache_creation_input_tokens
    return int(usage.input_tokens + usage.cache_creation_input_tokens + usage.cache_read_input_tokens)


def cached(text: str, ttl: str | None = None) -> dict[str, Any]:
    control = {"type": "ephemeral"} if ttl is None else {"type": "ephemeral", "ttl": ttl}
    return {"type": "text", "text": text, "cache_control": control}


# Answers


@pytest.mark.parametrize(
    "system", ["Be terse.", [{"type": "text", "text": "Be"}, {"type": "text", "text": "terse."}]]
)
def test_it_answers_as_the_engine_does(client: Anthropic, server: LiveServer, system: Any) -> None:
    server.engine.clear_cache()
    told = system if isinstance(system, str) else "Be\nterse."
    first, second = (create(client, system=system) for _ in range(2))
    prompt = [{"role": "system", "content": told}, *ASKED]
    [done] = server.engine.generate(prompt, SamplingParams(max_tokens=12, temperature=0, ignore_eos=True))
    [block] = first.content
    assert block.text == second.content[0].text == done.text
    assert (first.type, first.role, first.model) == ("message", "assistant", "tiny")
    assert (first.stop_reason, first.stop_sequence) == ("max_tokens", None)
    assert first.usage.output_tokens == 12
    assert total(first.usage) == total(second.usage) == done.usage.prompt_tokens
    assert (first.usage.cache_read_input_tokens, first.usage.cache_creation_input_tokens) == (0, 0)
    assert second.usage.cache_read_input_tokens == done.usage.prompt_tokens - 1


def test_a_stream_has_the_same_in_order(client: Anthropic) -> None:
    whole = create(client, **DRAWN)
    events = list(create(client, stream=True, **DRAWN))
    kinds = [event.type for event in events]
    deltas = [event.delta for event in events if event.type == "content_block_delta"]
    assert kinds == [
        "message_start", "content_block_start", *["content_block_delta"] * len(deltas), "content_block_stop", "message_delta", "message_stop",
    ]  # fmt: skip
    assert "".join(delta.text for delta in deltas) == whole.content[0].text
    assert len(deltas) > 1
    begun, ended = events[0].message, events[-2]
    assert (begun.content, begun.stop_reason) == ([], None)
    assert total(begun.usage) == total(whole.usage)
    assert (ended.delta.stop_reason, ended.usage.output_tokens) == (
        whole.stop_reason,
        whole.usage.output_tokens,
    )


def test_the_clients_own_reading_of_a_stream_is_the_message(client: Anthropic, server: LiveServer) -> None:
    options = {**GREEDY, "model": "tiny", "messages": ASKED}
    with client.messages.stream(**options) as stream:
        text = "".join(stream.text_stream)
        message = stream.get_final_message()
    assert text == message.content[0].text == create(client).content[0].text
    assert message.usage.output_tokens == 12


def test_the_raw_events_are_named_and_one_is_a_ping(server: LiveServer) -> None:
    with server.client() as client:
        body = {"model": "tiny", "messages": ASKED, "max_tokens": 3, "stream": True, "ignore_eos": True}
        text = client.post("/v1/messages", json=body).text
    events = [dict(line.split(": ", 1) for line in each.split("\n")) for each in text.strip().split("\n\n")]
    assert [event["event"] for event in events] == [json.loads(event["data"])["type"] for event in events]
    assert events[1]["event"] == "ping"


def test_a_stop_sequence_ends_it_and_is_told(client: Anthropic) -> None:
    drawn = {"extra_body": {"temperature": 1.4, "seed": 5, "ignore_eos": True}, "max_tokens": 40}
    whole = create(client, **drawn).content[0].text
    stop = whole[8:11]
    done = create(client, stop_sequences=["never", stop], **drawn)
    assert (done.stop_reason, done.stop_sequence) == ("stop_sequence", stop)
    assert done.content[0].text == whole[: whole.index(stop)]
    *_, ended, _ = create(client, stop_sequences=["never", stop], stream=True, **drawn)
    assert (ended.delta.stop_reason, ended.delta.stop_sequence) == ("stop_sequence", stop)


def test_the_models_own_end_and_the_contexts_are_told_apart(client: Anthropic) -> None:
    ends = {create(client, max_tokens=1, extra_body={"seed": seed}).stop_reason for seed in range(9)}
    assert ends == {"max_tokens"}
    long = [{"role": "user", "content": "x" * 4060}]
    assert create(client, long, max_tokens=500).stop_reason == "model_context_window_exceeded"
    assert create(client, max_tokens=2000, extra_body={"temperature": 2, "seed": 1}).stop_reason == "end_turn"


def test_an_answer_goes_on_from_its_beginning(client: Anthropic, server: LiveServer) -> None:
    server.engine.clear_cache()
    begun = [*ASKED, {"role": "assistant", "content": "The colour is"}]
    first = create(client, begun, **DRAWN)
    assert total(first.usage) == total(create(client, max_tokens=1).usage) + len("The colour is")
    answer = "The colour is" + first.content[0].text
    after = create(client, [*ASKED, {"role": "assistant", "content": answer}, *ASKED], **DRAWN)
    assert after.usage.cache_read_input_tokens >= total(first.usage) + first.usage.output_tokens - 1


def test_neighbouring_messages_of_a_role_are_one(client: Anthropic) -> None:
    parted = [
        {"role": "user", "content": "Name"},
        {"role": "user", "content": [{"type": "text", "text": "a colour."}]},
    ]
    one = [{"role": "user", "content": "Name\na colour."}]
    assert create(client, parted).content == create(client, one).content


@pytest.mark.parametrize("stream", [False, True])
def test_json_that_fits_a_schema(client: Anthropic, stream: bool) -> None:
    schema = WEATHER["input_schema"]
    config = {"format": {"type": "json_schema", "schema": schema}}
    options = {"max_tokens": 60, "extra_body": {"output_config": config, "seed": 3}, "stream": stream}
    made = create(client, **options)
    text = (
        "".join(event.delta.text for event in made if event.type == "content_block_delta")
        if stream
        else made.content[0].text
    )
    jsonschema.validate(json.loads(text), schema)


# Tokens


def test_tokens_are_counted(client: Anthropic) -> None:
    prompt: dict[str, Any] = {"model": "tiny", "messages": ASKED, "system": LONG, "tools": [WEATHER]}
    counted = client.messages.count_tokens(**prompt).input_tokens
    assert counted == total(create(client, system=LONG, tools=[WEATHER]).usage)
    assert counted > client.messages.count_tokens(model="tiny", messages=ASKED).input_tokens


def test_the_next_turn_hits_the_answer_although_its_text_would_be_other_tokens(
    client: Anthropic, server: LiveServer
) -> None:
    for stream in (False, True):
        server.engine.clear_cache()
        messages, known = list(ASKED), 0
        for turn in range(3):
            if stream:
                with client.messages.stream(model="tiny", messages=messages, **DRAWN) as events:
                    answer = events.get_final_message()
            else:
                answer = create(client, messages, **DRAWN)
            assert answer.usage.cache_read_input_tokens >= known, f"turn {turn}"
            assert "\ufffd" in answer.content[0].text, "the random model wrote clean text; take another seed"
            known = total(answer.usage) + answer.usage.output_tokens - 1
            content = [block.model_dump() for block in answer.content]
            messages += [
                {"role": "assistant", "content": content},
                {"role": "user", "content": f"And {turn}?"},
            ]


def test_a_billing_line_in_the_system_text_is_ignored(client: Anthropic, server: LiveServer) -> None:
    server.engine.clear_cache()
    plain = total(create(client, system=LONG).usage)
    for number in range(2):
        line = f"x-anthropic-billing-header: cc_version=2.1; cch={number};"
        for system in (f"{line}\n{LONG}", [{"type": "text", "text": line}, {"type": "text", "text": LONG}]):
            usage = create(client, system=system).usage
            assert (usage.cache_read_input_tokens, total(usage)) == (plain - 1, plain)


# Breakpoints


@pytest.mark.parametrize("stream", [False, True])
def test_breakpoints_take_leases_and_usage_tells_of_them(engine: Engine, stream: bool) -> None:
    engine.clear_cache()
    system, asked = (
        [cached(LONG, "1h")],
        [{"role": "user", "content": [cached("Name a colour. " * 9), {"type": "text", "text": "Quick!"}]}],
    )

    with live_server(engine) as server, client_of(server) as client:

        def ask() -> Any:
            if not stream:
                return create(client, asked, system=system).usage
            with client.messages.stream(model="tiny", messages=asked, system=system, **GREEDY) as events:
                return events.get_final_message().usage

        first, second = ask(), ask()
        assert first.cache_read_input_tokens == 0
        assert first.cache_creation.ephemeral_1h_input_tokens >= len(LONG)
        assert first.cache_creation.ephemeral_5m_input_tokens >= len("Name a colour. " * 9)
        # What is not kept is what comes after the last breakpoint, in the prompt's own tokens.
        assert first.input_tokens == len("Quick!<\n<assistant\n") - len("<<") + 2
        assert total(first) == total(second) == second.cache_read_input_tokens + 1
        stats = engine.stats().cache
        assert stats.pinned == first.cache_creation_input_tokens // 16
        server.wait_until_idle()
    engine.clear_cache()


def test_what_has_a_breakpoint_stays_whatever_comes(tiny_path: Any) -> None:
    with (
        Engine(tiny_path, dtype="float32", num_blocks=64) as engine,
        live_server(engine) as server,
        client_of(server) as client,
    ):
        create(client, system=[cached(LONG)])
        for number in range(6):
            create(client, [{"role": "user", "content": f"{number}" * 500}], max_tokens=1)
        kept = create(client, system=[cached(LONG)]).usage
        assert kept.cache_read_input_tokens >= len(LONG) - 16
        assert engine.stats().cache.evictions > 0
        # What the budget for leases does not hold is computed and answered all the same.
        large = create(client, [{"role": "user", "content": [cached("y" * 700)]}], max_tokens=1).usage
        assert (large.cache_creation_input_tokens, total(large)) == (
            0,
            large.input_tokens + large.cache_read_input_tokens,
        )
        server.wait_until_idle()
