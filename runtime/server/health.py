"""Whether the process lives, and whether it takes requests."""

from __future__ import annotations

from fastapi import APIRouter

from phloem.runtime.server.errors import JsonAnswer
from phloem.runtime.server.service import ServiceDep

router = APIRouter(tags=["health"])


@router.get("/health")
async def health(service: ServiceDep) -> JsonAnswer:
    """Tell whether the engine runs; a process for which it does not should be started anew."""
    alive = not service.engine.is_closed
    return JsonAnswer({"status": "ok" if alive else "failed"}, status_code=200 if alive else 503)


@router.get("/ready")
async def ready(service: ServiceDep) -> JsonAnswer:
    """Tell whether requests are taken."""
    if service.engine.is_closed or service.gate.draining:
        return JsonAnswer({"status": "draining" if service.gate.draining else "failed"}, status_code=503)
    return JsonAnswer({"status": "ready"})
