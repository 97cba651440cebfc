"""The server that these tests share."""

from server_fixtures import engine, module_server, server  # noqa: F401
