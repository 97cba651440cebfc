"""What happens around answers: clients that go, too many of them, too little time, the end of the server."""

import asyncio
import json
import signal
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
from live_server import LiveServer, live_server, send_raw, wait_until_running
from openai import APIStatusError, APITimeoutError, OpenAI, RateLimitError

from phloem.runtime import Engine
from phloem.runtime.server.gate import Ticket

ENDLESS = {"model": "tiny", "prompt": "a", "max_tokens": 4000, "ignore_eos": True, "temperature": 0}
CHAT = {
    "model": "tiny",
    "messages": [{"role": "user", "content": "a"}],
    "ignore_eos": True,
    "temperature": 0,
    "n": 2,
}


def client_of(server: LiveServer, **options: Any) -> OpenAI:
    return OpenAI(base_url=f"{server.url}/v1", api_key="any", **{"max_retries": 0, "timeout": 30, **options})


def events_of(response: httpx.Response) -> Iterator[Any]:
    for line in response.iter_lines():
        if line.startswith("data: {"):
            yield json.loads(line.removeprefix("data: "))


@pytest.mark.parametrize(("path", "body"), [("/v1/completions", ENDLESS), ("/v1/chat/completions", CHAT)])
@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_goes_ends_its_request(
    server: LiveServer, path: str, body: dict[str, Any], stream: bool
) -> None:
    before = server.engine.stats().generated_tokens
    with send_raw(server, path, {**body, "stream": stream}) as connection:
        if stream:
            assert connection.recv(1000).startswith(b"HTTP/1.1 200")
        wait_until_running(server, body.get("n", 1))
    server.wait_until_idle()
    assert server.engine.stats().generated_tokens - before < 3900 * body.get("n", 1)


def test_a_client_that_does_not_wait_ends_its_request(server: LiveServer) -> None:
    with client_of(server, timeout=0.3) as client, pytest.raises(APITimeoutError):
        client.completions.create(
            model="tiny", prompt=["a"] * 8, max_tokens=4000, extra_body={"ignore_eos": True}
        )
    server.wait_until_idle()


def test_too_many_requests_are_told_to_come_later_at_once(engine: Engine) -> None:
    with live_server(engine, max_requests=2, retry_after_s=7) as server, server.client() as client:
        with client.stream("POST", "/v1/completions", json={**ENDLESS, "n": 2, "stream": True}) as running:
            events = events_of(running)
            next(events)
            refused = client.post("/v1/completions", json=ENDLESS)
            assert refused.status_code == 429
            assert refused.headers["Retry-After"] == "7"
            assert "2 that the server takes" in refused.json()["error"]["message"]
            # No work is done for it: the prompt, which is too long, was not encoded.
            long = {"model": "tiny", "messages": [{"role": "user", "content": "x" * 9000}]}
            assert client.post("/v1/chat/completions", json=long).status_code == 429
            assert (
                client.post("/v1/responses", json={"model": "tiny", "input": "x" * 9000}).status_code == 429
            )
            assert client.post("/v1/completions", json={**ENDLESS, "prompt": "x" * 9000}).status_code == 429
            # Nor was it parsed.
            for path in (
                "/v1/completions",
                "/v1/chat/completions",
                "/v1/responses",
                "/v1/messages",
                "/generate",
                "/v1/cache/pins",
                "/v1/branches/none/generate",
                "/v1/branches/none/score",
                "/v1/branches/none/expand",
            ):
                assert client.post(path, content=b"{").status_code == 429
            # What takes no place is answered.
            assert client.get("/v1/cache/pins").status_code == 200
            assert client.delete("/v1/branches/none").status_code == 404
            with client_of(server) as openai, pytest.raises(RateLimitError):
                openai.completions.create(model="tiny", prompt="a")
            assert client.get("/v1/models").status_code == 200
        server.wait_until_idle()
        assert client.post("/v1/completions", json={**ENDLESS, "max_tokens": 1}).status_code == 200
        server.wait_until_idle()


def test_requests_whose_prompts_are_being_encoded_count_too(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    go_on = threading.Event()
    asubmit = engine.asubmit

    async def held(*args: Any, **options: Any) -> Any:
        await asyncio.to_thread(go_on.wait, 10)
        return await asubmit(*args, **options)

    monkeypatch.setattr(engine, "asubmit", held)
    with live_server(engine, max_requests=4) as server, server.client() as client:
        monkeypatch.setattr(server.service.gate, "admit", lambda count: Ticket(server.service.gate, 0))
        body = {**ENDLESS, "max_tokens": 1}
        with ThreadPoolExecutor(4) as threads:
            waiting = [threads.submit(client.post, "/v1/completions", json=body) for _ in range(4)]
            deadline = time.monotonic() + 10
            while server.service.gate.inside < 4 and time.monotonic() < deadline:
                time.sleep(0.005)
            assert client.post("/v1/completions", json=body).status_code == 429
            go_on.set()
            assert [each.result().status_code for each in waiting] == [200] * 4
        assert client.post("/v1/completions", json=body).status_code == 200
        while server.service.gate.inside and time.monotonic() < deadline:
            time.sleep(0.005)
        assert server.service.gate.inside == 0
        server.wait_until_idle()


def test_a_request_that_takes_too_long_is_ended(engine: Engine) -> None:
    with live_server(engine, request_timeout_s=0.2) as server:
        with client_of(server, max_retries=2) as client, pytest.raises(APIStatusError) as error:
            client.completions.create(
                model="tiny", prompt="a", max_tokens=4000, extra_body={"ignore_eos": True}
            )
        assert error.value.status_code == 408
        with (
            server.client() as http,
            http.stream("POST", "/v1/completions", json={**ENDLESS, "stream": True}) as answer,
        ):
            assert answer.status_code == 200
            *_, last = events_of(answer)
        assert last["error"]["type"] == "timeout_error"
        server.wait_until_idle()


def test_while_it_drains_nothing_new_is_taken_and_what_runs_goes_on(engine: Engine) -> None:
    with live_server(engine) as server, server.client() as client:
        body = {**ENDLESS, "max_tokens": 300, "stream": True}
        with client.stream("POST", "/v1/completions", json=body) as running:
            events = events_of(running)
            next(events)
            server.service.gate.draining = True
            ready = client.get("/ready")
            assert (ready.status_code, ready.json()) == (503, {"status": "draining"})
            assert client.get("/health").status_code == 200
            refused = client.post("/v1/chat/completions", json={"model": "tiny"})
            assert refused.status_code == 503
            assert refused.headers["Retry-After"] == "1"
            assert refused.json()["error"]["code"] == "draining"
            *_, last = events
        assert last["choices"][0]["finish_reason"] == "length"
        server.wait_until_idle()


def test_each_key_has_a_cache_of_its_own(engine: Engine) -> None:
    keys = ("key-of-alice", "key-of-bob")
    with live_server(engine, api_keys=keys) as server, server.client() as client:

        def cached(key: str, salt: str | None = None) -> int:
            body = {"model": "tiny", "prompt": "p" * 99, "max_tokens": 1, "cache_salt": salt}
            answer = client.post(
                "/v1/completions", json=body, headers={"Authorization": f"Bearer {key}"}
            ).json()
            return int(answer["usage"]["prompt_tokens_details"]["cached_tokens"])

        hits = [cached(keys[0]), cached(keys[0]), cached(keys[1]), cached(keys[1]), cached(keys[0], "x")]
        assert hits == [0, 99, 0, 99, 0]
        server.wait_until_idle()


@pytest.mark.parametrize(("drain_s", "num_tokens", "reason"), [(30, 100, "length"), (0.1, 4000, "abort")])
def test_a_signal_lets_running_requests_end_within_the_limit(
    engine: Engine, drain_s: float, num_tokens: int, reason: str
) -> None:
    with live_server(engine, drain_s=drain_s) as server, server.client() as client:
        body = {**ENDLESS, "max_tokens": num_tokens, "stream": True}
        with client.stream("POST", "/v1/completions", json=body) as running:
            events = events_of(running)
            next(events)
            server.server.handle_exit(signal.SIGTERM, None)
            assert client.get("/ready").status_code == 503
            *_, last = events
        assert last["choices"][0]["finish_reason"] == reason
        server.thread.join(timeout=10)
        assert not server.thread.is_alive()


def test_many_clients_at_once_get_what_each_would_get_alone(server: LiveServer) -> None:
    answers: dict[int, str] = {}

    def ask(number: int) -> None:
        with client_of(server) as client:
            events = client.completions.create(
                model="tiny", prompt=f"number {number % 4}", max_tokens=20, temperature=0.9, seed=number % 4, stream=True,
                extra_body={"ignore_eos": True},
            )  # fmt: skip
            answers[number] = "".join(event.choices[0].text for event in events)

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(answers) == 16
    assert all(answers[number] == answers[number % 4] for number in range(16))
    assert len({answers[number] for number in range(4)}) == 4


def test_a_client_that_takes_nothing_of_its_stream_is_given_up(engine: Engine) -> None:
    with live_server(engine, send_timeout_s=0.2) as server:
        content = json.dumps({**ENDLESS, "logprobs": 100, "n": 4, "stream": True}).encode()
        host, port = server.url.removeprefix("http://").split(":")
        head = f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
        with socket.socket() as connection:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            connection.connect((host, int(port)))
            connection.sendall(f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content)
            wait_until_running(server)
            server.wait_until_idle()
        assert server.service.totals.finished["length"] == 0
