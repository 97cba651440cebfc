"""SGLang's orders to the server: forget the cache, end requests, and join forks, which needs nothing done."""

from __future__ import annotations

import asyncio

from fastapi import APIRouter
from pydantic import BaseModel, ConfigDict, Field

from phloem.runtime.server.errors import JsonAnswer, invalid
from phloem.runtime.server.service import AdminDep, ServiceDep, TenantDep
from phloem.runtime.server.sglang_generate import rid_name

router = APIRouter(tags=["sglang"])


class AbortRequest(BaseModel):
    """A request of `/abort_request`."""

    model_config = ConfigDict(extra="forbid", strict=True)

    rid: str | None = None
    abort_all: bool = False
    finished_reason: dict[str, object] | None = Field(None, description="Has no effect.")
    abort_message: str | None = Field(None, description="Has no effect.")


class JoinRequest(BaseModel):
    """A request of `/concate_and_append_request`."""

    model_config = ConfigDict(extra="forbid", strict=True)

    src_rids: list[str]
    dst_rid: str


@router.get("/flush_cache", operation_id="get_flush_cache")
@router.post("/flush_cache", operation_id="flush_cache")
async def flush_cache(service: ServiceDep, admin: AdminDep) -> JsonAnswer:
    """Forget every cached prefix, of all tenants. Requests under way go on."""
    await asyncio.to_thread(service.engine.clear_cache)  # the engine answers between two steps
    return JsonAnswer({"success": True})


@router.post("/abort_request")
async def abort_request(body: AbortRequest, service: ServiceDep, tenant: TenantDep) -> JsonAnswer:
    """End requests of `/generate` by their `rid`, or all of the tenant's; of the admin, all that there are.

    They are answered with what there is of them. An unknown or ended `rid` is no error.
    """
    if not body.rid and not body.abort_all:
        raise invalid("give the rid of the request, or abort_all", "rid")
    if body.abort_all and tenant.is_admin:
        service.abort_all()
    else:
        service.abort_named(rid_name(tenant, "" if body.abort_all else body.rid or ""))
    return JsonAnswer({"success": True})


@router.post("/concate_and_append_request")
async def join(body: JoinRequest, service: ServiceDep, tenant: TenantDep) -> JsonAnswer:
    """Take note of a join of forks, and do nothing: the client joins their texts, and what they share is in the cache."""
    return JsonAnswer({"success": True})
