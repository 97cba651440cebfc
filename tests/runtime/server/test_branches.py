"""`/v1/branches`: what a branch gives over HTTP is what it gives in the process, and it is its owner's alone."""

import json
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import httpx
import pytest
from live_server import LiveServer, live_server, send_raw, wait_until_running

from phloem.runtime import Engine, SamplingParams
from phloem.runtime.server.auth import KeyRing
from phloem.runtime.server.branch_store import BranchStore
from phloem.runtime.server.errors import ApiError

TEXT = "The quick brown fox jumps over the lazy dog"
GREEDY: dict[str, Any] = {"temperature": 0, "ignore_eos": True, "max_tokens": 6}
PARAMS = SamplingParams(temperature=0, ignore_eos=True, max_tokens=6)
DRAWN: dict[str, Any] = {"temperature": 1.0, "ignore_eos": True, "max_tokens": 6, "seed": 3}
ENDLESS: dict[str, Any] = {"temperature": 0, "ignore_eos": True, "max_tokens": 3900}


class Client(httpx.Client):
    """Speaks to `/v1/branches`."""

    def opened(self, **body: Any) -> str:
        return self.done("", **(body or {"text": TEXT}))["id"]

    def done(self, path: str, **body: Any) -> Any:
        answer = self.post(f"/v1/branches{path}", json=body)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def refused(self, path: str, **body: Any) -> tuple[int, dict[str, Any]]:
        answer = self.post(f"/v1/branches{path}", json=body)
        return answer.status_code, answer.json()["error"]

    def ids(self) -> list[str]:
        return [each["id"] for each in self.get("/v1/branches").json()["data"]]

    def delete_all(self) -> None:
        for branch_id in self.ids():
            assert self.delete(f"/v1/branches/{branch_id}").json()["deleted"]


KEYS = ("key-of-alice", "key-of-bob")


@contextmanager
def alice_and_bob(server: LiveServer) -> Iterator[tuple[Client, Client]]:
    """A client for each key; the server must be idle again when they have deleted their branches."""
    with ExitStack() as clients:
        both = [
            clients.enter_context(Client(base_url=server.url, headers={"x-api-key": key}, timeout=30))
            for key in KEYS
        ]
        yield both[0], both[1]
        for each in both:
            each.delete_all()
        server.wait_until_idle()


@pytest.fixture
def client(server: LiveServer) -> Iterator[Client]:
    with Client(base_url=server.url, timeout=30) as client:
        yield client
        client.delete_all()


def test_a_branch_is_opened_from_text_ids_and_messages(client: Client, engine: Engine) -> None:
    messages = [{"role": "user", "content": "Name a colour."}]
    for body, expected in (
        ({"text": TEXT}, engine.tokenizer.encode(TEXT)),
        ({"token_ids": [5, 6, 7]}, [5, 6, 7]),
        ({"messages": messages}, engine.tokenizer.encode_chat(messages)),
    ):
        found = client.get(f"/v1/branches/{client.opened(**body)}").json()
        assert found["token_ids"] == list(expected)
        assert found["num_tokens"] == len(expected)
        assert found["text"] == engine.tokenizer.decode(expected, skip_special_tokens=False)
        assert (found["busy"], found["parent_id"]) == (False, None)
    assert len(set(client.ids())) == 3


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({}, "text"), ({"text": "a", "token_ids": [1]}, "text"), ({"text": ""}, "text"), ({"token_ids": []}, "token_ids"),
        ({"token_ids": [10**9]}, "token_ids"), ({"messages": []}, "messages"), ({"text": "a", "tools": []}, "tools"),
        ({"text": "a", "cache_salt": ""}, "cache_salt"), ({"text": "a" * 5000}, "prompt"), ({"text": "a", "color": "red"}, "color"),
    ],
)  # fmt: skip
def test_what_can_not_be_opened_is_told_by_field(client: Client, body: dict[str, Any], field: str) -> None:
    status, error = client.refused("", **body)
    assert (status, error["param"]) == (400, field)
    assert client.ids() == []


@pytest.mark.parametrize("stream", [False, True])
def test_it_generates_as_a_branch_in_the_process(client: Client, engine: Engine, stream: bool) -> None:
    with engine.branch(TEXT) as branch:
        expected = [branch.generate(PARAMS), branch.append(" so").generate(PARAMS)]
        path = branch.token_ids
    branch_id = client.opened(text=TEXT)
    for turn, done in enumerate(expected):
        if turn:
            client.done(f"/{branch_id}/append", text=" so")
        answer = generated(client, branch_id, stream, logprobs=1, **GREEDY)
        [choice] = answer["choices"]
        assert (choice["text"], choice["token_ids"], choice["finish_reason"]) == (
            done.text,
            done.token_ids,
            "length",
        )
        assert len(choice["logprobs"]["token_logprobs"]) == 6
        assert answer["usage"]["prompt_tokens"] == done.usage.prompt_tokens
    # Only what was appended is new.
    assert answer["usage"]["prompt_tokens"] - answer["usage"]["prompt_tokens_details"]["cached_tokens"] <= 4
    assert client.get(f"/v1/branches/{branch_id}").json()["token_ids"] == path


def generated(client: Client, branch_id: str, stream: bool, **body: Any) -> dict[str, Any]:
    """A generation's answer; of a stream, its pieces put together."""
    if not stream:
        answer: dict[str, Any] = client.done(f"/{branch_id}/generate", **body)
        return answer
    lines = client.post(f"/v1/branches/{branch_id}/generate", json={**body, "stream": True}).text.split(
        "\n\n"
    )
    assert lines[-2:] == ["data: [DONE]", ""]
    *events, last = [json.loads(line.removeprefix("data: ")) for line in lines[:-2]]
    pieces = [choice for event in events for choice in event["choices"]]
    logs = [piece["logprobs"]["token_logprobs"] for piece in pieces if piece["logprobs"]]
    choice = {
        "text": "".join(piece["text"] for piece in pieces),
        "token_ids": [token for piece in pieces for token in piece["token_ids"]],
        "logprobs": {"token_logprobs": [each for log in logs for each in log]},
        "finish_reason": pieces[-1]["finish_reason"],
    }
    return {"choices": [choice], "usage": last["usage"]}


def test_forks_go_on_alone_and_from_any_token(client: Client, engine: Engine) -> None:
    root = client.opened(text=TEXT)
    client.done(f"/{root}/generate", **GREEDY)
    path = client.get(f"/v1/branches/{root}").json()["token_ids"]
    whole = client.done(f"/{root}/fork", n=2)["data"]
    [middle] = client.done(f"/{root}/fork", at=7)["data"]
    assert [each["num_tokens"] for each in (*whole, middle)] == [len(path), len(path), 7]
    assert {each["parent_id"] for each in (*whole, middle)} == {root}
    answers = [client.done(f"/{each['id']}/generate", **DRAWN, logprobs=0) for each in whole]
    assert answers[0]["choices"] == answers[1]["choices"]
    used = answers[1]["usage"]
    assert used["prompt_tokens_details"]["cached_tokens"] == used["prompt_tokens"] - 1
    assert client.get(f"/v1/branches/{middle['id']}").json()["token_ids"] == path[:7]
    assert client.get(f"/v1/branches/{root}").json()["token_ids"] == path
    for body in ({"n": 0}, {"n": 1000}, {"at": 0}, {"at": len(path) + 1}):
        assert client.refused(f"/{root}/fork", **body)[0] == 400


def test_children_and_scores_are_those_of_a_branch_in_the_process(client: Client, engine: Engine) -> None:
    with engine.branch(TEXT) as branch:
        kids = branch.expand(3, SamplingParams(temperature=1.0, ignore_eos=True, max_tokens=6, seed=3))
        expected = [(kid.completion.text, kid.token_ids) for kid in kids if kid.completion]
        totals = [each.total for each in branch.score([" dog", " cat", [5, 6]])]
        for kid in kids:
            kid.release()
    root = client.opened(text=TEXT)
    answer = client.done(f"/{root}/expand", n=3, **DRAWN)
    found = [
        (choice["text"], client.get(f"/v1/branches/{choice['branch']['id']}").json()["token_ids"])
        for choice in answer["choices"]
    ]
    assert found == expected
    assert answer["usage"]["completion_tokens"] == 18
    scores = client.done(f"/{root}/score", continuations=[" dog", " cat", [5, 6]])["data"]
    assert [each["logprob"] for each in scores] == totals
    assert [len(each["token_logprobs"]) for each in scores] == [4, 4, 2]
    assert client.get(f"/v1/branches/{root}").json()["num_tokens"] == len(TEXT) + 1
    for continuations in ([], [""], [[]], ["a", "b" * 5000], ["a"] * 25):
        assert client.refused(f"/{root}/score", continuations=continuations)[0] == 400


def test_a_generation_fits_its_grammar(client: Client) -> None:
    root = client.opened()
    [choice] = client.done(f"/{root}/generate", regex="[ab]{3}c")["choices"]
    assert choice["text"].rstrip("c").strip("ab") == ""
    assert (len(choice["text"]), choice["finish_reason"]) == (4, "stop")
    kind = {"type": "json_schema", "json_schema": {"schema": {"enum": ["yes", "no"]}}}
    kids = client.done(f"/{root}/expand", n=2, response_format=kind)["choices"]
    assert {kid["text"] for kid in kids} <= {'"yes"', '"no"'}
    assert client.refused(f"/{root}/generate", regex="[")[1]["param"] == "regex"
    assert client.refused(f"/{root}/generate", regex="a", response_format=kind)[0] == 400


def test_a_deleted_branch_is_unknown(client: Client) -> None:
    gone = client.opened()
    client.delete_all()
    operations = {
        "append": {"text": "a"},
        "generate": {},
        "fork": {},
        "score": {"continuations": ["a"]},
        "expand": {"n": 2},
    }
    for branch_id in (gone, "branch_0", "%F0%9F%98%80"):
        answers = [
            client.post(f"/v1/branches/{branch_id}/{name}", json=body) for name, body in operations.items()
        ]
        answers += [client.get(f"/v1/branches/{branch_id}"), client.delete(f"/v1/branches/{branch_id}")]
        assert {answer.status_code for answer in answers} == {404}
        assert {answer.json()["error"]["param"] for answer in answers} == {"branch_id"}


def test_another_keys_branch_is_an_unknown_one(engine: Engine) -> None:
    with live_server(engine, api_keys=KEYS) as server, alice_and_bob(server) as (alice, bob):
        hers = alice.opened(text=TEXT)
        alice.done(f"/{hers}/generate", **GREEDY)
        assert bob.ids() == []
        for branch_id in (hers, "branch_x"):
            answer = bob.get(f"/v1/branches/{branch_id}")
            expected = f"there is no branch '{branch_id}', or no more"
            assert (answer.status_code, answer.json()["error"]["message"]) == (404, expected)
        assert bob.delete(f"/v1/branches/{hers}").status_code == 404
        # The same prompt of another key hits nothing, whatever its salt.
        for salt in (None, "a"):
            his = bob.opened(text=TEXT, cache_salt=salt)
            usage = bob.done(f"/{his}/generate", **GREEDY)["usage"]
            assert usage["prompt_tokens_details"]["cached_tokens"] == 0
        assert alice.ids() == [hers]


def test_a_branch_in_use_is_busy_and_can_be_forked_scored_and_deleted(
    client: Client, server: LiveServer
) -> None:
    root = client.opened()
    with client.stream("POST", f"/v1/branches/{root}/generate", json={**ENDLESS, "stream": True}) as running:
        lines = running.iter_lines()
        next(lines)
        assert client.get("/v1/branches").json()["data"][0]["busy"]
        for name, body in (("generate", {}), ("append", {"text": "a"})):
            status, error = client.refused(f"/{root}/{name}", **body)
            assert (status, error["param"], error["code"]) == (409, "branch", "branch_busy")
        assert client.done(f"/{root}/score", continuations=["a"])["data"][0]["logprob"] < 0
        assert client.done(f"/{root}/fork")["data"][0]["num_tokens"] > len(TEXT)
        client.delete(f"/v1/branches/{root}")
        assert '"finish_reason":"abort"' in "".join(lines)
    client.delete_all()
    server.wait_until_idle()


def test_deleting_a_branch_ends_an_expansion_that_has_not_begun(client: Client, server: LiveServer) -> None:
    root = client.opened()
    may_step = threading.Event()
    held_up = server.engine._core.call(may_step.wait)
    with send_raw(server, f"/v1/branches/{root}/expand", {"n": 2, **ENDLESS}) as connection:
        while not client.get("/v1/branches").json()["data"][0]["busy"]:
            time.sleep(0.001)
        time.sleep(0.05)
        client.delete(f"/v1/branches/{root}")
        may_step.set()
        assert connection.recv(100).startswith(b"HTTP/1.1 404")
    assert held_up.result()
    assert client.ids() == []


@pytest.mark.parametrize(
    ("path", "body", "count"),
    [("generate", {}, 1), ("generate", {"stream": True}, 1), ("expand", {"n": 3}, 3)],
)
def test_a_client_that_goes_ends_its_request(
    client: Client, server: LiveServer, path: str, body: dict[str, Any], count: int
) -> None:
    before = server.engine.stats().generated_tokens
    root = client.opened()
    with send_raw(server, f"/v1/branches/{root}/{path}", {**ENDLESS, **body}) as connection:
        if "stream" in body:
            assert connection.recv(1000).startswith(b"HTTP/1.1 200")
        wait_until_running(server, count)
    deadline = time.monotonic() + 10
    while client.get("/v1/branches").json()["data"][0]["busy"] and time.monotonic() < deadline:
        time.sleep(0.005)
    # What there was of it stays on the branch, which can be gone on from; children are gone.
    assert client.ids() == [root]
    assert client.done(f"/{root}/generate", **GREEDY)["choices"][0]["finish_reason"] == "length"
    client.delete_all()
    server.wait_until_idle()
    assert server.engine.stats().generated_tokens - before < 3800 * count


def test_a_request_that_takes_too_long_is_ended(engine: Engine) -> None:
    with (
        live_server(engine, request_timeout_s=0.2) as server,
        Client(base_url=server.url, timeout=30) as client,
    ):
        root = client.opened()
        for path, body in (("generate", {}), ("expand", {"n": 2})):
            assert client.refused(f"/{root}/{path}", **ENDLESS, **body)[0] == 408
        assert client.ids() == [root]
        client.delete_all()
        server.wait_until_idle()


@pytest.mark.parametrize(("path", "status"), [("generate", 200), ("expand", 503)])
def test_when_the_server_ends_what_runs_on_a_branch_is_ended_too(
    engine: Engine, path: str, status: int
) -> None:
    body = {**ENDLESS, **({"n": 2} if path == "expand" else {})}
    with live_server(engine, drain_s=0.1) as server, Client(base_url=server.url, timeout=30) as client:
        root = client.opened()
        with send_raw(server, f"/v1/branches/{root}/{path}", body) as connection:
            wait_until_running(server)
            started_s = time.monotonic()
            server.server.handle_exit(signal.SIGTERM, None)
            assert connection.recv(100).startswith(f"HTTP/1.1 {status}".encode())
            assert time.monotonic() - started_s < 4, "it was not cut off by the server's last words"
        server.thread.join(timeout=10)
        assert not server.thread.is_alive()
        # The engine goes on, and nothing of it is held.
        assert engine.stats().cache.locked == 0


def test_idle_branches_expire_and_busy_ones_do_not(engine: Engine) -> None:
    with live_server(engine, branch_idle_s=0.3) as server, Client(base_url=server.url, timeout=30) as client:
        client.opened()
        busy = client.opened()
        with client.stream(
            "POST", f"/v1/branches/{busy}/generate", json={**ENDLESS, "stream": True}
        ) as running:
            lines = running.iter_lines()
            next(lines)
            deadline = time.monotonic() + 10
            while len(server.service.branches) > 1 and time.monotonic() < deadline:
                time.sleep(0.02)
            assert client.ids() == [busy]
        deadline = time.monotonic() + 10
        while len(server.service.branches) and time.monotonic() < deadline:
            time.sleep(0.02)
        # Without a request's help.
        assert len(server.service.branches) == 0
        assert client.refused(f"/{busy}/generate")[0] == 404
        server.wait_until_idle()


def test_the_number_of_branches_is_limited(engine: Engine) -> None:
    limits = {"max_branches": 5, "max_branches_per_key": 3, "max_n": 4, "api_keys": KEYS}
    with live_server(engine, **limits) as server, alice_and_bob(server) as (alice, bob):
        root = alice.opened()
        for path, extra in (("fork", {}), ("expand", GREEDY)):
            status, error = alice.refused(f"/{root}/{path}", n=4, **extra)
            assert status == 400
            assert "max_branches_per_key" in error["message"]
            status, error = alice.refused(f"/{root}/{path}", n=3, **extra)
            assert (status, error["code"]) == (429, "too_many_branches")
            assert "max_branches_per_key" in error["message"]
        alice.done(f"/{root}/fork", n=2)
        assert alice.post("/v1/branches", json={"text": TEXT}).headers["Retry-After"] == "1"
        his, _ = bob.opened(), bob.opened()
        status, error = bob.refused(f"/{his}/expand", n=1, **GREEDY)
        assert status == 429
        assert "(max_branches)" in error["message"]
        # What was deleted makes room, and so does what failed.
        alice.delete_all()
        assert bob.refused("", text="")[0] == 400
        bob.opened()


def test_a_store_expires_in_the_order_of_use() -> None:
    class FakeBranch:
        released = 0

        def release(self) -> None:
            FakeBranch.released += 1

    now = [0.0]
    store = BranchStore(max_branches=9, max_per_key=9, idle_s=10, retry_after_s=1, clock=lambda: now[0])
    tenant = KeyRing((), None, b"secret").tenant_of(None)
    with store.room(tenant, 3) as keep:
        first, second, third = keep([FakeBranch(), FakeBranch(), FakeBranch()], None)  # type: ignore[list-item]
    now[0] = 6.0
    with store.use(tenant, first.id), store.use(tenant, first.id):
        now[0] = 12.0
        assert [held.id for held in store.all_of(tenant)] == [first.id]
        assert store.expires_in_s(first) is None
    assert (FakeBranch.released, store.num_expired) == (2, 2)
    assert store.expires_in_s(first) == 10.0
    now[0] = 22.0
    with pytest.raises(ApiError, match="no more"), store.use(tenant, first.id):
        pass
    assert (len(store), store.num_expired) == (0, 3)
    assert third.num_users == second.num_users == 0
