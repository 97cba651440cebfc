"""The cache over HTTP: why a prompt would or would not hit it, and pins that keep prompts from eviction.

Both are of one key's own cache: the engine looks for a prompt in its own namespace only. What other keys have cached or pinned never
shows, except that all together may have pinned as much as the engine lets them.
"""

from __future__ import annotations

import asyncio
import dataclasses
from typing import Any

from fastapi import APIRouter
from pydantic import Field
from starlette.requests import Request

from phloem.radix import Miss, MissReason, PinRefused
from phloem.runtime.branch import Branch
from phloem.runtime.explain import describe
from phloem.runtime.server.errors import JsonAnswer, invalid
from phloem.runtime.server.pin_store import PinState
from phloem.runtime.server.prompt_fields import PromptFields
from phloem.runtime.server.service import Service, ServiceDep, TenantDep

DEFAULT_TTL_S = 300.0

router = APIRouter(prefix="/v1/cache", tags=["cache"])


class PinRequest(PromptFields):
    """A request of `/v1/cache/pins`."""

    ttl: float = Field(DEFAULT_TTL_S, gt=0, description="Seconds that the pin lives after each use.")


@router.post("/explain")
async def explain(body: PromptFields, service: ServiceDep, tenant: TenantDep) -> JsonAnswer:
    """Tell how much of a prompt would come from the cache, and why the rest would not. Nothing runs, nothing changes."""
    namespace, engine = body.namespace(tenant), service.engine
    prompt = await body.prompt(service, namespace)
    found = await engine.aexplain(prompt.tolist(), namespace=namespace)
    # Not the names of requests, whose numbers count everybody's.
    misses = tuple(dataclasses.replace(miss, label=None) for miss in found.misses)
    shown = dataclasses.replace(found, misses=misses)
    return JsonAnswer(
        {
            "object": "cache.explanation",
            "num_tokens": shown.num_tokens,
            "cached_tokens": shown.cached_tokens,
            "misses": [_miss_dict(miss, service) for miss in shown.misses],
            "description": describe(shown, engine.tokenizer.decode),
        }
    )


@router.post("/pins")
async def pin(body: PinRequest, request: Request, service: ServiceDep, tenant: TenantDep) -> JsonAnswer:
    """Compute a prompt where it is not cached, and keep its whole blocks from eviction."""
    limit = service.settings.max_pin_ttl_s
    if body.ttl > limit:
        raise invalid(f"ttl is {body.ttl}; a pin lives for at most {limit:g} seconds (max_pin_ttl_s)", "ttl")
    namespace = body.namespace(tenant)
    prompt = await body.prompt(service, namespace)
    with await asyncio.to_thread(service.engine.branch, prompt.tolist(), namespace=namespace) as branch:
        async with service.pins.room(tenant, len(branch)) as keep:
            num_tokens = await _pinned(branch, body.ttl, request, service)
            state = keep(branch, num_tokens, body.ttl)
    return JsonAnswer(_pin_dict(state))


@router.get("/pins")
async def list_pins(service: ServiceDep, tenant: TenantDep) -> JsonAnswer:
    """List the key's pins, the oldest first."""
    states = await service.pins.all_of(tenant)
    return JsonAnswer({"object": "list", "data": [_pin_dict(state) for state in states]})


@router.delete("/pins/{pin_id}")
async def unpin(pin_id: str, service: ServiceDep, tenant: TenantDep) -> JsonAnswer:
    """End a pin: what it kept can be evicted again."""
    await service.pins.drop(tenant, pin_id)
    return JsonAnswer({"id": pin_id, "object": "cache.pin", "deleted": True})


async def _pinned(branch: Branch, ttl_s: float, request: Request, service: Service) -> int:
    try:
        return await service.work(request, 1, lambda: branch.apin(ttl=ttl_s, owner="pin"))
    except BaseException as error:
        # For a client that left, the lease may have been taken all the same.
        await branch.aunpin()
        if isinstance(error.__cause__, PinRefused):
            # Whose message tells what others have pinned.
            raise service.pins.full(
                "the pins of all users keep as much as they may; try again later, or pin a shorter prompt"
            ) from None
        raise


def _miss_dict(miss: Miss, service: Service) -> dict[str, Any]:
    found: dict[str, Any] = {
        "start": miss.start,
        "end": miss.end,
        "num_tokens": miss.num_tokens,
        "reason": miss.reason.value,
    }
    if miss.reason is MissReason.DIVERGED:
        found |= {"here": _token(miss.token, service), "there": _token(miss.other_token, service)}
    return found


def _token(token_id: int | None, service: Service) -> dict[str, Any] | None:
    return None if token_id is None else {"token_id": token_id, "text": service.token_texts.name_of(token_id)}


def _pin_dict(state: PinState) -> dict[str, Any]:
    held = state.pin
    return {
        "id": held.id,
        "object": "cache.pin",
        "created": held.created,
        "num_tokens": held.num_tokens,
        "ttl": held.ttl_s,
        "expires_in_s": state.expires_in_s,
    }
