"""`/v1/completions`, by OpenAI's own client and by hand."""

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest
from live_server import LiveServer
from openai import BadRequestError, NotFoundError, OpenAI

from phloem.runtime import SamplingParams

PROMPT = "The quick brown fox jumps over the lazy dog. " * 3
GREEDY: dict[str, Any] = {"temperature": 0, "extra_body": {"ignore_eos": True}}


@pytest.fixture
def client(server: LiveServer) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{server.url}/v1", api_key="any", max_retries=0, timeout=30) as client:
        yield client


def create(client: OpenAI, prompt: Any = PROMPT, **options: Any) -> Any:
    return client.completions.create(model="tiny", prompt=prompt, **{**GREEDY, **options})


def test_it_gives_what_the_engine_gives_and_says_what_was_cached(client: OpenAI, server: LiveServer) -> None:
    server.engine.clear_cache()
    first, second = (create(client, max_tokens=12) for _ in range(2))
    [done] = server.engine.generate(PROMPT, SamplingParams(max_tokens=12, temperature=0, ignore_eos=True))
    assert first.choices[0].text == second.choices[0].text == done.text
    assert first.choices[0].finish_reason == "length"
    assert first.usage.prompt_tokens == len(PROMPT) + 1
    assert (first.usage.completion_tokens, first.usage.total_tokens) == (12, len(PROMPT) + 13)
    assert first.usage.prompt_tokens_details.cached_tokens == 0
    assert second.usage.prompt_tokens_details.cached_tokens == len(PROMPT)


def test_sixteen_tokens_are_made_unless_told_otherwise(client: OpenAI) -> None:
    assert create(client).usage.completion_tokens == 16


def test_prompts_are_text_ids_or_lists_of_either(client: OpenAI) -> None:
    ids = list(b"hello")
    single = create(client, ids).choices[0].text
    assert [choice.text for choice in create(client, [ids, ids]).choices] == [single, single]
    texts = create(client, ["a", "b"], n=2, max_tokens=3, extra_body={"return_token_ids": True}).choices
    assert [choice.index for choice in texts] == [0, 1, 2, 3]
    assert [bytes(choice.prompt_token_ids[1:]) for choice in texts] == [b"a", b"a", b"b", b"b"]
    assert all(len(choice.token_ids) == 3 for choice in texts)


def test_a_stream_is_the_same_in_pieces(client: OpenAI) -> None:
    options = {"max_tokens": 20, "n": 2, "seed": 5, "temperature": 1.0}
    whole = create(client, **options)
    events = list(create(client, stream=True, stream_options={"include_usage": True}, **options))
    for index in range(2):
        pieces = [event.choices[0] for event in events if event.choices and event.choices[0].index == index]
        assert "".join(piece.text for piece in pieces) == whole.choices[index].text
        assert [piece.finish_reason for piece in pieces][-1] == "length"
        assert not any(piece.finish_reason for piece in pieces[:-1])
    assert whole.choices[0].text != whole.choices[1].text
    assert not events[-1].choices
    assert events[-1].usage.completion_tokens == 40
    assert type(events[-1].usage.prompt_tokens_details.cached_tokens) is int
    assert not any(event.usage for event in events[:-1])


def test_the_usage_can_be_in_every_event(client: OpenAI) -> None:
    options = {"stream_options": {"continuous_usage_stats": True}, "stream": True, "max_tokens": 5}
    events = list(create(client, "abc", **options))
    counts = [event.usage.completion_tokens for event in events]
    assert counts == sorted(counts)
    assert counts[-1] == 5
    assert {event.usage.prompt_tokens for event in events} == {4}


def test_logprobs_and_echo(client: OpenAI) -> None:
    done = create(client, "abc", max_tokens=2, logprobs=3, echo=True).choices[0]
    logprobs = done.logprobs
    assert done.text.startswith("abc")
    assert logprobs.tokens[:4] == ["<|bos|>", "a", "b", "c"]
    assert len(logprobs.tokens) == 6
    assert logprobs.token_logprobs[0] is None
    assert logprobs.top_logprobs[0] is None
    assert all(value < 0 for value in logprobs.token_logprobs[1:])
    assert logprobs.text_offset[:5] == [0, 0, 1, 2, 3]
    for name, value, top in list(
        zip(logprobs.tokens, logprobs.token_logprobs, logprobs.top_logprobs, strict=True)
    )[1:]:
        assert 3 <= len(top) <= 4
        assert top[name] == value
    # Greedy: what was drawn was the likeliest.
    assert max(logprobs.top_logprobs[-1].values()) == logprobs.token_logprobs[-1]


def test_a_prompt_is_scored_without_generating(client: OpenAI) -> None:
    scored = create(client, [list(b"abc"), list(b"abd")], max_tokens=0, logprobs=0, echo=True)
    longer = create(client, list(b"abc"), max_tokens=1, logprobs=0, echo=True).choices[0]
    first, second = scored.choices
    assert first.text == "abc"
    assert first.logprobs.token_logprobs == longer.logprobs.token_logprobs[:3]
    assert first.logprobs.token_logprobs[:2] == second.logprobs.token_logprobs[:2]
    assert scored.usage.completion_tokens == 0


def test_an_echo_comes_first_in_a_stream(client: OpenAI) -> None:
    events = list(create(client, "abc", stream=True, echo=True, max_tokens=1))
    assert events[0].choices[0].text == "abc"


def test_logprobs_of_a_stream_are_those_of_the_whole(client: OpenAI) -> None:
    options = {"max_tokens": 8, "logprobs": 1, "seed": 3, "temperature": 1.2}
    whole = create(client, **options).choices[0].logprobs
    parts = [event.choices[0].logprobs for event in create(client, stream=True, **options)]
    for name in ("tokens", "token_logprobs", "text_offset", "top_logprobs"):
        pieces = [each for part in parts if part is not None for each in getattr(part, name)]
        assert pieces == getattr(whole, name)


def test_stops_bias_seeds_and_lengths(client: OpenAI) -> None:
    free = create(client, max_tokens=30, temperature=1.3, seed=-4).choices[0].text
    again = create(client, max_tokens=30, temperature=1.3, seed=-4).choices[0].text
    assert free == again
    stop = re.search(r"[ -~]", free)
    assert stop, "the random model wrote no plain character; take another seed"
    cut = create(client, max_tokens=30, temperature=1.3, seed=-4, stop=[stop[0]]).choices[0]
    assert (cut.text, cut.finish_reason) == (free[: stop.start()], "stop")
    assert create(client, "a", max_tokens=3, logit_bias={"65": 100}).choices[0].text == "AAA"
    forced = create(client, max_tokens=8, logit_bias={"258": 100}, extra_body={"min_tokens": 4})
    assert forced.usage.completion_tokens == 5  # the end comes after the four


def test_every_parameter_reaches_the_engine(client: OpenAI, server: LiveServer) -> None:
    plain = {"temperature": 0.9, "top_p": 0.8, "presence_penalty": 1.5, "frequency_penalty": 0.5, "seed": 11}
    ours = {
        "top_k": 7,
        "min_p": 0.01,
        "repetition_penalty": 1.2,
        "min_tokens": 2,
        "stop_token_ids": [66],
        "ignore_eos": True,
    }
    [done] = server.engine.generate(PROMPT, SamplingParams(max_tokens=24, **plain, **ours))
    assert create(client, max_tokens=24, **plain, extra_body=ours).choices[0].text == done.text
    for name in ("top_k", "min_p", "repetition_penalty", "stop_token_ids", "ignore_eos", "min_tokens"):
        with pytest.raises(BadRequestError, match=name):
            create(client, extra_body={name: "wrong"})


def test_a_salt_keeps_the_cache_apart(client: OpenAI, server: LiveServer) -> None:
    server.engine.clear_cache()

    def cached(salt: str | None) -> int:
        body = {} if salt is None else {"cache_salt": salt}
        done = create(client, max_tokens=1, extra_body=body)
        return int(done.usage.prompt_tokens_details.cached_tokens)

    assert [cached("a"), cached("a"), cached("b"), cached(None), cached("b")] == [
        0, len(PROMPT), 0, 0, len(PROMPT)
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"suffix": "end"}, "suffix"), ({"best_of": 3}, "best_of"), ({"n": 129}, "n"), ({"n": 0}, "n"),
        ({"logprobs": 101}, "logprobs"), ({"logprobs": -1}, "logprobs"), ({"temperature": -1}, "temperature"),
        ({"top_p": 0}, "top_p"), ({"stop": [""]}, "stop"), ({"stop": ["x"] * 65}, "stop"), ({"max_tokens": -1}, "max_tokens"),
        ({"seed": 2**63}, "seed"), ({"logit_bias": {"x": 1}}, "logit_bias"), ({"logit_bias": {"9999": 1}}, "logit_bias"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"stream": True, "echo": True, "logprobs": 1}, "stream"), ({"min_tokens": 99}, "min_tokens"),
        ({"temprature": 1}, "temprature"), ({"prompt": []}, "prompt"), ({"prompt": [[]]}, "prompt"),
        ({"prompt": ["a", ""]}, "prompt[1]"), ({"prompt": [1, 2.5]}, "prompt"), ({"prompt": [[260]]}, "prompt"),
        ({"prompt": "\ud800"}, "prompt"), ({"prompt": None}, "prompt"), ({"cache_salt": ""}, "cache_salt"),
        ({"cache_salt": "x" * 10_000}, "cache_salt"), ({"cache_salt": 5}, "cache_salt"), ({"\ud800": 5}, "body"),
        ({"temperature": float("nan")}, "temperature"), ({"n": True}, "n"), ({"stop_token_ids": [-1]}, "stop_token_ids"),
        ({"logit_bias": {"5": float("inf")}}, "logit_bias"), ({"max_tokens": 1e400}, "max_tokens"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_told_with_its_field(server: LiveServer, fields: dict[str, Any], param: str) -> None:
    with server.client() as client:
        body = {"model": "tiny", "prompt": "a", "max_tokens": 2, **fields}
        answer = client.post(
            "/v1/completions", content=json.dumps(body), headers={"Content-Type": "application/json"}
        )
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error["type"] == "invalid_request_error"
    assert error["param"] == param
    assert error["message"]


def test_what_is_no_request_at_all(server: LiveServer) -> None:
    with server.client() as client:
        headers = {"Content-Type": "application/json"}
        for content in (b"", b"{", b"[]", b"null", b"\xff\xfe", b'{"model": ' + b"9" * 5000 + b"}"):
            answer = client.post("/v1/completions", content=content, headers=headers)
            assert answer.status_code == 400, content[:20]
            assert answer.json()["error"]["message"]
        assert client.post("/v1/completions", content=b"{}").status_code == 400


def test_a_prompt_that_is_too_long_is_told_with_both_numbers(client: OpenAI) -> None:
    with pytest.raises(BadRequestError, match=r"5001 tokens.*4096") as error:
        create(client, "x" * 5000)
    assert error.value.code == "context_length_exceeded"


def test_another_model_is_not_found(client: OpenAI) -> None:
    with pytest.raises(NotFoundError, match="'gpt-5'") as error:
        client.completions.create(model="gpt-5", prompt="a")
    assert error.value.code == "model_not_found"


def test_more_generations_than_there_can_ever_be_are_refused(client: OpenAI) -> None:
    with pytest.raises(BadRequestError, match=r"25 generations.*24"):
        create(client, ["a"] * 5, n=5)
