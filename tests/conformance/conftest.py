"""What the tests by outside clients share: a live server on the tiny model."""

from collections.abc import Iterator

import pytest
from anthropic import Anthropic
from anthropic_client import client_of
from live_server import LiveServer
from server_fixtures import engine, module_server, server  # noqa: F401


@pytest.fixture
def anthropic(server: LiveServer) -> Iterator[Anthropic]:  # noqa: F811
    with client_of(server) as client:
        yield client
