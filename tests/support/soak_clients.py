"""A crowd of clients, many of them rude, as a program of its own: PORT SECONDS. It prints what they got, as JSON.

Three in ten requests are broken off at any point, one in ten is read slowly, a few are nonsense. The rest must be answered.
"""

import asyncio
import contextlib
import json
import random
import socket
import sys
import time
from collections import Counter
from typing import Any

from phloem.runtime.cli.http_load import Connection

NUM_CLIENTS = 64
LEAVES, IS_SLOW = 0.3, 0.1
PATIENCE_S = 180
"""An answer that takes longer is one that does not come."""

PREFIXES = ["".join(random.Random(number).choices("abcdefgh ", k=300)) for number in range(8)]
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
TOOL = {"type": "function", "function": {"name": "f", "parameters": SCHEMA}}


def draw_request(draw: random.Random) -> tuple[str, dict[str, Any]]:
    """A path and a body."""
    text = draw.choice(PREFIXES)[: draw.randrange(1, 300)] + str(draw.random()) * draw.randrange(3)
    messages = [{"role": "user", "content": text}]
    max_tokens, stream = draw.choice([1, 4, 16, 64, 200]), draw.random() < 0.6
    shared = {"model": "tiny", "max_tokens": max_tokens, "stream": stream}
    kind = draw.randrange(10)
    if kind < 3:
        extras = draw.choice([{}, {"n": 3}, {"logprobs": 5}, {"cache_salt": "s"}, {"ignore_eos": True}])
        return "/v1/completions", {**shared, "prompt": text, **extras}
    if kind < 6:
        schema = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}
        extras = draw.choice(
            [{}, {"n": 2}, {"tools": [TOOL]}, {"response_format": schema}, {"ignore_eos": True}]
        )
        return "/v1/chat/completions", {**shared, "messages": messages, **extras}
    if kind == 6:
        return "/v1/messages", {**shared, "messages": messages}
    if kind == 7:
        return "/v1/responses", {
            "model": "tiny",
            "input": text,
            "max_output_tokens": max_tokens,
            "stream": stream,
        }
    if kind == 8:
        return "/generate", {
            "text": text,
            "sampling_params": {"max_new_tokens": max_tokens},
            "stream": stream,
        }
    wrong = draw.choice([{}, {"n": -1}, {"messages": 5}, {"model": "none"}, {"max_tokens": "x"}])
    return "/v1/chat/completions", {**shared, "messages": messages, **wrong}


async def open_connection(port: int, *, is_slow: bool) -> Connection:
    """Connect; a slow client has little room for what it does not read."""
    connection = socket.socket()
    if is_slow:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    connection.setblocking(False)
    await asyncio.get_running_loop().sock_connect(connection, ("127.0.0.1", port))
    return Connection(*await asyncio.open_connection(sock=connection, limit=4096 if is_slow else 1 << 20))


async def ask(port: int, draw: random.Random, seen: Counter[str]) -> None:
    """Send one request, and be as patient as the dice say."""
    leaves, is_slow = draw.random() < LEAVES, draw.random() < IS_SLOW
    path, body = draw_request(draw)
    connection = await open_connection(port, is_slow=is_slow)
    try:
        await connection.send(path, body)
        limit_s = draw.choice([0.0, 0.01, 0.1, 0.5]) if leaves else PATIENCE_S
        answered = asyncio.wait_for(read(connection, draw, seen, is_slow=is_slow), limit_s)
        await answered
    except asyncio.TimeoutError:
        seen["left" if leaves else "slow" if is_slow else "no answer"] += 1
    except (OSError, asyncio.IncompleteReadError):
        # The server gives up clients that are too slow.
        seen["cut off" if is_slow or leaves else "broken"] += 1
    finally:
        connection.abort()


async def read(connection: Connection, draw: random.Random, seen: Counter[str], *, is_slow: bool) -> None:
    """Read an answer to its end."""
    response = await connection.receive()
    tail = b""
    async for part in response.parts():
        tail = (tail + part)[-2000:]
        if is_slow:
            await asyncio.sleep(draw.random() * 0.3)
    seen[str(response.status)] += 1
    if b"server_error" in tail:
        seen["failed in its stream"] += 1


async def main(port: int, seconds: float) -> Counter[str]:
    """Run the crowd."""
    end = time.monotonic() + seconds
    seen: Counter[str] = Counter()

    async def client(number: int) -> None:
        draw = random.Random(number)
        while time.monotonic() < end:
            with contextlib.suppress(ConnectionError):
                await ask(port, draw, seen)

    await asyncio.gather(*(client(number) for number in range(NUM_CLIENTS)))
    return seen


if __name__ == "__main__":
    print(json.dumps(asyncio.run(main(int(sys.argv[1]), float(sys.argv[2])))))
