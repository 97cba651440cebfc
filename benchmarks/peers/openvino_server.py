"""OpenVINO GenAI's continuous batching behind OpenAI's `/v1/completions`, as far as `phloem bench serve` needs it.

    python -m venv ov && ov/bin/pip install openvino-genai fastapi uvicorn optimum-intel torch
    ov/bin/optimum-cli export openvino --model MODEL_DIR --task text-generation-with-past --weight-format fp16 ov-model
    ov/bin/python benchmarks/peers/openvino_server.py ov-model --port 8002

Prompts are token ids, streams carry them too. One thread steps the pipeline, and hands out what each step generated.
"""

import argparse
import asyncio
import json
import queue
import threading
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import openvino
import openvino_genai
import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import StreamingResponse

MODEL = "openvino"


Put = Callable[[list[int] | None], None]


@dataclass
class Asked:
    """A request on its way to the pipeline."""

    ids: openvino.Tensor
    config: openvino_genai.GenerationConfig
    put: Put


@dataclass
class Running:
    """A request in the pipeline."""

    handle: Any
    put: Put


class Pipeline:
    """The pipeline and the thread that steps it."""

    def __init__(self, model: str, cache_gib: int) -> None:
        scheduler = openvino_genai.SchedulerConfig()
        scheduler.cache_size, scheduler.enable_prefix_caching = cache_gib, True
        scheduler.max_num_seqs = 256
        self._pipe = openvino_genai.ContinuousBatchingPipeline(model, scheduler, "CPU")
        self._new: queue.SimpleQueue[Asked] = queue.SimpleQueue()
        self._running: list[Running] = []
        self._count = 0
        threading.Thread(target=self._run, daemon=True).start()

    def start(
        self, prompt: list[int], config: openvino_genai.GenerationConfig
    ) -> asyncio.Queue[list[int] | None]:
        """Add a request; its tokens come in pieces, None ends them."""
        loop, pieces = asyncio.get_running_loop(), asyncio.Queue[list[int] | None]()
        ids = openvino.Tensor(np.array([prompt], np.int64))
        self._new.put(Asked(ids, config, lambda piece: loop.call_soon_threadsafe(pieces.put_nowait, piece)))
        return pieces

    def _run(self) -> None:
        while True:
            # waits only while there is nothing else to do
            while not self._running or not self._new.empty():
                self._add(self._new.get())
            self._pipe.step()
            for running in list(self._running):
                while running.handle.can_read():
                    for output in running.handle.read().values():
                        running.put(list(output.generated_ids))
                if running.handle.get_status() != openvino_genai.GenerationStatus.RUNNING:
                    running.put(None)
                    self._running.remove(running)

    def _add(self, asked: Asked) -> None:
        handle = self._pipe.add_request(self._count, asked.ids, asked.config)
        self._count += 1
        self._running.append(Running(handle, asked.put))


def make_app(pipeline: Pipeline) -> FastAPI:
    """The two routes that the bench calls."""
    app = FastAPI()

    @app.get("/v1/models")
    async def models() -> dict[str, object]:
        return {"object": "list", "data": [{"id": MODEL, "object": "model"}]}

    @app.post("/v1/completions")
    async def complete(request: Request) -> StreamingResponse:
        body = await request.json()
        config = openvino_genai.GenerationConfig()
        config.max_new_tokens, config.ignore_eos = body["max_tokens"], body.get("ignore_eos", False)
        if body.get("temperature"):
            config.do_sample, config.temperature, config.rng_seed = (
                True,
                body["temperature"],
                body.get("seed", 0),
            )
        pieces = pipeline.start(body["prompt"], config)

        async def events() -> AsyncIterator[str]:
            count = 0
            while (piece := await pieces.get()) is not None:
                count += len(piece)
                yield _event({"choices": [{"index": 0, "text": "", "token_ids": piece}]})
            usage = {"prompt_tokens": len(body["prompt"]), "completion_tokens": count}
            yield _event({"choices": [], "usage": usage})
            yield "data: [DONE]\n\n"

        return StreamingResponse(events(), media_type="text/event-stream")

    return app


def _event(payload: dict[str, object]) -> str:
    return f"data: {json.dumps(payload)}\n\n"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", help="an exported model directory")
    parser.add_argument("--port", type=int, default=8002)
    parser.add_argument("--cache-gib", type=int, default=2)
    options = parser.parse_args()
    uvicorn.run(make_app(Pipeline(options.model, options.cache_gib)), port=options.port, log_level="warning")
