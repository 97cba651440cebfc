"""SGLang's `/generate` by hand: what it takes, what it answers, what it refuses."""

import itertools
import json
import threading
import time
from pathlib import Path
from typing import Any

import httpx
import pytest
from live_server import LiveServer, live_server
from tiny_model import make_tiny_model

from phloem.runtime import Engine, SamplingParams

TEXT = "the quick brown fox jumps over the lazy dog"
GREEDY = {"temperature": 0, "max_new_tokens": 8, "ignore_eos": True}
SCORE = {"max_new_tokens": 0, "temperature": 0}


def post(server: LiveServer, expected: int = 200, **body: Any) -> Any:
    with server.client() as client:
        answer = client.post(
            "/generate", content=json.dumps(body), headers={"Content-Type": "application/json"}
        )
    assert answer.status_code == expected, answer.text
    return answer.json()


def events(server: LiveServer, **body: Any) -> list[Any]:
    with server.client() as client:
        lines = client.post("/generate", json={"stream": True, **body}).text.split("\n\n")
    assert lines[-2:] == ["data: [DONE]", ""]
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-2]]


# Generating


def test_it_gives_what_the_engine_gives_and_tells_what_was_cached(server: LiveServer) -> None:
    server.engine.clear_cache()
    first, second = (post(server, text=TEXT, sampling_params=GREEDY, rid="mine") for _ in range(2))
    [done] = server.engine.generate(TEXT, SamplingParams(max_tokens=8, temperature=0, ignore_eos=True))
    assert first["text"] == second["text"] == done.text
    assert first["output_ids"] == done.token_ids
    meta = first["meta_info"]
    assert meta.pop("e2e_latency") > 0
    assert meta == {
        "id": "mine",
        "finish_reason": {"type": "length", "length": 8},
        "prompt_tokens": len(TEXT) + 1,
        "completion_tokens": 8,
        "cached_tokens": 0,
    }
    assert second["meta_info"]["cached_tokens"] == len(TEXT)


def test_a_list_is_answered_by_a_list(server: LiveServer) -> None:
    one = post(server, text="a", sampling_params=GREEDY)
    answers = post(
        server, text=["a", "b"], sampling_params=[GREEDY, {**GREEDY, "max_new_tokens": 2}], rid="r"
    )
    assert answers[0]["text"] == one["text"]
    assert [answer["meta_info"]["completion_tokens"] for answer in answers] == [8, 2]
    assert [answer["meta_info"]["id"] for answer in answers] == ["r_0", "r_1"]
    assert [type(post(server, text=["a"], sampling_params=GREEDY)), type(one)] == [list, dict]
    ids = list(b"abc")
    single = post(server, input_ids=ids, sampling_params=GREEDY)
    assert single["meta_info"]["prompt_tokens"] == 3
    assert [each["text"] for each in post(server, input_ids=[ids, ids], sampling_params=GREEDY)] == [
        single["text"]
    ] * 2


def test_without_a_limit_it_makes_128_tokens(server: LiveServer) -> None:
    done = post(server, text="a", sampling_params={"ignore_eos": True, "temperature": 0})
    assert done["meta_info"]["completion_tokens"] == 128
    assert post(server, text="ab")["meta_info"]["prompt_tokens"] == 3


def test_several_of_one_prompt(server: LiveServer) -> None:
    sampling = {**GREEDY, "temperature": 1.0, "n": 3, "sampling_seed": 5}
    answers = post(server, text=TEXT, sampling_params=sampling, rid="r")
    assert len({answer["text"] for answer in answers}) == 3
    assert [answer["meta_info"]["id"] for answer in answers] == ["r_0", "r_1", "r_2"]
    again = post(server, text=[TEXT, "a"], sampling_params=sampling)
    assert [answer["text"] for answer in again[:3]] == [answer["text"] for answer in answers]
    assert len(again) == 6


def test_every_parameter_reaches_the_engine(server: LiveServer) -> None:
    same = {
        "temperature": 0.9, "top_p": 0.8, "top_k": 7, "min_p": 0.01, "presence_penalty": 1.5, "frequency_penalty": 0.5,
        "repetition_penalty": 1.2, "stop_token_ids": [66], "stop": ["zz"], "ignore_eos": True,
    }  # fmt: skip
    [done] = server.engine.generate(
        TEXT, SamplingParams(max_tokens=24, min_tokens=2, seed=11, logit_bias={70: 2.0}, **same)
    )
    ours = {"max_new_tokens": 24, "min_new_tokens": 2, "sampling_seed": 11, "logit_bias": {"70": 2.0}, **same}
    assert post(server, text=TEXT, sampling_params=ours)["text"] == done.text
    for name in ours:
        wrong = post(server, 400, text=TEXT, sampling_params={name: {"no": "number"}})
        assert name in wrong["error"]["message"]


def test_it_tells_where_it_stopped(server: LiveServer) -> None:
    whole = post(server, text=TEXT, sampling_params={**GREEDY, "max_new_tokens": 30})
    stop = whole["text"][4:6]
    cut = post(server, text=TEXT, sampling_params={**GREEDY, "max_new_tokens": 30, "stop": [stop, "never"]})
    assert cut["text"] == whole["text"][: whole["text"].index(stop)]
    assert cut["meta_info"]["finish_reason"] == {"type": "stop", "matched": stop}
    eos = post(server, text=TEXT, sampling_params={"logit_bias": {"258": 500.0}})
    assert eos["meta_info"]["finish_reason"] == {"type": "stop", "matched": 258}
    done = post(server, text=TEXT, sampling_params={"regex": "ab{2}", "max_new_tokens": 9})
    assert (done["text"], done["meta_info"]["finish_reason"]["type"]) == ("abb", "stop")


def test_an_empty_text_is_computed_without_a_word(server: LiveServer) -> None:
    done = post(server, text="", sampling_params=SCORE)
    assert (done["text"], done["meta_info"]["prompt_tokens"]) == ("", 1)  # BOS
    assert post(server, text="", sampling_params=GREEDY)["meta_info"]["completion_tokens"] == 8


def test_without_a_bos_there_is_nothing_to_compute_of_an_empty_text(tmp_path: Path) -> None:
    path = make_tiny_model(tmp_path)
    tokenizer = json.loads((path / "tokenizer.json").read_text())
    (path / "tokenizer.json").write_text(json.dumps({**tokenizer, "post_processor": None}))
    with Engine(path, dtype="float32", num_blocks=64) as engine, live_server(engine) as server:
        done = post(server, text="", sampling_params=SCORE)
        assert (done["text"], done["meta_info"]["prompt_tokens"]) == ("", 0)
        one, two = post(server, text=["", "ab"], sampling_params=SCORE, return_logprob=True)
        assert one["meta_info"]["input_token_logprobs"] == []
        assert len(two["meta_info"]["input_token_logprobs"]) == 2
        assert post(server, 400, text="", sampling_params=GREEDY)["error"]["param"] == "text"
        assert post(server, 400, text="", sampling_params=SCORE, stream=True)["error"]["param"] == "text"


# Streams


def test_a_stream_repeats_the_text_so_far(server: LiveServer) -> None:
    sampling = {**GREEDY, "max_new_tokens": 20}
    whole = post(server, text=TEXT, sampling_params=sampling, return_logprob=True, top_logprobs_num=1)
    parts = events(server, text=TEXT, sampling_params=sampling, return_logprob=True, top_logprobs_num=1)
    assert len(parts) > 10
    for before, after in itertools.pairwise(parts):
        assert after["text"].startswith(before["text"])
        assert before["meta_info"]["finish_reason"] is None
        assert before["meta_info"]["prompt_tokens"] == len(TEXT) + 1
        count = before["meta_info"]["completion_tokens"]
        assert before["output_ids"] == whole["output_ids"][:count]
        known = whole["meta_info"]["output_token_logprobs"][:count]
        assert before["meta_info"]["output_token_logprobs"] == known
    last = parts[-1]
    for answer in (whole, last):
        for name in ("id", "e2e_latency", "cached_tokens"):
            answer["meta_info"].pop(name)
    assert last == whole


def test_the_parts_of_several_are_told_apart(server: LiveServer) -> None:
    texts = ["a", TEXT]
    whole = post(server, text=texts, sampling_params=GREEDY)
    last = {part["index"]: part for part in events(server, text=texts, sampling_params=GREEDY)}
    assert [last[index]["text"] for index in range(2)] == [answer["text"] for answer in whole]


# Log-probabilities


def test_the_prompts_log_probabilities_begin_where_they_are_asked_for(server: LiveServer) -> None:
    ids = server.engine.tokenizer.encode(TEXT)
    options = {"text": TEXT, "sampling_params": SCORE, "return_logprob": True}
    whole = post(server, **options, logprob_start_len=0)["meta_info"]["input_token_logprobs"]
    assert [entry[1] for entry in whole] == ids
    assert whole[0] == [None, ids[0], None]
    assert all(entry[0] < 0 for entry in whole[1:])
    assert post(server, **options)["meta_info"]["input_token_logprobs"] == whole
    assert post(server, **options, logprob_start_len=-1)["meta_info"]["input_token_logprobs"] == whole
    for start in (1, 20, len(ids) - 2, len(ids) - 1, len(ids), 4000):
        meta = post(server, **options, logprob_start_len=start)["meta_info"]
        assert meta["input_token_logprobs"] == whole[start + 1 :]
        assert meta["output_token_logprobs"] == []
        assert meta["cached_tokens"] == min(start, len(ids) - 1)
        known = [entry[0] for entry in whole[start + 1 :]]
        expected = sum(known) / len(known) if known else None
        assert meta["normalized_prompt_logprob"] == pytest.approx(expected)
    [done] = server.engine.generate(TEXT, SamplingParams(max_tokens=0, prompt_logprobs=0))
    assert [entry[0] for entry in whole[1:]] == [entry.logprob for entry in done.prompt_logprobs]


def test_a_prompt_that_is_gone_on_from_tells_its_own_only_when_asked(server: LiveServer) -> None:
    options = {
        "text": TEXT,
        "sampling_params": GREEDY,
        "return_logprob": True,
        "return_text_in_logprobs": True,
    }
    meta = post(server, **options)["meta_info"]
    assert meta["input_token_logprobs"] == []
    assert meta["normalized_prompt_logprob"] is None
    assert len(meta["output_token_logprobs"]) == 8
    meta = post(server, **options, logprob_start_len=40, top_logprobs_num=2)["meta_info"]
    assert [entry[2] for entry in meta["input_token_logprobs"]] == list(TEXT[40:])
    assert [len(tops) for tops in meta["input_top_logprobs"]] == [2] * 3
    for entry, tops in zip(meta["output_token_logprobs"], meta["output_top_logprobs"], strict=True):
        assert tops[0] == entry, "greedy: what was taken was the likeliest"
        assert tops[0][0] >= tops[1][0]
    whole = post(server, **options, logprob_start_len=0, top_logprobs_num=1)["meta_info"]
    assert whole["input_top_logprobs"][0] is None
    assert "output_top_logprobs" not in post(server, **options)["meta_info"]


def test_a_character_of_several_tokens_stands_with_its_last(server: LiveServer) -> None:
    text = "a\u00e9\U0001f600b"
    options = {"sampling_params": SCORE, "return_logprob": True, "return_text_in_logprobs": True}
    meta = post(server, text=text, logprob_start_len=1, **options)["meta_info"]
    texts = [entry[2] for entry in meta["input_token_logprobs"]]
    assert [texts[1], texts[5], texts[6]] == ["\u00e9", "\U0001f600", "b"]
    # Also where the first of its tokens lies before.
    meta = post(server, text=text, logprob_start_len=6, **options)["meta_info"]
    assert [entry[2] for entry in meta["input_token_logprobs"]] == ["\U0001f600", "b"]


def test_lists_have_an_entry_for_each_prompt(server: LiveServer) -> None:
    answers = post(
        server, text=["abc", "abd"], sampling_params=SCORE, return_logprob=[True, False], logprob_start_len=[2, None],
        top_logprobs_num=[1, None], rid=["x", "y"],
    )  # fmt: skip
    assert len(answers[0]["meta_info"]["input_token_logprobs"]) == 1
    assert "input_token_logprobs" not in answers[1]["meta_info"]
    assert [answer["meta_info"]["id"] for answer in answers] == ["x", "y"]
    # SGLang's frontend writes [null] for what nobody set.
    nothing = {"logprob_start_len": [None], "top_logprobs_num": [None], "return_text_in_logprobs": [None]}
    assert post(server, text="a", sampling_params=GREEDY, **nothing)["text"]


def test_choices_compute_their_own_tokens_only(server: LiveServer) -> None:
    server.engine.clear_cache()
    count = post(server, text=TEXT, sampling_params=SCORE)["meta_info"]["prompt_tokens"]
    before = server.engine.stats().computed_tokens
    choices = [" yes, always", " no, never", " no, never again"]
    answers = post(
        server, text=[TEXT + choice for choice in choices], sampling_params=SCORE, return_logprob=True,
        logprob_start_len=count - 2,
    )  # fmt: skip
    computed = server.engine.stats().computed_tokens - before
    assert computed <= sum(len(choice) + 1 for choice in choices)
    with server.engine.branch(TEXT) as branch:
        scores = branch.score(choices)
    for answer, score in zip(answers, scores, strict=True):
        found = [entry[0] for entry in answer["meta_info"]["input_token_logprobs"]]
        assert found[1:] == [entry.logprob for entry in score.token_logprobs]


# Refusals


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"text": None}, "text"), ({"input_ids": [1]}, "text"), ({"text": []}, "text"), ({"text": ["a", 5]}, "text"),
        ({"text": None, "input_ids": []}, "input_ids"), ({"text": None, "input_ids": [[1], []]}, "input_ids[1]"),
        ({"text": None, "input_ids": [[260]]}, "input_ids[0]"), ({"text": "\ud800"}, "text"), ({"text": ["a", "\ud800"]}, "text[1]"),
        ({"txt": "a"}, "txt"), ({"image_data": "x"}, "image_data"), ({"lora_path": ["x"]}, "lora_path"),
        ({"input_embeds": [[0.5]]}, "input_embeds"), ({"return_hidden_states": True}, "return_hidden_states"),
        ({"custom_logit_processor": "gASV"}, "custom_logit_processor"), ({"session_params": {"id": "1"}}, "session_params"),
        ({"return_logprob": True, "logprob_start_len": -2}, "logprob_start_len"), ({"return_logprob": [True, True]}, "return_logprob"),
        ({"return_logprob": True, "top_logprobs_num": 101}, "top_logprobs_num"), ({"top_logprobs_num": -1}, "top_logprobs_num"),
        ({"sampling_params": [{}, {}]}, "sampling_params"), ({"rid": ["a", "b"]}, "rid"), ({"extra_key": ""}, "extra_key"),
        ({"extra_key": "x" * 300}, "extra_key"), ({"text": ["a", "b"], "sampling_params": [{"n": 2}, {}]}, "n"),
        ({"return_logprob": True, "logprob_start_len": 0, "sampling_params": {"n": 2}}, "logprob_start_len"),
        ({"sampling_params": {"n": 0}}, "n"), ({"sampling_params": {"n": 129}}, "n"), ({"sampling_params": {"temperature": -1}}, "temperature"),
        ({"sampling_params": {"max_new_tokens": -1}}, "sampling_params.max_new_tokens"), ({"sampling_params": {"min_new_tokens": 200}}, "min_new_tokens"),
        ({"sampling_params": {"stop_regex": "a+"}}, "stop_regex"), ({"sampling_params": {"ebnf": "root ::= 'a'"}}, "ebnf"),
        ({"sampling_params": {"regex": "a", "json_schema": "{}"}}, "regex"), ({"sampling_params": {"json_schema": "{"}}, "json_schema"),
        ({"sampling_params": {"json_schema": " " * 70_000}}, "json_schema"), ({"sampling_params": {"regex": "a" * 70_000}}, "regex"),
        ({"sampling_params": {"skip_special_tokens": False}}, "skip_special_tokens"), ({"sampling_params": {"top_k": 0}}, "top_k"),
        ({"sampling_params": {"sampling_seed": 2**64}}, "sampling_seed"), ({"sampling_params": {"stop": [""]}}, "stop"),
        ({"sampling_params": {"temprature": 1}}, "sampling_params.temprature"), ({"sampling_params": {"regex": "("}}, "regex"),
        ({"sampling_params": {"json_schema": '{"type": "nothing"}'}}, "json_schema"), ({"text": ["a", "x" * 5000]}, "text[1]"),
        ({"text": None, "input_ids": [1] * 4096}, "input_ids"), ({"text": ["a"] * 10_000}, None), ({"text": ["a"] * 5, "sampling_params": {"n": 5}}, None),
    ],
)  # fmt: skip
def test_what_is_wrong_is_told_with_its_field(
    server: LiveServer, fields: dict[str, Any], param: str | None
) -> None:
    error = post(server, 400, **{"text": "a", **fields})["error"]
    assert error["param"] == param, error
    assert error["message"]


def test_what_asks_for_nothing_is_taken(server: LiveServer) -> None:
    nothing = {"image_data": None, "lora_path": [None], "return_hidden_states": False, "log_metrics": True}
    sampling = {
        **GREEDY,
        "stop_regex": None,
        "stop": [],
        "top_k": -1,
        "regex": None,
        "skip_special_tokens": True,
    }
    assert post(server, text="a", sampling_params=sampling, **nothing)["text"]


def test_a_key_keeps_the_cache_apart(server: LiveServer) -> None:
    server.engine.clear_cache()

    def cached(key: str | None) -> int:
        options = {} if key is None else {"extra_key": key}
        done = post(server, text=TEXT, sampling_params=GREEDY, **options)
        return int(done["meta_info"]["cached_tokens"])

    assert [cached("a"), cached("a"), cached("b"), cached(None)] == [0, len(TEXT), 0, 0]


# Ending


def test_a_request_is_ended_by_its_rid(server: LiveServer) -> None:
    for abort, whose in (
        ({"rid": "long"}, "long"),
        ({"rid": "r"}, ["r_0", "r_1"]),
        ({"abort_all": True}, "any"),
    ):
        body: dict[str, Any] = {"sampling_params": {"max_new_tokens": 4000, "ignore_eos": True}}
        body |= {"text": "a", "rid": whose} if isinstance(whose, str) else {"text": ["a", "b"], "rid": "r"}
        answers: list[Any] = []
        thread = threading.Thread(
            target=lambda body=body, answers=answers: answers.append(post(server, **body))
        )
        thread.start()
        wait_for(lambda: server.engine.stats().running > 0)
        with server.client() as client:
            assert client.post("/abort_request", json={"rid": "of nobody"}).status_code == 200
            assert client.post("/abort_request", json=abort).status_code == 200
        thread.join(timeout=30)
        ended = answers[0] if isinstance(answers[0], list) else answers
        assert [each["meta_info"]["finish_reason"]["type"] for each in ended] == ["abort"] * len(ended)
        assert 0 < ended[0]["meta_info"]["completion_tokens"] < 4000
    with server.client() as client:
        refused = client.post("/abort_request", json={"rid": ""})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "rid")


def wait_for(condition: Any) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_a_client_that_leaves_ends_its_request(server: LiveServer) -> None:
    body = {"text": "a", "sampling_params": {"max_new_tokens": 4000, "ignore_eos": True}}
    with httpx.Client(base_url=server.url, timeout=0.5) as client, pytest.raises(httpx.ReadTimeout):
        client.post("/generate", json=body)
    server.wait_until_idle()
    with (
        server.client() as client,
        client.stream("POST", "/generate", json={**body, "stream": True}) as answer,
    ):
        assert next(answer.iter_lines())
    server.wait_until_idle()
