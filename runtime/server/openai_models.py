"""`/v1/models`: the one model that is served, under each of its names. OpenAI's and Anthropic's clients read the same answer."""

from __future__ import annotations

from datetime import datetime, timezone
from typing import Any

from fastapi import APIRouter

from phloem.runtime.server.errors import JsonAnswer
from phloem.runtime.server.service import Service, ServiceDep, TenantDep

router = APIRouter(tags=["openai"])


@router.get("/v1/models")
async def list_models(service: ServiceDep, tenant: TenantDep) -> JsonAnswer:
    """List the names of the model."""
    names = service.settings.served_names
    ends = {"first_id": names[0], "last_id": names[-1], "has_more": False}
    return JsonAnswer({"object": "list", "data": [_card(service, name) for name in names], **ends})


@router.get("/v1/models/{name:path}")
async def get_model(name: str, service: ServiceDep, tenant: TenantDep) -> JsonAnswer:
    """Describe the model."""
    service.check_model(name)
    return JsonAnswer(_card(service, name))


def _card(service: Service, name: str) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "type": "model",
        "display_name": name,
        "created": service.started_at,
        "created_at": datetime.fromtimestamp(service.started_at, timezone.utc).isoformat(),
        "owned_by": "phloem",
        "root": service.model_name,
        "parent": None,
        "max_model_len": service.engine.max_model_len,
    }
