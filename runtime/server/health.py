"""Whether the process lives, and whether it takes requests."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.responses import JSONResponse

from phloem.runtime.server.service import ServiceDep

router = APIRouter(tags=["health"])


@router.get("/health")
async def health(service: ServiceDep) -> JSONResponse:
    """Tell whether the engine runs; a process for which it does not should be started anew."""
    alive = not service.engine.is_closed
    return JSONResponse({"status": "ok" if alive else "failed"}, status_code=200 if alive else 503)


@router.get("/ready")
async def ready(service: ServiceDep) -> JSONResponse:
    """Tell whether requests are taken."""
    if service.engine.is_closed or service.gate.draining:
        return JSONResponse({"status": "draining" if service.gate.draining else "failed"}, status_code=503)
    return JSONResponse({"status": "ready"})
