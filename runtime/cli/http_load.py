"""Clients for measuring a server: little more than sockets, since a full client costs as much as what is measured.

As a program, it runs clients in a process of its own, beside the server's: a job as a line of JSON on its input, the replies as a line on its
output.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import asdict, dataclass
from typing import Any

_MAX_HEAD_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Reply:
    """What came back."""

    status: int
    first_s: float
    """From the request to the first byte of the body."""

    total_s: float


class Connection:
    """One HTTP/1.1 connection that is used again."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    async def send(self, path: str, body: Mapping[str, Any]) -> None:
        """Send a request."""
        data = json.dumps(body).encode()
        head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
        self._writer.write(head.encode() + data)
        await self._writer.drain()

    async def receive(self) -> Response:
        """Wait for the head of the answer."""
        lines = (await self._reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        pairs = (line.partition(":") for line in lines[1:] if line)
        headers = {name.lower(): value.strip() for name, _, value in pairs}
        return Response(int(lines[0].split()[1]), headers, self._reader)

    async def ask(self, path: str, body: Mapping[str, Any]) -> Reply:
        """Send a request and read all of the answer."""
        started = time.perf_counter()
        await self.send(path, body)
        response = await self.receive()
        first_s = None
        async for _ in response.parts():
            first_s = first_s or time.perf_counter() - started
        total_s = time.perf_counter() - started
        return Reply(response.status, first_s or total_s, total_s)

    def abort(self) -> None:
        """Break it off without a word."""
        self._writer.transport.abort()


@dataclass(frozen=True, slots=True)
class Response:
    """An answer whose body is still to come."""

    status: int
    headers: Mapping[str, str]
    reader: asyncio.StreamReader

    async def parts(self) -> AsyncIterator[bytes]:
        """Yield the body as it comes, by chunks if the server sends it so."""
        if self.headers.get("transfer-encoding") != "chunked":
            yield await self.reader.readexactly(int(self.headers.get("content-length", "0")))
            return
        while num_bytes := int(await self.reader.readuntil(b"\r\n"), 16):
            yield (await self.reader.readexactly(num_bytes + 2))[:-2]
        await self.reader.readuntil(b"\r\n")


@asynccontextmanager
async def connected(port: int) -> AsyncIterator[Connection]:
    """Connect to a server on this machine."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=_MAX_HEAD_BYTES)
    try:
        yield Connection(reader, writer)
    finally:
        writer.close()


async def replies(
    port: int, path: str, body: Mapping[str, Any], *, clients: int, requests: int
) -> list[Reply]:
    """Let clients send the same request, each so often, one after the other; all begin once all are connected."""
    found: list[Reply] = []

    async def run(connection: Connection) -> None:
        for _ in range(requests):
            found.append(await connection.ask(path, body))

    async with AsyncExitStack() as stack:
        connections = [await stack.enter_async_context(connected(port)) for _ in range(clients)]
        await asyncio.gather(*(run(each) for each in connections))
    return found


def main() -> None:
    """Do the jobs on the standard input."""
    for line in sys.stdin:
        job = json.loads(line)
        started = time.perf_counter()
        found = asyncio.run(replies(**job))
        result = {"seconds": time.perf_counter() - started, "replies": [asdict(each) for each in found]}
        print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
