"""What an operator sees: metrics and the line of log."""

import logging
import re
import time

import pytest
from live_server import LiveServer, live_server
from prometheus_client.parser import text_string_to_metric_families

from phloem.runtime import Engine

BODY = {"model": "tiny", "prompt": "m" * 70, "max_tokens": 5, "ignore_eos": True}


def samples(server: LiveServer, **headers: str) -> dict[str, float]:
    with server.client() as client:
        answer = client.get("/metrics", headers=headers)
    assert answer.status_code == 200
    found = {}
    for family in text_string_to_metric_families(answer.text):
        for sample in family.samples:
            labels = dict(sample.labels)
            assert labels.pop("model_name") == "tiny"
            found[" ".join((sample.name, *labels.values()))] = sample.value
    return found


def test_metrics_count_what_requests_did(engine: Engine) -> None:
    engine.clear_cache()
    with live_server(engine) as server, server.client() as client:
        before = samples(server)
        for stream in (False, True):
            assert client.post("/v1/completions", json={**BODY, "stream": stream}).status_code == 200
        client.post("/v1/completions", json={**BODY, "prompt": "k" * 40, "n": 2})
        server.wait_until_idle()
        after = samples(server)
    grown = {name: after[name] - before.get(name, 0) for name in after}
    assert grown["vllm:prompt_tokens_total"] == 71 + 71 + 41
    assert grown["vllm:generation_tokens_total"] == 20
    assert grown["phloem:cached_tokens_total"] == 70 + 1  # the second prompt, and the begin of the third
    assert grown["vllm:request_success_total length"] == 4
    assert grown["vllm:time_to_first_token_seconds_count"] == 4
    missed = {name: value for name, value in grown.items() if name.startswith("phloem:missed_tokens_total")}
    assert sum(missed.values()) == 71 + 1 + 40
    assert missed["phloem:missed_tokens_total never_seen"] == 71
    assert missed["phloem:missed_tokens_total last_token"] == 1
    blocks = {name.split()[1]: value for name, value in after.items() if name.startswith("phloem:blocks")}
    pinned = blocks.pop("pinned")
    assert (pinned, sum(blocks.values())) == (0, 512)
    assert after["vllm:num_requests_running"] == after["phloem:active_generations"] == 0


def test_metrics_tell_why_blocks_left_and_how_old_hits_were(engine: Engine) -> None:
    engine.clear_cache()
    with live_server(engine) as server, server.client() as client:
        before = samples(server)
        client.post("/v1/completions", json=BODY)
        client.post("/v1/completions", json=BODY)
        # The pool holds 8192 tokens.
        for letter in "abc":
            client.post("/v1/completions", json={**BODY, "prompt": letter * 4000})
        # And the ends of 32 paths.
        client.post("/v1/completions", json={**BODY, "prompt": [f"{n:02d} and so on" for n in range(40)]})
        branch_id = client.post("/v1/branches", json={"text": "abc"}).json()["id"]
        engine.clear_cache()
        server.wait_until_idle()
        after = samples(server)
        client.delete(f"/v1/branches/{branch_id}")
    grown = {name: after[name] - before.get(name, 0) for name in after}
    assert grown["phloem:evictions_total capacity"] > 200
    assert grown["phloem:evictions_total tail"] > 0
    assert 0 < grown["phloem:evictions_total cleared"] <= 512
    assert grown["phloem:hit_age_seconds_count"] == grown["phloem:hit_age_seconds_bucket 86400.0"] == 1
    assert grown["phloem:hit_age_seconds_bucket +Inf"] == 1
    assert 0 <= grown["phloem:hit_age_seconds_sum"] < 60
    assert after["phloem:branches"] == 1
    assert (after["phloem:blocks evictable"], after["phloem:blocks locked"]) == (0, 0)


def test_metrics_are_the_admins_where_there_are_keys(engine: Engine) -> None:
    keys = {"api_keys": ("key-of-alice",), "admin_key": "key-of-admin"}
    with live_server(engine, **keys) as server, server.client() as client:
        assert client.get("/metrics").status_code == 401
        refused = client.get("/metrics", headers={"Authorization": "Bearer key-of-alice"})
        assert refused.status_code == 403
        assert refused.json()["error"]["type"] == "permission_error"
        assert samples(server, Authorization="Bearer key-of-admin")


def test_a_line_of_log_tells_what_happened_and_no_prompt(
    engine: Engine, caplog: pytest.LogCaptureFixture
) -> None:
    engine.clear_cache()
    caplog.set_level(logging.INFO, logger="phloem")
    with live_server(engine, log_interval_s=0.05) as server, server.client() as client:
        time.sleep(0.3)
        assert not caplog.messages, "nothing happened yet"
        for _ in range(2):
            client.post("/v1/completions", json=BODY)
        deadline = time.monotonic() + 10
        while sum(numbers(caplog.messages, "prompts")) < 2 and time.monotonic() < deadline:
            time.sleep(0.02)
    assert sum(numbers(caplog.messages, "new tokens")) == 72
    assert sum(numbers(caplog.messages, "cached")) == 70
    assert sum(numbers(caplog.messages, "generated")) == 10
    assert "running" in caplog.messages[0]
    assert "mmm" not in caplog.text


def numbers(messages: list[str], word: str) -> list[int]:
    return [int(number) for message in messages for number in re.findall(rf"(\d+) {word}", message)]
