"""Running the application: the address, the signals, the end.

At SIGTERM or SIGINT the server stops being ready and refuses new requests with 503, still listening; those that run go on until they
have ended, or are aborted once `drain_s` is over, and then it ends with exit code 0. A second signal ends it at once.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import time
from collections.abc import Callable, Iterator
from types import FrameType
from typing import TYPE_CHECKING

import uvicorn

from phloem.runtime.engine import Engine
from phloem.runtime.errors import InvalidRequest
from phloem.runtime.server.app import make_app
from phloem.runtime.server.log_line import IntervalLog
from phloem.runtime.server.service import Service
from phloem.runtime.server.settings import ServerSettings

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider

COLLECTORS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
"""Variables that name where traces go."""

LAST_WORDS_S = 5
"""How long connections get to end once nothing is generated any more."""

logger = logging.getLogger(__name__)


class DrainingServer(uvicorn.Server):
    """uvicorn, but for the end: signals drain first, and are not raised again."""

    def __init__(
        self, config: uvicorn.Config, service: Service, *, drain_s: float, log_interval_s: float
    ) -> None:
        super().__init__(config)
        self._service = service
        self._drain_s = drain_s
        self._drained_by: float | None = None
        self._log = IntervalLog(service, log_interval_s)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Take a signal: the first drains, the next one ends."""
        if self._service.gate.draining:
            self.should_exit = self.force_exit = True
            return
        self._service.gate.draining = True
        self._drained_by = time.monotonic() + self._drain_s

    async def on_tick(self, counter: int) -> bool:
        """Tell whether it is time to end; uvicorn asks ten times a second."""
        self._log.tick()
        self._service.branches.expire()
        if self._drained_by is not None:
            if self._service.gate.active == 0:
                return True
            if time.monotonic() >= self._drained_by:
                self._service.abort_all()
                return True
        return await super().on_tick(counter)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """End the connections, and release what clients hold of the engine, which may go on."""
        await super().shutdown(sockets)
        self._service.branches.clear()


def make_server(
    engine: Engine, settings: ServerSettings, *, tracer_provider: TracerProvider | None = None
) -> DrainingServer:
    """Return a server for an engine; `server.run(sockets=[bind(settings)])` serves until a signal."""
    app = make_app(engine, settings, tracer_provider=tracer_provider)
    config = uvicorn.Config(
        app,
        log_level="warning",
        access_log=False,
        server_header=False,
        lifespan="off",
        timeout_keep_alive=30,
        timeout_graceful_shutdown=LAST_WORDS_S,
    )
    return DrainingServer(
        config, app.state.service, drain_s=settings.drain_s, log_interval_s=settings.log_interval_s
    )


def serve(
    make_engine: Callable[[], Engine], settings: ServerSettings, *, announce: Callable[[str], None]
) -> None:
    """Bind the address, make the engine, and serve until a signal.

    Args:
        make_engine: Called once the address is bound, as it may take a while.
        settings: The server's.
        announce: Is told the URL once the engine is there.

    Raises:
        InvalidRequest: The address can't be used, or traces are asked for by the environment and can't be made.
        ModelError: The model can't be loaded.
    """
    with _tracer_provider() as provider, bind(settings) as listener, make_engine() as engine:
        host, port = listener.getsockname()[:2]
        announce(f"http://{f'[{host}]' if ':' in host else host}:{port}")
        make_server(engine, settings, tracer_provider=provider).run(sockets=[listener])


@contextlib.contextmanager
def _tracer_provider() -> Iterator[TracerProvider | None]:
    """Where traces go; nowhere unless the environment names a collector."""
    named = [name for name in COLLECTORS if os.environ.get(name)]
    if not named:
        yield None
        return
    try:
        from phloem.runtime.server.tracing import make_provider

        provider = make_provider()
    except ModuleNotFoundError as error:
        raise InvalidRequest(
            f"{named[0]} is set, but traces need {error.name}: pip install 'phloem[otel]', or unset it",
            field="serve",
        ) from error
    try:
        yield provider
    finally:
        provider.shutdown()


def bind(settings: ServerSettings) -> socket.socket:
    """Return a socket that is bound to the address, not listening yet.

    Raises:
        InvalidRequest: It can't be bound.
    """
    try:
        [family, kind, protocol, _, address] = socket.getaddrinfo(
            settings.host, settings.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, protocol)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except OSError as error:
        raise InvalidRequest(
            f"can't serve at {settings.host}:{settings.port} ({error.strerror}): choose another host or port",
            field="port",
        ) from error
    return listener
