"""A real server over real HTTP, in a thread of the test's own process, so that its engine can be looked at."""

import json
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import httpx

from phloem.runtime import Engine
from phloem.runtime.server.serve import DrainingServer, bind, make_server
from phloem.runtime.server.service import Service
from phloem.runtime.server.settings import ServerSettings


@dataclass
class LiveServer:
    url: str
    engine: Engine
    service: Service
    server: DrainingServer
    thread: threading.Thread

    def client(self, **options: Any) -> httpx.Client:
        return httpx.Client(base_url=self.url, timeout=30, **options)

    def wait_until_idle(self) -> None:
        """Wait for the last request's end, and check that it left nothing behind."""
        deadline = time.monotonic() + 10
        while time.monotonic() < deadline:
            stats = self.engine.stats()
            if stats.running == stats.waiting == self.service.gate.active == 0:
                break
            time.sleep(0.005)
        assert stats.running == stats.waiting == self.service.gate.active == 0
        self.engine.check()
        assert stats.cache.locked == stats.cache.pinned
        assert stats.cache.private == stats.kept_tails


@contextmanager
def live_server(engine: Engine, *, tracer_provider: Any = None, **settings: Any) -> Iterator[LiveServer]:
    chosen = ServerSettings(**{"served_names": ("tiny",), "port": 0, **settings})
    listener = bind(chosen)
    server = make_server(engine, chosen, tracer_provider=tracer_provider)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()
    port = listener.getsockname()[1]
    try:
        deadline = time.monotonic() + 10
        while not server.started and time.monotonic() < deadline:
            time.sleep(0.005)
        assert server.started
        yield LiveServer(f"http://127.0.0.1:{port}", engine, server.config.app.state.service, server, thread)
    finally:
        server.should_exit = server.force_exit = True
        thread.join(timeout=15)
        assert not thread.is_alive()


def send_raw(server: LiveServer, path: str, body: Any) -> socket.socket:
    """Post some JSON without waiting for the answer; closing the connection is the client's going."""
    content = json.dumps(body).encode()
    host, port = server.url.removeprefix("http://").split(":")
    head = f"POST {path} HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
    connection = socket.create_connection((host, int(port)), timeout=10)
    connection.sendall(f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content)
    return connection


def wait_until_running(server: LiveServer, count: int = 1) -> None:
    deadline = time.monotonic() + 10
    while server.engine.stats().running < count and time.monotonic() < deadline:
        time.sleep(0.002)
    assert server.engine.stats().running >= count


def ids_at(client: httpx.Client, path: str) -> list[str]:
    """What clients hold under a path: `/v1/branches` or `/v1/cache/pins`."""
    return [each["id"] for each in client.get(path).json()["data"]]


def delete_all(client: httpx.Client) -> None:
    """Delete what clients hold."""
    for path in ("/v1/branches", "/v1/cache/pins"):
        for each in ids_at(client, path):
            client.delete(f"{path}/{each}")
