"""Who may ask, and how large, deep and odd a request may be."""

import json
import socket

import pytest
from live_server import LiveServer, live_server

from phloem.runtime import Engine, InvalidRequest
from phloem.runtime.server.auth import KeyRing
from phloem.runtime.server.gatekeeper import depth_of
from phloem.runtime.server.settings import ServerSettings

KEYS = ("key-of-alice", "key-of-bob")
ADMIN = "key-of-the-admin"


def settings(**changes: object) -> ServerSettings:
    return ServerSettings(**{"served_names": ("tiny",), **changes})


def test_health_ready_and_the_model(server: LiveServer) -> None:
    with server.client() as client:
        assert client.get("/health").json() == {"status": "ok"}
        assert client.get("/ready").status_code == 200
        [card] = client.get("/v1/models").json()["data"]
        assert (card["id"], card["max_model_len"]) == ("tiny", 4096)
        assert client.get("/v1/models/tiny").json() == card


def test_an_unknown_model_path_or_method_is_told_in_openais_form(server: LiveServer) -> None:
    with server.client() as client:
        missing = client.get("/v1/models/other/one")
        assert missing.status_code == 404
        assert missing.json()["error"]["code"] == "model_not_found"
        assert "tiny" in missing.json()["error"]["message"]
        assert client.get("/v1/nothing").json()["error"]["type"] == "not_found_error"
        assert client.delete("/v1/models").status_code == 405


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.1.2", "example.org", ""])
def test_other_machines_are_served_with_a_key_or_when_told_so(host: str) -> None:
    with pytest.raises(InvalidRequest, match="API key"):
        settings(host=host)
    settings(host=host, api_keys=KEYS)
    settings(host=host, allow_anonymous=True)


@pytest.mark.parametrize("host", ["127.0.0.1", "127.1.2.3", "::1", "localhost"])
def test_this_machine_is_served_without_a_key(host: str) -> None:
    settings(host=host)


@pytest.mark.parametrize(
    "changes",
    [
        {"served_names": ()}, {"port": 65536}, {"port": True}, {"max_requests": 0}, {"drain_s": 0},
        {"request_timeout_s": float("nan")}, {"api_keys": ("short",)}, {"secret": b"short"}, {"secret": "x" * 32}, {"api_keys": KEYS, "admin_key": KEYS[0]},
    ],
)  # fmt: skip
def test_a_setting_out_of_range_is_refused_by_name(changes: dict[str, object]) -> None:
    with pytest.raises(InvalidRequest) as error:
        settings(**changes)
    assert error.value.field in changes


def test_keys_and_secrets_are_not_shown() -> None:
    shown = repr(settings(api_keys=KEYS, admin_key=ADMIN))
    assert not any(secret in shown for secret in (*KEYS, ADMIN, "secret"))


def test_keys(engine: Engine) -> None:
    with live_server(engine, api_keys=KEYS, admin_key=ADMIN) as server, server.client() as client:
        assert client.get("/health").status_code == client.get("/ready").status_code == 200
        for headers in ({}, {"Authorization": "Bearer key-of-carol"}, {"Authorization": f"Basic {KEYS[0]}"}):
            refused = client.get("/v1/models", headers=headers)
            assert refused.status_code == 401
            assert refused.json()["error"]["type"] == "authentication_error"
        for key in (*KEYS, ADMIN):
            assert client.get("/v1/models", headers={"Authorization": f"Bearer {key}"}).status_code == 200
            assert client.get("/v1/models", headers={"x-api-key": key}).status_code == 200
        # Also what does not exist needs a key, so that nobody can look around.
        assert client.get("/v1/nothing").status_code == 401


def test_without_a_key_another_machines_name_is_not_served(engine: Engine) -> None:
    with live_server(engine) as server, server.client() as client:
        for host, status in (
            ("evil.example", 403),
            ("evil.example:80", 403),
            ("localhost:1", 200),
            ("[::1]:1", 200),
        ):
            assert client.get("/v1/models", headers={"Host": host}).status_code == status
    with live_server(engine, api_keys=KEYS) as server, server.client() as client:
        headers = {"Host": "evil.example", "x-api-key": KEYS[0]}
        assert client.get("/v1/models", headers=headers).status_code == 200


def test_without_a_key_pages_of_other_sites_are_not_served(engine: Engine) -> None:
    with live_server(engine) as server, server.client() as client:
        for site, status in (("cross-site", 403), ("same-site", 200), ("same-origin", 200), ("none", 200)):
            assert client.get("/flush_cache", headers={"Sec-Fetch-Site": site}).status_code == status
    with live_server(engine, api_keys=KEYS) as server, server.client() as client:
        headers = {"Sec-Fetch-Site": "cross-site", "x-api-key": KEYS[0]}
        assert client.get("/v1/models", headers=headers).status_code == 200


def test_each_key_and_each_salt_has_a_namespace_of_its_own() -> None:
    ring = KeyRing(KEYS, ADMIN, b"secret")
    tenants = [ring.tenant_of(key) for key in (*KEYS, ADMIN)]
    names = [tenant.namespace(salt) for tenant in tenants for salt in (None, "a", "b", KEYS[0])]
    assert len(set(names)) == len(names)
    assert ring.tenant_of(KEYS[0]).namespace("a") == tenants[0].namespace("a")
    assert KeyRing(KEYS, ADMIN, b"other").tenant_of(KEYS[0]).namespace("a") != tenants[0].namespace("a")
    assert [tenant.is_admin for tenant in tenants] == [False, False, True]
    for salt in ("", "x" * 257):
        with pytest.raises(InvalidRequest, match="cache_salt"):
            tenants[0].namespace(salt)


def test_without_keys_everybody_is_one_tenant_and_the_admin() -> None:
    ring = KeyRing((), None, b"secret")
    assert ring.tenant_of(None) == ring.tenant_of("whatever")
    assert ring.tenant_of(None).is_admin
    assert not KeyRing((), ADMIN, b"secret").tenant_of(None).is_admin


def test_a_body_that_is_too_large_is_refused_announced_or_not(server: LiveServer) -> None:
    body = b'{"model": "' + b"x" * 100_000 + b'"}'
    with server.client() as client:
        for content in (body, iter([body])):
            refused = client.post("/v1/models", content=content)
            assert refused.status_code == 413
            assert "100,000 bytes" in refused.json()["error"]["message"]


def test_a_conversation_of_too_many_messages_is_refused(engine: Engine) -> None:
    with live_server(engine, max_messages=3) as server, server.client() as client:
        for count, status in ((3, 200), (4, 400)):
            messages = [{"role": "user", "content": "a"}] * count
            body = {"model": "tiny", "messages": messages, "max_tokens": 1}
            answer = client.post("/v1/chat/completions", json=body)
            assert answer.status_code == status
            items = {"model": "tiny", "input": messages, "max_output_tokens": 1}
            assert client.post("/v1/responses", json=items).status_code == status
        assert "at most 3" in answer.json()["error"]["message"]
        server.wait_until_idle()


@pytest.mark.parametrize("body", [b"[" * 20_000, b'{"a":' * 20_000, b"[" * 65 + b"]" * 65])
def test_a_body_that_is_too_deep_is_refused(server: LiveServer, body: bytes) -> None:
    with server.client() as client:
        refused = client.post("/v1/models", content=body)
    assert refused.status_code == 400
    assert "nested" in refused.json()["error"]["message"]


@pytest.mark.parametrize(
    "value", [{}, [], [[[]]], {"a": {"b": [{}]}}, "[[[[", {'"[': ['\\"[', "\\"]}, [[1], [2]]]
)
def test_the_depth_of_a_text_is_that_of_its_value(value: object) -> None:
    def depth(value: object) -> int:
        inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
        return isinstance(value, dict | list) + max(map(depth, inner), default=0)

    assert depth_of(json.dumps(value).encode(), 0) == min(depth(value), 1)
    assert depth_of(json.dumps([value] * 9).encode(), 8) == depth(value) + 1


@pytest.mark.parametrize("text", [b'"\\' * 50_000, b'["' + b'\\"' * 50_000 + b"[", b"[" * 9 + b'"' * 99_999])
def test_strings_that_do_not_end_take_no_longer(text: bytes) -> None:
    assert depth_of(b"[" * 8 + text, 4) == 5


def test_a_body_that_does_not_come_is_not_waited_for(engine: Engine) -> None:
    with live_server(engine, body_timeout_s=0.05) as server:
        host, port = server.url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port)), timeout=10) as connection:
            connection.sendall(b"POST /v1/models HTTP/1.1\r\nHost: localhost\r\nContent-Length: 10\r\n\r\n{")
            assert connection.recv(100).startswith(b"HTTP/1.1 408")
