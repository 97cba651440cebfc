"""The engine: a model, its KV blocks in a radix tree, and a thread that runs requests over them."""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import logging
import secrets
from array import array
from collections.abc import AsyncIterator, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

from phloem.kernels.attention import AttentionSpec, make_backend
from phloem.kernels.kv_store import PagedKVStore
from phloem.kernels.self_test import InvarianceReport, row_invariance_report
from phloem.radix import BlockPool, Namespace, RadixCache
from phloem.runtime.config import EngineConfig
from phloem.runtime.engine_loop import EngineLoop
from phloem.runtime.errors import InvalidRequest, PromptTooLong
from phloem.runtime.generation import AsyncGeneration, AsyncSink, Generation, Progress, QueueSink, Sink
from phloem.runtime.memory import pool_size
from phloem.runtime.model_runner import ModelRunner
from phloem.runtime.models.loading import LoadedModel, load_model
from phloem.runtime.models.resolve import resolve_model
from phloem.runtime.output import OutputStream
from phloem.runtime.outputs import Chunk, Completion, EngineStats
from phloem.runtime.path import Path as TokenPath
from phloem.runtime.path_cache import PathCache
from phloem.runtime.progress import track
from phloem.runtime.prompts import Prompt, as_prompts, encode
from phloem.runtime.request import Request
from phloem.runtime.sampling_params import SamplingParams
from phloem.runtime.scheduler import Scheduler

logger = logging.getLogger(__name__)

DTYPES = {"auto": None, "bfloat16": torch.bfloat16, "float32": torch.float32}


class Engine:
    """A language model whose prompts are computed once.

    ::

        with Engine("smollm2-135m") as engine:
            [done] = engine.generate("The capital of France is", SamplingParams(max_tokens=8, temperature=0))
            print(done.text, done.usage)

    All methods may be called from any thread, at the same time.

    Args:
        model: A Hugging Face model directory, a `.gguf` file, a hub id, or the built-in alias `smollm2-135m`.
        config: The settings; see :class:`EngineConfig`.
        options: Single settings by name, in place of those of `config`.

    Raises:
        ModelError: The model is not found, damaged, or of an architecture that is not supported.
        InvalidRequest: A setting is unknown or out of range, or the pool would not hold one block.
    """

    def __init__(
        self, model: str | Path = "smollm2-135m", config: EngineConfig | None = None, **options: Any
    ) -> None:
        self.config = (config or EngineConfig()).replace(**options)
        loaded = load_model(
            resolve_model(model).path,
            dtype=DTYPES[self.config.dtype],
            deterministic=self.config.deterministic,
        )
        if self.config.deterministic:
            _warn_if_not_exact(loaded.dtype, self.config.num_threads)
        store = _make_store(loaded, self.config)
        self.model = loaded.config
        self.tokenizer = loaded.tokenizer
        self.max_model_len = _max_model_len(loaded.config.max_position, store, self.config)
        self._identity = Namespace(model=loaded.fingerprint, kv_dtype=str(store.dtype).removeprefix("torch."))
        self._request_numbers = itertools.count(1)
        self._loop = EngineLoop(
            _make_scheduler(store, self.config),
            _make_runner(loaded, store, self.config),
            num_threads=self.config.num_threads,
        )

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        namespace: Namespace | None = None,
        progress: bool = False,
    ) -> list[Completion]:
        """Complete one prompt or many, and wait for all of them.

        Args:
            prompts: Text, token ids or chat messages, or a sequence of these.
            params: For all, or one per prompt.
            namespace: Its `salt` and `adapter` keep the cache of these prompts apart; the rest is set by the engine.
            progress: Show a progress bar on a terminal.

        Returns:
            The completions, in the order of the prompts.

        Raises:
            InvalidRequest: A prompt or parameter is wrong; nothing has been started then. The message names it.
            StepFailed: The model failed while it computed one of them; the others have been aborted.
        """
        requests = self._requests(prompts, params, namespace)
        generations = [self._start(request) for request in requests]
        try:
            return [generation.result() for generation in track(generations, "Generating", show=progress)]
        finally:
            # After an error, or a keyboard interrupt, the rest is of no use; for finished ones this does nothing.
            for generation in generations:
                generation.abort()

    def stream(
        self, prompt: Prompt, params: SamplingParams | None = None, *, namespace: Namespace | None = None
    ) -> Generation:
        """Complete one prompt piece by piece; iterate over the result, or leave its `with` block to abort.

        Raises:
            InvalidRequest: The prompt or a parameter is wrong.
        """
        return self._start(self._request(prompt, params, namespace))

    async def agenerate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        namespace: Namespace | None = None,
    ) -> list[Completion]:
        """Do as `generate`, for an event loop. Cancelling it aborts the requests."""
        requests = self._requests(prompts, params, namespace)
        generations = [self._start_async(request) for request in requests]
        try:
            return list(await asyncio.gather(*(generation.result() for generation in generations)))
        finally:
            for generation in generations:
                generation.abort()

    async def astream(
        self, prompt: Prompt, params: SamplingParams | None = None, *, namespace: Namespace | None = None
    ) -> AsyncIterator[Chunk]:
        """Do as `stream`, for an event loop. Closing the iterator aborts the request."""
        async with self._start_async(self._request(prompt, params, namespace)) as generation:
            async for chunk in generation:
                yield chunk

    def abort(self, request_id: str) -> None:
        """End a request in whatever phase it is; its completion says "abort". Unknown or finished ids are ignored."""
        self._loop.abort(request_id)

    def stats(self) -> EngineStats:
        """Return counters since the start, and the state of the pool and the queues, as of between two steps."""
        return self._loop.call(self._loop.stats).result()

    def check(self) -> None:
        """Prove every invariant of the tree and the pool. O(size of the tree); for tests and doubts.

        Raises:
            InvariantError: One does not hold: a bug of phloem's own.
        """
        self._loop.call(self._loop.scheduler.paths.cache.check).result()

    def clear_cache(self) -> None:
        """Forget every cached prefix. Requests under way keep what they use until they end."""
        self._loop.call(self._loop.scheduler.paths.cache.clear).result()

    def close(self) -> None:
        """End what runs, with :class:`EngineClosed`, and the engine's thread. May be called twice."""
        self._loop.close()

    def _requests(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None,
        namespace: Namespace | None,
    ) -> list[Request]:
        many = as_prompts(prompts)
        each = list(params) if isinstance(params, Sequence) else [params] * len(many)
        if len(each) != len(many):
            raise InvalidRequest(
                f"params has {len(each)} entries for {len(many)} prompts; pass one, or one per prompt"
            )
        return [
            self._request(
                prompt, of_prompt, namespace, name=f"prompts[{index}]" if len(many) > 1 else "prompt"
            )
            for index, (prompt, of_prompt) in enumerate(zip(many, each, strict=True))
        ]

    def _request(
        self,
        prompt: Prompt,
        params: SamplingParams | None,
        namespace: Namespace | None,
        *,
        name: str = "prompt",
    ) -> Request:
        params = SamplingParams() if params is None else params
        if not isinstance(params, SamplingParams):
            raise InvalidRequest(
                f"params must be SamplingParams, not {type(params).__name__}", field="params"
            )
        tokens = encode(prompt, self.tokenizer, vocab_size=self.model.vocab_size, name=name)
        self._check_length(tokens, name)
        limit = self.max_model_len
        return Request(
            id=str(next(self._request_numbers)),
            path=TokenPath(self._namespace(namespace), tokens),
            params=params,
            seed=secrets.randbits(63) if params.seed is None else params.seed,
            max_len=limit if params.max_tokens is None else min(limit, len(tokens) + params.max_tokens),
        )

    def _namespace(self, namespace: Namespace | None) -> Namespace:
        if namespace is None:
            return self._identity
        if not isinstance(namespace, Namespace):
            raise InvalidRequest(
                f"namespace must be a Namespace, not {type(namespace).__name__}", field="namespace"
            )
        return dataclasses.replace(self._identity, salt=namespace.salt, adapter=namespace.adapter)

    def _check_length(self, tokens: array[int], name: str) -> None:
        if len(tokens) < self.max_model_len:
            return
        is_pool = self.max_model_len < (self.config.max_model_len or self.model.max_position)
        advice = "raise num_blocks or kv_memory_bytes" if is_pool else "shorten it"
        limit = "the KV pool holds" if is_pool else "the context is"
        raise PromptTooLong(
            f"{name} has {len(tokens)} tokens; {limit} {self.max_model_len}, and at least one must be left for the answer: "
            f"{advice}",
            field=name,
        )

    def _start(self, request: Request) -> Generation:
        sink = QueueSink()
        self._submit(request, sink)
        return Generation(sink, Progress(request.id, self.abort))

    def _start_async(self, request: Request) -> AsyncGeneration:
        sink = AsyncSink()
        self._submit(request, sink)
        return AsyncGeneration(sink, Progress(request.id, self.abort))

    def _submit(self, request: Request, sink: Sink) -> None:
        self._loop.submit(OutputStream(request, sink, self.tokenizer))


def _warn_if_not_exact(dtype: torch.dtype, num_threads: int | None) -> None:
    report = _self_test(dtype, num_threads)
    if not report.holds:
        names = ", ".join(check.name for check in report.failures)
        logger.warning(
            "on this machine the bits of a result can depend on what else is computed with it (%s): answers from a warm cache "
            "may differ from cold ones in rare ties",
            names,
        )


@lru_cache
def _self_test(dtype: torch.dtype, num_threads: int | None) -> InvarianceReport:
    """Run the kernels' self-test: half a second, and a fact about the machine, so once per process."""
    return row_invariance_report(dtype, num_threads=num_threads)


def _make_store(loaded: LoadedModel, config: EngineConfig) -> PagedKVStore:
    model = loaded.config
    block_bytes = PagedKVStore.bytes_for_block(
        num_layers=model.num_layers,
        block_size=config.block_size,
        num_kv_heads=model.num_kv_heads,
        head_dim=model.head_dim,
        dtype=loaded.dtype,
    )
    return PagedKVStore(
        num_layers=model.num_layers,
        num_blocks=pool_size(config, block_bytes=block_bytes),
        block_size=config.block_size,
        num_kv_heads=model.num_kv_heads,
        head_dim=model.head_dim,
        dtype=loaded.dtype,
    )


def _make_scheduler(store: PagedKVStore, config: EngineConfig) -> Scheduler:
    cache = RadixCache(
        BlockPool(store.num_blocks), block_size=store.block_size, policy=config.eviction_policy
    )
    return Scheduler(
        PathCache(cache, prefix_cache=config.prefix_cache),
        max_running=config.max_running,
        max_step_tokens=config.max_step_tokens,
    )


def _make_runner(loaded: LoadedModel, store: PagedKVStore, config: EngineConfig) -> ModelRunner:
    model = loaded.config
    spec = AttentionSpec(
        num_q_heads=model.num_q_heads,
        num_kv_heads=model.num_kv_heads,
        head_dim=model.head_dim,
        num_layers=model.num_layers,
        logits_soft_cap=model.attn_logits_soft_cap,
        windows=model.windows,
    )
    attention = make_backend(config.backend, spec, store, num_threads=config.num_threads)
    return ModelRunner(loaded.decoder, store, attention, eos_ids=loaded.tokenizer.eos_token_ids)


def _max_model_len(max_position: int, store: PagedKVStore, config: EngineConfig) -> int:
    if config.max_model_len is not None and config.max_model_len > max_position:
        raise InvalidRequest(
            f"max_model_len={config.max_model_len} is beyond the model's context of {max_position}",
            field="max_model_len",
        )
    return min(config.max_model_len or max_position, store.num_blocks * store.block_size)
