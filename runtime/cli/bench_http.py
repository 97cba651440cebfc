"""`phloem bench http`: what the server adds to the engine, and how fast it says no.

Each measure runs on one engine in turns: through asyncio in this process, and over HTTP from clients in another one. The server runs as in
`phloem serve`, with grammars and templates in their sandbox. The clients take part of the machine, which counts as the server's.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.progress import Progress
from rich.table import Table

from phloem.runtime import Engine, SamplingParams
from phloem.runtime.cli.bench_common import greedy, random_ids, verdict, write_json
from phloem.runtime.cli.http_load import Reply
from phloem.runtime.cli.serve import SANDBOX_TIMEOUT_S

NUM_REQUESTS = 20
"""In a row, per round; the prompt is cached."""

PROMPT_LEN = 64
NUM_STREAMS, STREAM_LEN = 16, 64
NUM_PLACES = 16
OVERLOAD = 10
MESSAGES = [{"role": "system", "content": "You are brief."}, {"role": "user", "content": "Name a colour."}]

MAX_ADDED_S = 0.003
MAX_LOST_SHARE = 0.05
MAX_REFUSAL_S = 0.050


@dataclass(frozen=True, slots=True)
class Pair:
    """Medians of what was measured in turns, in seconds; `added_s` is the median of the rounds' differences."""

    direct_s: float
    http_s: float
    added_s: float


@dataclass(frozen=True, slots=True)
class HttpResult:
    """Medians over the rounds."""

    rounds: int
    completion: Pair
    """One token after a cached prompt of token ids."""

    chat: Pair
    """One token after a cached conversation."""

    direct_tokens_per_s: float
    http_tokens_per_s: float
    lost_share: float
    """Of the decode throughput of `NUM_STREAMS` streams: the median of the rounds' shares."""

    refusal_s: float
    """To an answer of 429, when `OVERLOAD` times as many clients come as there are places, all of them taken."""

    refusals: int


def run_bench_http(model: str, console: Console, *, rounds: int, json_path: Path | None) -> None:
    """Measure and print."""
    with console.status(f"Loading {escape(model)}"):
        engine = Engine(model, sandbox_timeout_s=SANDBOX_TIMEOUT_S)
    with (
        engine,
        _served(engine) as port,
        _clients() as clients,
        Progress(console=console, transient=True) as progress,
    ):
        task = progress.add_task("Measuring", total=rounds + 1)
        result = asyncio.run(_measure(_Both(engine, port, clients), rounds, lambda: progress.advance(task)))
    console.print(_table(result))
    write_json(json_path, asdict(result))


@contextmanager
def _served(engine: Engine) -> Iterator[int]:
    """Serve in a thread; yield the port."""
    from phloem.runtime.server.serve import bind, make_server
    from phloem.runtime.server.settings import ServerSettings

    settings = ServerSettings(served_names=("bench",), port=0, max_requests=NUM_PLACES)
    with bind(settings) as listener:
        server = make_server(engine, settings)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        try:
            while not server.started and thread.is_alive():
                time.sleep(0.01)
            yield listener.getsockname()[1]
        finally:
            server.should_exit = True
            thread.join()


Load = Callable[..., dict[str, Any]]


@contextmanager
def _clients() -> Iterator[Load]:
    """Start the clients' process; yield a function that has it do a job."""
    command = [sys.executable, "-m", "phloem.runtime.cli.http_load"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        source, sink = process.stdout, process.stdin

        def load(**job: Any) -> dict[str, Any]:
            print(json.dumps(job), file=sink, flush=True)
            answer: dict[str, Any] = json.loads(source.readline())
            return answer

        yield load


@dataclass(frozen=True, slots=True)
class _Both:
    """The two ways to one engine."""

    engine: Engine
    port: int
    load: Load

    async def over_http(
        self, path: str, body: dict[str, Any], *, clients: int = 1, requests: int = 1
    ) -> tuple[float, list[Reply]]:
        """Return the seconds of all, and the replies."""
        job = {"port": self.port, "path": path, "body": {"model": "bench", **body}}
        found = await asyncio.to_thread(self.load, **job, clients=clients, requests=requests)
        return found["seconds"], [Reply(**each) for each in found["replies"]]

    async def direct(self, prompt: Any, params: SamplingParams, *, streams: int = 1) -> float:
        """Return the seconds of so many generations, chunk by chunk."""

        async def run() -> None:
            async for _ in self.engine.astream(prompt, params):
                pass

        started = time.perf_counter()
        await asyncio.gather(*(run() for _ in range(streams)))
        return time.perf_counter() - started


async def _measure(both: _Both, rounds: int, advance: Callable[[], None]) -> HttpResult:
    draw = random.Random(0)
    completions, chats, shares, rates, refusals = [], [], [], [], []
    # One round more: the first one warms up and is not counted.
    for number in range(rounds + 1):
        ids = random_ids(both.engine, draw, PROMPT_LEN)
        completion = await _request(both, "/v1/completions", {"prompt": ids}, ids)
        chat = await _request(both, "/v1/chat/completions", {"messages": MESSAGES}, MESSAGES)
        direct, http = await _decode(both, ids)
        found = await _refusals(both, ids)
        advance()
        if number:
            completions.append(completion)
            chats.append(chat)
            rates.append((direct, http))
            shares.append(1 - http / direct)
            refusals += found
    return HttpResult(
        rounds=rounds,
        completion=_pair(completions),
        chat=_pair(chats),
        direct_tokens_per_s=statistics.median(direct for direct, _ in rates),
        http_tokens_per_s=statistics.median(http for _, http in rates),
        lost_share=statistics.median(shares),
        refusal_s=statistics.median(refusals),
        refusals=len(refusals),
    )


async def _request(both: _Both, path: str, body: dict[str, Any], prompt: Any) -> tuple[float, float]:
    """Return the medians of a request of one token, direct and over HTTP, one after the other."""
    params = greedy(1)
    body = {**body, "max_tokens": 1, "temperature": 0, "ignore_eos": True}
    direct, http = [], []
    for number in range(NUM_REQUESTS + 1):
        seconds = await both.direct(prompt, params)
        _, [reply] = await both.over_http(path, body)
        assert reply.status == 200
        if number:  # the first one fills the cache
            direct.append(seconds)
            http.append(reply.total_s)
    return statistics.median(direct), statistics.median(http)


async def _decode(both: _Both, ids: Sequence[int]) -> tuple[float, float]:
    """Return tokens per second of many streams, direct and over HTTP."""
    params = greedy(STREAM_LEN)
    num_tokens = NUM_STREAMS * STREAM_LEN
    direct = num_tokens / await both.direct(ids, params, streams=NUM_STREAMS)
    body = {
        "prompt": ids,
        "max_tokens": STREAM_LEN,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
    }
    _, found = await both.over_http("/v1/completions", body, clients=NUM_STREAMS)
    assert {each.status for each in found} == {200}
    return direct, num_tokens / max(each.total_s for each in found)


async def _refusals(both: _Both, ids: Sequence[int]) -> list[float]:
    """Return the seconds to each refusal of an overloaded server."""
    body = {"prompt": ids, "max_tokens": STREAM_LEN, "temperature": 0, "ignore_eos": True}
    _, found = await both.over_http("/v1/completions", body, clients=NUM_PLACES * OVERLOAD)
    assert {each.status for each in found} <= {200, 429}
    return [each.total_s for each in found if each.status == 429]


def _pair(found: Sequence[tuple[float, float]]) -> Pair:
    return Pair(
        direct_s=statistics.median(direct for direct, _ in found),
        http_s=statistics.median(http for _, http in found),
        added_s=statistics.median(http - direct for direct, http in found),
    )


def _table(result: HttpResult) -> Table:
    table = Table(title=f"HTTP beside the engine: medians of {result.rounds} rounds", title_justify="left")
    table.add_column("what")
    for name in ("direct", "HTTP", "difference", "aim"):
        table.add_column(name, justify="right", no_wrap=True)
    for what, pair in (
        ("a completion of one token", result.completion),
        ("a chat of one token", result.chat),
    ):
        table.add_row(
            what,
            f"{pair.direct_s * 1e3:.1f} ms",
            f"{pair.http_s * 1e3:.1f} ms",
            f"{pair.added_s * 1e3:+.1f} ms",
            verdict(f"{MAX_ADDED_S * 1e3:.0f} ms", met=pair.added_s <= MAX_ADDED_S),
        )
    table.add_row(
        f"decode of {NUM_STREAMS} streams",
        f"{result.direct_tokens_per_s:.0f} tokens/s",
        f"{result.http_tokens_per_s:.0f} tokens/s",
        f"{-result.lost_share:+.1%}",
        verdict(f"{-MAX_LOST_SHARE:.0%}", met=result.lost_share <= MAX_LOST_SHARE),
    )
    table.add_row(
        f"429 to {OVERLOAD} times too many requests ({result.refusals})",
        "",
        f"{result.refusal_s * 1e3:.0f} ms",
        "",
        verdict(f"{MAX_REFUSAL_S * 1e3:.0f} ms", met=result.refusal_s <= MAX_REFUSAL_S),
    )
    return table
