"""What SGLang's clients ask the server about itself, and who may order what."""

import httpx
import pytest
from live_server import LiveServer, live_server

from phloem.runtime import Engine

KEYS = ("key-of-alice", "key-of-bob")
ADMIN = "key-of-the-admin"


def test_the_model_and_the_server(server: LiveServer) -> None:
    with server.client() as client:
        for path in ("/get_model_info", "/model_info"):
            info = client.get(path).json()
            assert (info["model_path"], info["is_generation"], info["model_type"]) == ("tiny", True, "llama")
        for path in ("/get_server_args", "/get_server_info", "/server_info"):
            info = client.get(path).json()
            assert (info["model_path"], info["context_length"]) == ("tiny", 4096)
            assert info["max_total_num_tokens"] == 512 * 16
            assert info["internal_states"][0]["running"] == 0
        assert client.get("/health_generate").json() == {"status": "ok"}


@pytest.mark.parametrize("method", ["GET", "POST"])
def test_the_cache_is_flushed(server: LiveServer, method: str) -> None:
    server.engine.generate("some words")
    assert server.engine.stats().cache.nodes or server.engine.stats().kept_tails
    with server.client() as client:
        assert client.request(method, "/flush_cache").status_code == 200
    stats = server.engine.stats()
    assert (stats.cache.nodes, stats.kept_tails, stats.cache.evictable) == (0, 0, 0)


def test_a_join_is_taken(server: LiveServer) -> None:
    with server.client() as client:
        body = {"src_rids": ["a", "b"], "dst_rid": "c"}
        assert client.post("/concate_and_append_request", json=body).status_code == 200
        assert client.post("/concate_and_append_request", json={"dst_rid": "c"}).status_code == 400


def test_what_concerns_all_tenants_needs_the_admin_key(engine: Engine) -> None:
    with live_server(engine, api_keys=KEYS, admin_key=ADMIN) as server:

        def ask(key: str, path: str, method: str = "GET") -> httpx.Response:
            with server.client(headers={"Authorization": f"Bearer {key}"}) as client:
                return client.request(method, path)

        for method in ("GET", "POST"):
            assert ask(KEYS[0], "/flush_cache", method).status_code == 403
            assert ask("key-of-nobody", "/flush_cache", method).status_code == 401
            assert ask(ADMIN, "/flush_cache", method).status_code == 200
        assert ask(KEYS[0], "/server_info").json()["internal_states"] == []
        assert ask(ADMIN, "/server_info").json()["internal_states"]
        assert ask(KEYS[0], "/health_generate").status_code == 200
        for path in ("/get_model_info", "/server_info", "/health_generate"):
            assert ask("key-of-nobody", path).status_code == 401


def test_nobody_ends_anothers_requests(engine: Engine) -> None:
    with (
        live_server(engine, api_keys=KEYS, admin_key=ADMIN) as server,
        server.client(headers={"Authorization": f"Bearer {KEYS[0]}"}) as alice,
        server.client(headers={"Authorization": f"Bearer {KEYS[1]}"}) as bob,
    ):
        endless = {"max_new_tokens": 4000, "ignore_eos": True}
        body = {"text": "a", "rid": "mine", "stream": True, "sampling_params": endless}
        with alice.stream("POST", "/generate", json=body) as answer:
            lines = answer.iter_lines()
            next(lines)
            for order in ({"rid": "mine"}, {"abort_all": True}):
                assert bob.post("/abort_request", json=order).status_code == 200
            assert engine.stats().running == 1
            with server.client(headers={"Authorization": f"Bearer {KEYS[0]}"}) as other:
                other.post("/abort_request", json={"abort_all": True})
            last = [line for line in lines if line][-2]
        assert '"type":"abort"' in last
        server.wait_until_idle()


def test_a_draining_server_is_not_well(server: LiveServer) -> None:
    server.service.gate.draining = True
    try:
        with server.client() as client:
            assert client.get("/health_generate").status_code == 503
    finally:
        server.service.gate.draining = False
