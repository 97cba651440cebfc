"""OpenTelemetry: one span per request that the model works for, under the GenAI conventions' names. Never a word of a prompt.

`serve` switches it on where the environment names a collector (`OTEL_EXPORTER_OTLP_ENDPOINT`, or `.._TRACES_ENDPOINT`); all other variables of
the OpenTelemetry SDK count as well. A request's `traceparent` becomes the span's parent. This module needs the extra `otel`.

The attributes are those of https://opentelemetry.io/docs/specs/semconv/gen-ai/.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextvars import ContextVar
from typing import Any

from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import Span, SpanKind, StatusCode
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from phloem.runtime.outputs import Completion
from phloem.runtime.server.totals import Totals

_OPERATIONS = {
    "/v1/chat/completions": "chat",
    "/v1/responses": "chat",
    "/v1/messages": "chat",
    "/v1/completions": "text_completion",
    "/generate": "text_completion",
}
_ON_BRANCHES = ("/generate", "/expand")


class Tracing:
    """ASGI middleware: the spans."""

    def __init__(self, app: ASGIApp, *, provider: TracerProvider, model_name: str, totals: Totals) -> None:
        self._app = app
        self._tracer = provider.get_tracer("phloem")
        self._model_name = model_name
        self._propagator = TraceContextTextMapPropagator()
        self._request: ContextVar[_Request | None] = ContextVar("request", default=None)
        totals.listeners.append(self._note)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See ASGI."""
        operation = _operation_of(scope)
        if operation is None:
            await self._app(scope, receive, send)
            return
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        attributes = {
            "gen_ai.operation.name": operation,
            "gen_ai.provider.name": "phloem",
            "gen_ai.request.model": self._model_name,
            "gen_ai.response.model": self._model_name,
            "http.request.method": scope["method"],
        }
        with self._tracer.start_as_current_span(
            f"{operation} {self._model_name}",
            context=self._propagator.extract(headers),
            kind=SpanKind.SERVER,
            attributes=attributes,
            record_exception=False,  # its text may tell of the request
        ) as span:
            request = _Request(span)
            token = self._request.set(request)
            try:
                await self._app(scope, receive, request.watching(send))
            finally:
                self._request.reset(token)
                request.describe(scope)

    def _note(self, completion: Completion, is_first: bool) -> None:
        request = self._request.get()
        if request is not None:
            request.note(completion, is_first)


class _Request:
    """What is known of a request under way. Its generations end in tasks of its own, so nobody else's come here."""

    def __init__(self, span: Span) -> None:
        self._span = span
        self._status = 0
        self._input_tokens = self._cached_tokens = self._output_tokens = 0
        self._reasons: list[str] = []
        self._first_token_s: float | None = None

    def watching(self, send: Send) -> Send:
        """Return a `send` that keeps the status."""

        async def watched(message: Message) -> None:
            if message["type"] == "http.response.start":
                self._status = message["status"]
            await send(message)

        return watched

    def note(self, completion: Completion, is_first: bool) -> None:
        """Add a generation that has ended."""
        usage = completion.usage
        if is_first:
            self._input_tokens += usage.prompt_tokens
            self._cached_tokens += usage.cached_tokens
        self._output_tokens += usage.completion_tokens
        self._reasons.append(completion.finish_reason)
        # NaN where there was none, which is not below anything.
        if completion.first_token_s < (self._first_token_s or float("inf")):
            self._first_token_s = completion.first_token_s

    def describe(self, scope: Mapping[str, Any]) -> None:
        """Write all of it into the span."""
        route = getattr(scope.get("route"), "path", None)
        attributes = {"http.response.status_code": self._status, "http.route": route}
        if self._reasons:
            attributes |= {
                "gen_ai.usage.input_tokens": self._input_tokens,
                "gen_ai.usage.cache_read.input_tokens": self._cached_tokens,
                "gen_ai.usage.output_tokens": self._output_tokens,
                "gen_ai.response.finish_reasons": tuple(self._reasons),
                "gen_ai.response.time_to_first_chunk": self._first_token_s,
            }
        if self._status >= 400:
            attributes["error.type"] = str(self._status)
        self._span.set_attributes({name: value for name, value in attributes.items() if value is not None})
        if self._status >= 500:
            self._span.set_status(StatusCode.ERROR)


def _operation_of(scope: Scope) -> str | None:
    """Return the operation's name in the conventions; None if the model does not work for it."""
    if scope["type"] != "http" or scope["method"] not in ("POST", "PUT"):
        return None
    path = scope["path"]
    if path.startswith("/v1/branches/") and path.endswith(_ON_BRANCHES):
        return "text_completion"
    return _OPERATIONS.get(path)


def make_provider() -> TracerProvider:
    """Return what exports spans as the environment says. Shut it down in the end, so that the last ones get out."""
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

    name = os.environ.get("OTEL_SERVICE_NAME", "phloem")
    provider = TracerProvider(resource=Resource.create({"service.name": name}))
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    return provider
