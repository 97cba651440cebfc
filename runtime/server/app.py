"""The application: all protocols, what they pass before, and the form of their errors.

A protocol is a module with an `APIRouter`, listed in `ROUTERS`, and in `ERROR_FORMS` where its errors are not in OpenAI's form. Its handlers
take `ServiceDep` and `TenantDep`; they ask `service.gate.check` before they work for a request, `service.start` a run, and close it, by
`service.stream` or by hand. Whoever has no key never gets there.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

from fastapi import APIRouter, FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from phloem.radix import InvalidNamespace
from phloem.runtime.engine import Engine
from phloem.runtime.errors import PhloemError
from phloem.runtime.server import (
    anthropic_messages,
    branches,
    cache,
    health,
    metrics,
    openai_chat,
    openai_completions,
    openai_models,
    openai_responses,
    sglang_control,
    sglang_generate,
    sglang_info,
)
from phloem.runtime.server.anthropic_errors import anthropic_error
from phloem.runtime.server.errors import (
    CLIENT_GONE,
    ApiError,
    ClientGone,
    Render,
    failure_of,
    openai_error,
    respond,
)
from phloem.runtime.server.gatekeeper import Gatekeeper
from phloem.runtime.server.service import Service
from phloem.runtime.server.settings import ServerSettings

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider

ROUTERS: tuple[APIRouter, ...] = (
    health.router,
    openai_models.router,
    openai_completions.router,
    openai_chat.router,
    openai_responses.router,
    branches.router,
    anthropic_messages.router,
    cache.router,
    sglang_generate.router,
    sglang_info.router,
    sglang_control.router,
    metrics.router,
)

ERROR_FORMS: tuple[tuple[str, Render], ...] = (("/v1/messages", anthropic_error),)
"""By the beginning of a path, the form of its errors; elsewhere it is OpenAI's."""


def make_app(
    engine: Engine, settings: ServerSettings, *, tracer_provider: TracerProvider | None = None
) -> FastAPI:
    """Return the ASGI application. The engine stays the caller's, who closes it after the last request.

    Args:
        engine: Does the work.
        settings: The server's.
        tracer_provider: Takes a span of each request; see `phloem.runtime.server.tracing`.
    """
    # No pages that load scripts from elsewhere.
    app = FastAPI(title="phloem", docs_url=None, redoc_url=None)
    service = Service(engine, settings)
    app.state.service = service
    app.state.registry = metrics.make_registry(service)
    if tracer_provider is not None:
        # OpenTelemetry is an extra.
        from phloem.runtime.server.tracing import Tracing

        app.add_middleware(
            Tracing, provider=tracer_provider, model_name=service.model_name, totals=service.totals
        )
    app.add_middleware(Gatekeeper, settings=settings, gate=service.gate, render_for=render_for)
    for router in ROUTERS:
        app.include_router(router)
    handle = _handler(settings.retry_after_s)
    for kind in (
        ApiError,
        PhloemError,
        InvalidNamespace,
        RequestValidationError,
        HTTPException,
        Exception,
    ):
        app.add_exception_handler(kind, handle)
    app.add_exception_handler(ClientGone, _gone)
    return app


def render_for(path: str) -> Render:
    """Return the form of a path's errors."""
    return next((render for beginning, render in ERROR_FORMS if path.startswith(beginning)), openai_error)


def _handler(retry_after_s: int) -> Callable[[Request, Exception], Awaitable[Response]]:
    async def handle(request: Request, error: Exception) -> Response:
        failure = failure_of(error, retry_after_s=retry_after_s)
        return respond(failure, render_for(request.url.path))

    return handle


async def _gone(request: Request, error: Exception) -> Response:
    return Response(status_code=CLIENT_GONE)
