"""What a request passes before any of it is parsed: who sends it, whether requests are taken, how large and how deep it is."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from phloem.runtime.server.auth import KeyRing, key_in
from phloem.runtime.server.errors import ApiError, Failure, Render, invalid, respond
from phloem.runtime.server.gate import Gate
from phloem.runtime.server.settings import ServerSettings, is_loopback

OPEN_PATHS = frozenset({"/health", "/ready", "/openapi.json"})
"""What needs no key, and works while the server drains."""

GENERATING = frozenset(
    {
        "/v1/completions",
        "/v1/chat/completions",
        "/v1/responses",
        "/v1/messages",
        "/generate",
        "/v1/cache/pins",
    }
)
"""Where a POST is refused unread while all places are taken."""

_GENERATING_ON_A_BRANCH = re.compile(r"/v1/branches/[^/]+/(generate|score|expand)")
"""And so are these; the rest of `/v1/branches` takes no place, and may make room."""

# A string ends at its quote or with the text, so that nothing is ever looked at twice.
_STRING = re.compile(rb'"(?:[^"\\]+|\\.)*(?:"|\\?\Z)', re.DOTALL)
_BRACKET = re.compile(rb"[\[{\]}]")


class Gatekeeper:
    """ASGI middleware. It leaves the tenant in the request's state, and hands on a body that is read whole."""

    def __init__(
        self,
        app: ASGIApp,
        *,
        settings: ServerSettings,
        gate: Gate,
        render_for: Callable[[str], Render],
    ) -> None:
        self._app = app
        self._settings = settings
        self._gate = gate
        self._render_for = render_for
        self._keys = KeyRing(settings.api_keys, settings.admin_key, settings.secret)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See ASGI."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        try:
            body = await self._admit(scope, receive)
        except ApiError as error:
            response = respond(error.failure, self._render_for(scope["path"]))
            # The rest of the body, if there is any, is not read: the connection can't be used again.
            response.headers["Connection"] = "close"
            await response(scope, receive, send)
            return
        if body is None:
            return
        if not _generates(scope):
            await self._app(scope, _replay(body, receive), send)
            return
        # An overloaded server says no for a fraction of what parsing a request costs.
        try:
            self._gate.enter()
        except ApiError as error:
            await respond(error.failure, self._render_for(scope["path"]))(scope, receive, send)
            return
        try:
            await self._app(scope, _replay(body, receive), send)
        finally:
            self._gate.leave()

    async def _admit(self, scope: Scope, receive: Receive) -> bytes | None:
        """Return the body of a request that may pass; None if its client has gone."""
        if self._settings.serves_this_machine_only:
            _check_caller(scope)
        if scope["path"] not in OPEN_PATHS:
            tenant = self._keys.tenant_of(key_in(scope["headers"]))
            scope.setdefault("state", {})["tenant"] = tenant
            if scope["method"] == "POST":
                self._gate.check_open()
        body = await self._read(scope, receive)
        if (
            body is not None
            and (depth := depth_of(body, self._settings.max_depth)) > self._settings.max_depth
        ):
            raise invalid(
                f"the request is nested {depth} levels deep or more; at most {self._settings.max_depth} are taken",
                "body",
            )
        return body

    async def _read(self, scope: Scope, receive: Receive) -> bytes | None:
        limit = self._settings.max_body_bytes
        announced = dict(scope["headers"]).get(b"content-length", b"0")
        if announced.isdigit() and int(announced[:20]) > limit:
            raise _too_large(limit)
        try:
            return await asyncio.wait_for(_read_at_most(receive, limit), self._settings.body_timeout_s)
        except asyncio.TimeoutError:
            message = f"the request's body was not sent within {self._settings.body_timeout_s:g} s"
            raise ApiError(Failure(408, "timeout", message)) from None


def _generates(scope: Scope) -> bool:
    path = scope["path"]
    return scope["method"] == "POST" and (
        path in GENERATING or _GENERATING_ON_A_BRANCH.fullmatch(path) is not None
    )


async def _read_at_most(receive: Receive, limit: int) -> bytes | None:
    parts: list[bytes] = []
    num_bytes = 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            return None
        parts.append(message.get("body", b""))
        num_bytes += len(parts[-1])
        if num_bytes > limit:
            raise _too_large(limit)
        if not message.get("more_body", False):
            return b"".join(parts)


def _check_caller(scope: Scope) -> None:
    """Refuse web pages of elsewhere, which the browser on this machine runs.

    One whose name was made to point here (DNS rebinding) asks under that name; one that just sends a request is told of by its browser.
    """
    headers = dict(scope["headers"])
    if headers.get(b"sec-fetch-site") == b"cross-site":
        message = "requests from other sites' pages are not served: set an API key, or allow_anonymous"
        raise ApiError(Failure(403, "permission", message))
    host = headers.get(b"host", b"").decode("latin-1")
    name = host.rpartition(":")[0] if host.rpartition(":")[2].isdigit() else host
    if not is_loopback(name.strip("[]")):
        message = f"requests for {name!r} are not served: set an API key, or allow_anonymous"
        raise ApiError(Failure(403, "permission", message))


def _too_large(limit: int) -> ApiError:
    return ApiError(Failure(413, "too_large", f"the request's body has more than {limit:,} bytes", "body"))


def _replay(body: bytes, receive: Receive) -> Receive:
    """Return a `receive` that gives the body once, and then what the connection gives: the client's going."""
    given = False

    async def replay() -> Message:
        nonlocal given
        if given:
            return await receive()
        given = True
        return {"type": "http.request", "body": body, "more_body": False}

    return replay


def depth_of(body: bytes, enough: int) -> int:
    """Return how deeply lists and objects of a JSON text are nested; beyond `enough` it looks no further. O(len(body))."""
    if body.count(b"[") + body.count(b"{") <= enough:
        return 0
    depth = deepest = 0
    for bracket in _BRACKET.finditer(_STRING.sub(b"", body)):
        depth += 1 if bracket[0] in b"[{" else -1
        deepest = max(deepest, depth)
        if deepest > enough:
            break
    return deepest
