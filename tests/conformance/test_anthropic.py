"""`/v1/messages`, by Anthropic's own client: answers, streams, tools."""

import json
from typing import Any

import jsonschema
import pytest
from anthropic import (
    Anthropic,
)
from anthropic_client import ASKED, DRAWN, GREEDY, LONG, TIME, WEATHER, create, total
from live_server import LiveServer

from phloem.runtime import SamplingParams

# Answers


@pytest.mark.parametrize(
    "system", ["Be terse.", [{"type": "text", "text": "Be"}, {"type": "text", "text": "terse."}]]
)
def test_it_answers_as_the_engine_does(anthropic: Anthropic, server: LiveServer, system: Any) -> None:
    server.engine.clear_cache()
    told = system if isinstance(system, str) else "Be\nterse."
    first, second = (create(anthropic, system=system) for _ in range(2))
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


def test_a_stream_has_the_same_in_order(anthropic: Anthropic) -> None:
    whole = create(anthropic, **DRAWN)
    events = list(create(anthropic, stream=True, **DRAWN))
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


def test_the_clients_own_reading_of_a_stream_is_the_message(anthropic: Anthropic, server: LiveServer) -> None:
    options = {**GREEDY, "model": "tiny", "messages": ASKED}
    with anthropic.messages.stream(**options) as stream:
        text = "".join(stream.text_stream)
        message = stream.get_final_message()
    assert text == message.content[0].text == create(anthropic).content[0].text
    assert message.usage.output_tokens == 12


def test_the_raw_events_are_named_and_one_is_a_ping(server: LiveServer) -> None:
    with server.client() as client:
        body = {"model": "tiny", "messages": ASKED, "max_tokens": 3, "stream": True, "ignore_eos": True}
        text = client.post("/v1/messages", json=body).text
    events = [dict(line.split(": ", 1) for line in each.split("\n")) for each in text.strip().split("\n\n")]
    assert [event["event"] for event in events] == [json.loads(event["data"])["type"] for event in events]
    assert events[1]["event"] == "ping"


def test_a_stop_sequence_ends_it_and_is_told(anthropic: Anthropic) -> None:
    drawn = {"extra_body": {"temperature": 1.4, "seed": 5, "ignore_eos": True}, "max_tokens": 40}
    whole = create(anthropic, **drawn).content[0].text
    stop = whole[8:11]
    done = create(anthropic, stop_sequences=["never", stop], **drawn)
    assert (done.stop_reason, done.stop_sequence) == ("stop_sequence", stop)
    assert done.content[0].text == whole[: whole.index(stop)]
    *_, ended, _ = create(anthropic, stop_sequences=["never", stop], stream=True, **drawn)
    assert (ended.delta.stop_reason, ended.delta.stop_sequence) == ("stop_sequence", stop)


def test_the_models_own_end_and_the_contexts_are_told_apart(anthropic: Anthropic) -> None:
    ends = {create(anthropic, max_tokens=1, extra_body={"seed": seed}).stop_reason for seed in range(9)}
    assert ends == {"max_tokens"}
    long = [{"role": "user", "content": "x" * 4060}]
    assert create(anthropic, long, max_tokens=500).stop_reason == "model_context_window_exceeded"
    assert (
        create(anthropic, max_tokens=2000, extra_body={"temperature": 2, "seed": 1}).stop_reason == "end_turn"
    )


def test_an_answer_goes_on_from_its_beginning(anthropic: Anthropic, server: LiveServer) -> None:
    server.engine.clear_cache()
    begun = [*ASKED, {"role": "assistant", "content": "The colour is"}]
    first = create(anthropic, begun, **DRAWN)
    assert total(first.usage) == total(create(anthropic, max_tokens=1).usage) + len("The colour is")
    answer = "The colour is" + first.content[0].text
    after = create(anthropic, [*ASKED, {"role": "assistant", "content": answer}, *ASKED], **DRAWN)
    assert after.usage.cache_read_input_tokens >= total(first.usage) + first.usage.output_tokens - 1


def test_neighbouring_messages_of_a_role_are_one(anthropic: Anthropic) -> None:
    parted = [
        {"role": "user", "content": "Name"},
        {"role": "user", "content": [{"type": "text", "text": "a colour."}]},
    ]
    one = [{"role": "user", "content": "Name\na colour."}]
    assert create(anthropic, parted).content == create(anthropic, one).content


@pytest.mark.parametrize("stream", [False, True])
def test_json_that_fits_a_schema(anthropic: Anthropic, stream: bool) -> None:
    schema = WEATHER["input_schema"]
    config = {"format": {"type": "json_schema", "schema": schema}}
    options = {"max_tokens": 60, "extra_body": {"output_config": config, "seed": 3}, "stream": stream}
    made = create(anthropic, **options)
    text = (
        "".join(event.delta.text for event in made if event.type == "content_block_delta")
        if stream
        else made.content[0].text
    )
    jsonschema.validate(json.loads(text), schema)


def test_the_model_is_listed(anthropic: Anthropic) -> None:
    [card] = anthropic.models.list()
    assert (card.id, card.type, card.display_name) == ("tiny", "model", "tiny")
    assert anthropic.models.retrieve("tiny") == card
    assert card.created_at.year >= 2024


# Tokens


def test_tokens_are_counted(anthropic: Anthropic) -> None:
    prompt: dict[str, Any] = {"model": "tiny", "messages": ASKED, "system": LONG, "tools": [WEATHER]}
    counted = anthropic.messages.count_tokens(**prompt).input_tokens
    assert counted == total(create(anthropic, system=LONG, tools=[WEATHER]).usage)
    assert counted > anthropic.messages.count_tokens(model="tiny", messages=ASKED).input_tokens


def test_the_next_turn_hits_the_answer_although_its_text_would_be_other_tokens(
    anthropic: Anthropic, server: LiveServer
) -> None:
    for stream in (False, True):
        server.engine.clear_cache()
        messages, known = list(ASKED), 0
        for turn in range(3):
            if stream:
                with anthropic.messages.stream(model="tiny", messages=messages, **DRAWN) as events:
                    answer = events.get_final_message()
            else:
                answer = create(anthropic, messages, **DRAWN)
            assert answer.usage.cache_read_input_tokens >= known, f"turn {turn}"
            assert "\ufffd" in answer.content[0].text, "the random model wrote clean text; take another seed"
            known = total(answer.usage) + answer.usage.output_tokens - 1
            content = [block.model_dump() for block in answer.content]
            messages += [
                {"role": "assistant", "content": content},
                {"role": "user", "content": f"And {turn}?"},
            ]


def test_a_billing_line_in_the_system_text_is_ignored(anthropic: Anthropic, server: LiveServer) -> None:
    server.engine.clear_cache()
    plain = total(create(anthropic, system=LONG).usage)
    for number in range(2):
        line = f"x-anthropic-billing-header: cc_version=2.1; cch={number};"
        for system in (f"{line}\n{LONG}", [{"type": "text", "text": line}, {"type": "text", "text": LONG}]):
            usage = create(anthropic, system=system).usage
            assert (usage.cache_read_input_tokens, total(usage)) == (plain - 1, plain)


# Tools


@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "get_weather"}])
@pytest.mark.parametrize("stream", [False, True])
def test_a_tool_is_called_and_its_result_taken(anthropic: Anthropic, choice: Any, stream: bool) -> None:
    options: dict[str, Any] = {"tools": [WEATHER], "max_tokens": 120}
    drawn = {**options, "tool_choice": choice, "extra_body": {"seed": 1}}
    if stream:
        with anthropic.messages.stream(model="tiny", messages=ASKED, **drawn) as events:
            kinds = [event.type for event in events]
            made = events.get_final_message()
        assert "input_json" in kinds
    else:
        made = create(anthropic, **drawn)
    [call] = made.content
    assert (made.stop_reason, call.type, call.name) == ("tool_use", "tool_use", "get_weather")
    assert call.id.startswith("toolu_")
    jsonschema.validate(call.input, WEATHER["input_schema"])
    result = {"type": "tool_result", "tool_use_id": call.id, "content": [{"type": "text", "text": "sunny"}]}
    said = {"role": "assistant", "content": [block.model_dump() for block in made.content]}
    after = create(anthropic, [*ASKED, said, {"role": "user", "content": [result]}], **options)
    # The call came back as it was drawn; what the grammar forced at its very end was never computed.
    forced = len('"}}\n</tool_call>') + len("Paris")
    assert after.usage.cache_read_input_tokens >= total(made.usage) + made.usage.output_tokens - forced


def test_several_calls_only_where_they_may_be(anthropic: Anthropic) -> None:
    def num_calls(seed: int, **more: Any) -> int:
        choice = {"type": "any", **more}
        made = create(
            anthropic,
            tools=[TIME],
            tool_choice=choice,
            max_tokens=400,
            extra_body={"seed": seed, "temperature": 4},
        )
        assert {block.type for block in made.content} == {"tool_use"}
        return len(made.content)

    assert max(num_calls(seed, disable_parallel_tool_use=False) for seed in range(6)) > 1
    assert {num_calls(seed, disable_parallel_tool_use=True) for seed in range(6)} == {num_calls(0)} == {1}


def test_tools_are_told_and_need_not_be_called(anthropic: Anthropic) -> None:
    plain = total(create(anthropic).usage)
    for choice in ({"type": "auto"}, {"type": "auto", "disable_parallel_tool_use": True}, {"type": "none"}):
        made = create(anthropic, tools=[WEATHER], tool_choice=choice)
        assert [block.type for block in made.content] == ["text"]
        assert total(made.usage) > plain + 100


def test_a_result_that_is_an_error_says_so(anthropic: Anthropic) -> None:
    call = {"type": "tool_use", "id": "toolu_1", "name": "get_time", "input": {}}

    def count(**more: Any) -> int:
        result = {"type": "tool_result", "tool_use_id": "toolu_1", "content": "no clock", **more}
        messages: Any = [
            *ASKED,
            {"role": "assistant", "content": [call]},
            {"role": "user", "content": [result]},
        ]
        return anthropic.messages.count_tokens(model="tiny", messages=messages).input_tokens

    assert count(is_error=True) == count(is_error=False) + len("Error: ")
