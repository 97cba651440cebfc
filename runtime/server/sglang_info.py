"""What SGLang's clients ask a server about itself: `/model_info`, `/server_info`, each also under older names, and `/health_generate`."""

from __future__ import annotations

import asyncio
from dataclasses import asdict
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request

from phloem.runtime.errors import PhloemError
from phloem.runtime.sampling_params import SamplingParams
from phloem.runtime.server.errors import JsonAnswer
from phloem.runtime.server.service import Service, ServiceDep, TenantDep

router = APIRouter(tags=["sglang"])


@router.get("/get_model_info", operation_id="get_model_info")
@router.get("/model_info", operation_id="model_info")
async def model_info(service: ServiceDep, tenant: TenantDep) -> JsonAnswer:
    """Describe the model. By its `model_path` SGLang's frontend chooses a chat template, which has no other way to know one."""
    return JsonAnswer(_model_info(service))


@router.get("/get_server_args", operation_id="get_server_args")
@router.get("/get_server_info", operation_id="get_server_info")
@router.get("/server_info", operation_id="server_info")
async def server_info(service: ServiceDep, tenant: TenantDep) -> JsonAnswer:
    """Describe the server. How busy it is, which is of all tenants together, is told to the admin."""
    engine = service.engine
    stats = await asyncio.to_thread(engine.stats)
    return JsonAnswer(
        {
            **_model_info(service),
            "served_model_name": service.model_name,
            "context_length": engine.max_model_len,
            "max_req_input_len": engine.max_model_len - 1,
            "max_total_num_tokens": stats.cache.num_blocks * engine.config.block_size,
            "page_size": engine.config.block_size,
            "internal_states": [asdict(stats)] if tenant.is_admin else [],
        }
    )


@router.get("/health_generate")
async def health_generate(request: Request, service: ServiceDep, tenant: TenantDep) -> JsonAnswer:
    """Generate one token, and tell whether that works."""
    service.gate.check_open()
    try:
        run = await service.start([[0]], SamplingParams(max_tokens=1), tenant.namespace())
        await run.whole(request)
    except PhloemError:
        return JsonAnswer({"status": "failed"}, status_code=503)
    return JsonAnswer({"status": "ok"})


def _model_info(service: Service) -> dict[str, Any]:
    name = service.model_name
    return {
        "model_path": name,
        "tokenizer_path": name,
        "is_generation": True,
        "preferred_sampling_params": None,
        "weight_version": "default",
        "has_image_understanding": False,
        "has_audio_understanding": False,
        "model_type": service.engine.model.architecture,
    }
