"""Any server of OpenAI's `/v1/completions` as a client of workloads: streams over HTTP. Needs httpx, the extra `bench`."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import httpx

from phloem.runtime.cli.workloads.client import Answer, Ask, Client, Stopwatch
from phloem.runtime.errors import InvalidRequest
from phloem.runtime.tokenizer import Tokenizer

_TIMEOUT_S = 600.0
_MAX_SHOWN = 500
"""Characters of a server's complaint."""


@dataclass(frozen=True, slots=True)
class Server:
    """Where to send requests, and in which form."""

    name: str
    base_url: str
    """Ends in `/v1`."""

    tokenizer: Tokenizer
    """Of the model that it serves."""

    model: str
    """As the server calls it."""

    api_key: str | None = None
    plain: bool = False
    """Send text and OpenAI's own fields only, for servers that refuse token ids or vLLM's fields. Answers can then end early."""

    @asynccontextmanager
    async def open(self) -> AsyncIterator[Client]:
        """Open connections; they are closed at the end of the block."""
        async with _http(self.base_url, self.api_key) as http:
            yield HttpClient(self, http)


def find_server(url: str, tokenizer: Tokenizer, *, api_key: str | None, plain: bool) -> Server:
    """Ask a server what it serves.

    Args:
        url: `http://host:port`, with or without `/v1`. `NAME=` in front gives the server a name for tables, `#MODEL` behind
            says which of its models; without, it is the first that the server names.
        tokenizer: Of the model that it serves.
        api_key: For servers that want one.
        plain: See :class:`Server`.

    Raises:
        InvalidRequest: There is no such server, or it serves nothing.
    """
    name, equals, address = url.partition("=")
    if not equals or "://" in name:
        name, address = url.split("://")[-1].partition("#")[0].rstrip("/"), url
    address, _, model = address.partition("#")
    base_url = address.rstrip("/").removesuffix("/v1") + "/v1"
    found = model or asyncio.run(_first_model(base_url, api_key))
    return Server(name, base_url, tokenizer, found, api_key, plain)


class HttpClient:
    """One server; every request is a stream of its own."""

    def __init__(self, server: Server, http: httpx.AsyncClient) -> None:
        self._server = server
        self._http = http

    async def complete(self, asks: Sequence[Ask]) -> list[Answer]:
        """See :class:`Client`.

        Raises:
            InvalidRequest: The server can't be reached, or refuses a request.
        """
        return list(await asyncio.gather(*(self._complete(ask) for ask in asks)))

    async def _complete(self, ask: Ask) -> Answer:
        reading = _Reading(Stopwatch(time.perf_counter()))
        try:
            async with self._http.stream("POST", "completions", json=self._body(ask)) as response:
                if response.status_code != httpx.codes.OK:
                    text = (await response.aread()).decode(errors="replace")
                    raise _refused(self._server.name, f"{response.status_code}: {text}")
                async for line in response.aiter_lines():
                    if line.startswith("data:") and (event := line[5:].strip()) != "[DONE]":
                        reading.take(json.loads(event), self._server.name)
        except httpx.HTTPError as error:
            raise _unreachable(self._server.base_url, error) from error
        return reading.answer(ask, self._server)

    def _body(self, ask: Ask) -> dict[str, Any]:
        server = self._server
        body: dict[str, Any] = {
            "model": server.model,
            "prompt": server.tokenizer.decode(ask.prompt) if server.plain else ask.prompt,
            "max_tokens": ask.max_tokens,
            "temperature": 0.0 if ask.seed is None else 1.0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if ask.seed is not None:
            body["seed"] = ask.seed
        if not server.plain:
            body |= {"ignore_eos": True, "return_token_ids": True}
        return body


class _Reading:
    """An answer as it arrives."""

    def __init__(self, watch: Stopwatch) -> None:
        self._watch = watch
        self._text: list[str] = []
        self._ids: list[int] = []
        self._usage: dict[str, Any] | None = None

    def take(self, event: dict[str, Any], server: str) -> None:
        """Take an event of the stream."""
        if "error" in event:
            raise _refused(server, json.dumps(event["error"]))
        self._usage = event.get("usage") or self._usage
        for choice in event.get("choices", ()):
            ids = choice.get("token_ids") or []
            text = choice.get("text") or ""
            self._ids += ids
            self._text.append(text)
            self._watch.piece(len(ids) or bool(text))

    def answer(self, ask: Ask, server: Server) -> Answer:
        """Return it whole. Where the server gives no ids, they are those of its text; without usage, they are counted.

        Raises:
            InvalidRequest: The stream ended without a token.
        """
        if not self._watch.last:
            raise _refused(server.name, "no token")
        ids = self._ids or server.tokenizer.encode("".join(self._text), add_special_tokens=False)
        usage = self._usage or {}
        details = usage.get("prompt_tokens_details") or {}
        return Answer(
            ask,
            ids,
            prompt_tokens=usage.get("prompt_tokens", len(ask.prompt)),
            cached_tokens=details.get("cached_tokens"),
            completion_tokens=usage.get("completion_tokens", len(ids)),
            first_token_s=self._watch.first_token_s,
            gaps_s=self._watch.gaps_s,
            total_s=time.perf_counter() - self._watch.started,
        )


async def _first_model(base_url: str, api_key: str | None) -> str:
    async with _http(base_url, api_key) as http:
        try:
            response = await http.get("models")
            response.raise_for_status()
            names = [entry["id"] for entry in response.json()["data"]]
        except (httpx.HTTPError, ValueError, KeyError, TypeError) as error:
            raise _unreachable(base_url, error) from error
    if not names:
        raise InvalidRequest(f"{base_url} serves no model", field="url")
    return str(names[0])


def _http(base_url: str, api_key: str | None) -> httpx.AsyncClient:
    return httpx.AsyncClient(
        base_url=base_url,
        headers={"Authorization": f"Bearer {api_key}"} if api_key else {},
        timeout=_TIMEOUT_S,
        limits=httpx.Limits(max_connections=None, max_keepalive_connections=None),
    )


def _unreachable(base_url: str, error: Exception) -> InvalidRequest:
    return InvalidRequest(f"{base_url} can't be used: {type(error).__name__}: {error}", field="url")


def _refused(server: str, complaint: str) -> InvalidRequest:
    return InvalidRequest(f"{server} answered {complaint[:_MAX_SHOWN]}", field="url")
