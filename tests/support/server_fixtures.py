"""One live server on the tiny model for the tests of a module."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from live_server import LiveServer, live_server

from phloem.runtime import Engine


@pytest.fixture(scope="module")
def engine(tiny_path: Path) -> Iterator[Engine]:
    with Engine(tiny_path, dtype="float32", num_blocks=512) as engine:
        yield engine


@pytest.fixture(scope="module")
def module_server(engine: Engine) -> Iterator[LiveServer]:
    with live_server(engine, max_requests=24, max_body_bytes=100_000) as server:
        yield server


@pytest.fixture
def server(module_server: LiveServer) -> Iterator[LiveServer]:
    """The server, which must be idle again, with every block in its place, when the test is done."""
    yield module_server
    module_server.wait_until_idle()
