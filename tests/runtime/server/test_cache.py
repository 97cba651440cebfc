"""`/v1/cache`: explanations and pins, each of its own key's cache alone."""

import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from live_server import LiveServer, live_server, send_raw

from phloem.runtime import Engine, SamplingParams

PROMPT = list(range(40, 80))
ONE = SamplingParams(temperature=0, max_tokens=1)
KEYS = ("key-of-alice", "key-of-bob")


@pytest.fixture
def client(server: LiveServer) -> Iterator[httpx.Client]:
    server.engine.clear_cache()
    with server.client() as client:
        yield client
        unpin_all(client)


def unpin_all(client: httpx.Client) -> None:
    for pin in pins(client):
        assert client.delete(f"/v1/cache/pins/{pin['id']}").json()["deleted"]


def explained(client: httpx.Client, prompt: list[int], **body: Any) -> dict[str, Any]:
    answer = client.post("/v1/cache/explain", json={"token_ids": prompt, **body})
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def reasons(explanation: dict[str, Any]) -> list[tuple[str, int, int]]:
    return [(miss["reason"], miss["start"], miss["end"]) for miss in explanation["misses"]]


def complete(client: httpx.Client, prompt: list[int], **body: Any) -> int:
    """Run a prompt; return how many of its tokens were cached."""
    body = {"model": "tiny", "prompt": prompt, "max_tokens": 1, "temperature": 0, **body}
    usage = client.post("/v1/completions", json=body).json()["usage"]
    return int(usage["prompt_tokens_details"]["cached_tokens"])


def pins(client: httpx.Client) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = client.get("/v1/cache/pins").json()["data"]
    return found


def pinned(client: httpx.Client, prompt: list[int] = PROMPT, **body: Any) -> dict[str, Any]:
    answer = client.post("/v1/cache/pins", json={"token_ids": prompt, **body})
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def refused(client: httpx.Client, path: str, body: dict[str, Any]) -> tuple[int, Any, str]:
    answer = client.post(path, json=body)
    error = answer.json()["error"]
    return answer.status_code, error["param"], error["message"]


def test_an_explanation_tells_what_a_run_would_reuse_and_changes_nothing(client: httpx.Client) -> None:
    assert reasons(explained(client, PROMPT)) == [("never_seen", 0, 40)]
    assert reasons(explained(client, PROMPT)) == [("never_seen", 0, 40)]
    complete(client, PROMPT)
    again = explained(client, PROMPT)
    assert (again["cached_tokens"], reasons(again)) == (39, [("last_token", 39, 40)])
    assert complete(client, PROMPT) == 39


def test_an_explanation_tells_where_a_prompt_left_an_earlier_one_but_not_which(client: httpx.Client) -> None:
    complete(client, PROMPT)
    other = [*PROMPT[:20], 99, *PROMPT[21:]]
    found = explained(client, other)
    assert found["cached_tokens"] == 20
    [miss] = found["misses"]
    assert (miss["reason"], miss["start"], miss["end"]) == ("diverged", 20, 40)
    assert (miss["here"], miss["there"]) == ({"token_id": 99, "text": "c"}, {"token_id": 60, "text": "<"})
    assert found["description"].endswith("diverged at token 20 from an earlier path: 'c' here, '<' there")
    assert explained(client, other, cache_salt="x")["misses"][0]["reason"] == "never_seen"


def test_text_and_messages_are_explained_as_they_would_run(client: httpx.Client) -> None:
    messages = [{"role": "user", "content": "Name a colour."}]
    chat = {"model": "tiny", "messages": messages, "max_tokens": 1}
    for path, body, asked in (
        (
            "/v1/completions",
            {"model": "tiny", "prompt": "Some text. " * 4, "max_tokens": 1},
            {"text": "Some text. " * 4},
        ),
        ("/v1/chat/completions", chat, {"messages": messages}),
    ):
        usage = client.post(path, json=body).json()["usage"]
        found = client.post("/v1/cache/explain", json=asked).json()
        assert (found["num_tokens"], found["cached_tokens"]) == (
            usage["prompt_tokens"],
            usage["prompt_tokens"] - 1,
        )


def test_an_explanation_tells_nothing_of_other_keys(engine: Engine) -> None:
    engine.clear_cache()
    with (
        live_server(engine, api_keys=KEYS) as server,
        server.client(headers={"x-api-key": KEYS[0]}) as alice,
        server.client(headers={"x-api-key": KEYS[1]}) as bob,
    ):
        complete(alice, PROMPT)
        unseen = explained(bob, [*PROMPT[1:], 1])
        found = explained(bob, PROMPT)
        assert found == unseen
        assert reasons(found) == [("never_seen", 0, 40)]
        complete(bob, PROMPT[:8])
        assert explained(bob, PROMPT)["cached_tokens"] == 8
        assert reasons(explained(bob, PROMPT)) == [("never_seen", 8, 40)]


def test_a_pin_computes_a_prompt_and_keeps_it_from_eviction(client: httpx.Client, server: LiveServer) -> None:
    pin = pinned(client, ttl=60)
    assert (pin["num_tokens"], pin["ttl"]) == (32, 60)
    server.engine.generate([[n % 250 for n in range(start, start + 4000)] for start in range(3)], ONE)
    assert server.engine.stats().cache.evictions > 0
    assert complete(client, PROMPT) >= 32
    [listed] = pins(client)
    assert listed["id"] == pin["id"]
    assert 50 < listed["expires_in_s"] <= 60
    assert client.delete(f"/v1/cache/pins/{pin['id']}").status_code == 200
    assert (pins(client), server.engine.stats().cache.pinned) == ([], 0)
    gone = client.delete(f"/v1/cache/pins/{pin['id']}")
    assert (gone.status_code, gone.json()["error"]["param"]) == (404, "pin_id")


def test_a_pin_ends_by_itself_unless_it_is_used(client: httpx.Client, server: LiveServer) -> None:
    pinned(client, ttl=1.5)
    kept = pinned(client, [7, *PROMPT], ttl=1.5)
    deadline = time.monotonic() + 10
    while len(pins(client)) > 1 and time.monotonic() < deadline:
        complete(client, [7, *PROMPT])
    assert [pin["id"] for pin in pins(client)] == [kept["id"]]
    while pins(client) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert server.engine.stats().cache.pinned == 0


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"token_ids": PROMPT, "ttl": 0}, "ttl"), ({"token_ids": PROMPT, "ttl": 3601}, "ttl"), ({"token_ids": PROMPT, "ttl": -1.5}, "ttl"),
        ({"token_ids": [1] * 15}, "pin"), ({}, "text"), ({"token_ids": PROMPT, "owner": "me"}, "owner"),
    ],
)  # fmt: skip
def test_what_can_not_be_pinned_is_told_by_field(
    client: httpx.Client, body: dict[str, Any], field: str
) -> None:
    assert refused(client, "/v1/cache/pins", body)[:2] == (400, field)
    assert pins(client) == []


def test_a_pin_of_another_key_is_an_unknown_one_and_each_keys_tokens_are_limited(engine: Engine) -> None:
    with live_server(engine, api_keys=KEYS, max_pinned_tokens_per_key=100) as server:
        with (
            server.client(headers={"x-api-key": KEYS[0]}) as alice,
            server.client(headers={"x-api-key": KEYS[1]}) as bob,
        ):
            pin = pinned(alice)
            assert pins(bob) == []
            assert bob.delete(f"/v1/cache/pins/{pin['id']}").status_code == 404
            pinned(alice, [1, *PROMPT])
            status, _, message = refused(alice, "/v1/cache/pins", {"token_ids": [2, *PROMPT]})
            assert status == 429
            assert "64 tokens" in message
            assert "max_pinned_tokens_per_key" in message
            status, _, message = refused(alice, "/v1/cache/pins", {"token_ids": PROMPT * 3})
            assert status == 400
            assert "max_pinned_tokens_per_key" in message
            pinned(bob, [2, *PROMPT])
            alice.delete(f"/v1/cache/pins/{pin['id']}")
            pinned(alice, [2, *PROMPT])
            unpin_all(alice)
            unpin_all(bob)
        server.wait_until_idle()


def test_pins_and_breakpoints_of_a_key_share_one_limit(engine: Engine) -> None:
    def cached_by(client: httpx.Client, text: str) -> int:
        """Send a message with a breakpoint at its end; return how many tokens it keeps."""
        message = {"role": "user", "content": text}
        body = {
            "model": "tiny",
            "max_tokens": 1,
            "messages": [message],
            "cache_control": {"type": "ephemeral"},
        }
        usage = client.post("/v1/messages", json=body).json()["usage"]
        return int(usage["cache_creation_input_tokens"])

    engine.clear_cache()
    with live_server(engine, max_pinned_tokens_per_key=200) as server:
        with server.client() as client:
            assert cached_by(client, "x" * 100) > 100
            status, _, message = refused(client, "/v1/cache/pins", {"token_ids": PROMPT * 3})
            assert status == 429
            assert "max_pinned_tokens_per_key" in message
            pinned(client)
            assert cached_by(client, "y" * 100) == 0, "the pin and the first breakpoint leave less"
            unpin_all(client)
            assert cached_by(client, "z" * 20) > 20
        server.wait_until_idle()
    engine.clear_cache()


def test_a_budget_that_others_use_up_is_told_without_their_pins(engine: Engine) -> None:
    with live_server(engine, api_keys=KEYS) as server:
        with (
            server.client(headers={"x-api-key": KEYS[0]}) as alice,
            server.client(headers={"x-api-key": KEYS[1]}) as bob,
        ):
            # Half of the 512 blocks may be pinned.
            pinned(alice, [n % 250 for n in range(4000)])
            status, _, message = refused(bob, "/v1/cache/pins", {"token_ids": [9] * 200})
            assert status == 429
            assert not any(character.isdigit() for character in message)
            assert pins(bob) == []
            unpin_all(alice)
            pinned(bob, [9] * 200)
            unpin_all(bob)
        server.wait_until_idle()
        assert server.engine.stats().cache.pinned == 0


def test_a_client_that_goes_while_its_prompt_is_pinned_leaves_no_pin(
    client: httpx.Client, server: LiveServer
) -> None:
    for delay_s in (0.0, 0.005, 0.02, 0.05):
        with send_raw(server, "/v1/cache/pins", {"token_ids": [n % 250 for n in range(3000)]}):
            time.sleep(delay_s)
        while server.service.gate.active:
            time.sleep(0.002)
        # It may have been done before the client went.
        unpin_all(client)
        assert server.engine.stats().cache.pinned == 0
        server.engine.clear_cache()
