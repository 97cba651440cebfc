"""The engine: a model, its KV blocks in a radix tree, and a thread that runs requests over them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from phloem.radix import Explanation, Namespace
from phloem.runtime.assembly import Assembler, Toolkit, fused_ops, warn_if_not_exact
from phloem.runtime.branch import Branch, branch_from_dict
from phloem.runtime.config import EngineConfig
from phloem.runtime.engine_core import EngineCore, deadline
from phloem.runtime.engine_loop import EngineLoop
from phloem.runtime.errors import InvalidRequest
from phloem.runtime.expand import Expansion, aexpand, expand
from phloem.runtime.generation import AsyncGeneration, AsyncSink, Generation, Progress, QueueSink
from phloem.runtime.grammar import GrammarCompiler
from phloem.runtime.models.config import ModelConfig, read_model_config
from phloem.runtime.models.loading import load_model
from phloem.runtime.models.resolve import resolve_model
from phloem.runtime.outputs import Chunk, Completion, EngineStats
from phloem.runtime.path import Path as TokenPath
from phloem.runtime.placement import place
from phloem.runtime.progress import track
from phloem.runtime.prompts import Prompt, as_prompts, encode, is_quick
from phloem.runtime.request import Cohort
from phloem.runtime.sampling_params import SamplingParams

if TYPE_CHECKING:
    from phloem.runtime.frontend.session import Session, Toolbox

AnySink = TypeVar("AnySink", QueueSink, AsyncSink)
Handle = TypeVar("Handle", Generation, AsyncGeneration)


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
        if config is not None and not isinstance(config, EngineConfig):
            raise InvalidRequest(
                f"config must be an EngineConfig, not {type(config).__name__}", field="config"
            )
        self.config = (config or EngineConfig()).replace(**options)
        self._core = _build(model, self.config)
        self.model = self._core.model
        self.tokenizer = self._core.tokenizer
        self.max_model_len = self._core.max_model_len

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
        timeout_s: float | None = None,
        progress: bool = False,
    ) -> list[Completion]:
        """Complete one prompt or many, and wait for all of them.

        Args:
            prompts: Text, token ids or chat messages, or a sequence of these.
            params: For all, or one per prompt. With `n` above 1, each prompt gives n completions, one after the other.
            namespace: Its `salt` and `adapter` keep the cache of these prompts apart; the rest is set by the engine.
            timeout_s: Give up after so many seconds.
            progress: Show a progress bar on a terminal.

        Returns:
            The completions, in the order of the prompts.

        Raises:
            InvalidRequest: A prompt or parameter is wrong; nothing has been started then. The message names it.
            Cancelled: The time is up; `partial` is what there was of the first that did not end.
            StepFailed: The model failed while it computed one of them; the others have been aborted.
        """
        jobs = self._jobs(prompts, params, namespace, timeout_s)
        generations = self._start_all(jobs, QueueSink, Generation)
        try:
            return [generation.result() for generation in track(generations, "Generating", show=progress)]
        finally:
            # After an error, or a keyboard interrupt, the rest is of no use; for finished ones this does nothing.
            for generation in generations:
                generation.abort()

    def stream(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        namespace: Namespace | None = None,
        timeout_s: float | None = None,
    ) -> Generation:
        """Complete one prompt piece by piece; iterate over the result, or leave its `with` block to abort.

        Raises:
            InvalidRequest: The prompt or a parameter is wrong, or `n` is not 1.
        """
        job = self._job(prompt, params, namespace, timeout_s)
        _require_single(job.params)
        [generation] = self._start_all([job], QueueSink, Generation)
        return generation

    async def agenerate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        namespace: Namespace | None = None,
        timeout_s: float | None = None,
    ) -> list[Completion]:
        """Do as `generate`, for an event loop. Cancelling it aborts the requests."""
        await self._prepare(params)
        jobs = self._jobs(prompts, params, namespace, timeout_s)
        generations = self._start_all(jobs, AsyncSink, AsyncGeneration)
        try:
            return list(await asyncio.gather(*(generation.result() for generation in generations)))
        finally:
            for generation in generations:
                generation.abort()

    async def astream(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        namespace: Namespace | None = None,
        timeout_s: float | None = None,
    ) -> AsyncGenerator[Chunk, None]:
        """Do as `stream`, for an event loop. Closing the iterator aborts the request."""
        await self._prepare(params)
        job = self._job(prompt, params, namespace, timeout_s)
        _require_single(job.params)
        [generation] = self._start_all([job], AsyncSink, AsyncGeneration)
        async with generation:
            async for chunk in generation:
                yield chunk

    async def asubmit(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        namespace: Namespace | None = None,
        timeout_s: float | None = None,
    ) -> list[AsyncGeneration]:
        """Start as `agenerate` does, and return the generations under way, n for each prompt.

        Compiling, and encoding but of short prompts, happen in a thread of their own.
        """
        await self._prepare(params)
        if is_quick(prompts):
            jobs = self._jobs(prompts, params, namespace, timeout_s)
        else:
            jobs = await asyncio.to_thread(self._jobs, prompts, params, namespace, timeout_s)
        return self._start_all(jobs, AsyncSink, AsyncGeneration)

    def branch(self, prompt: Prompt, *, namespace: Namespace | None = None) -> Branch:
        """Return a live handle on a path; nothing is computed until it is used.

        Raises:
            InvalidRequest: The prompt is empty, too long, or of a wrong type.
        """
        core = self._core
        tokens = encode(prompt, core.tokenizer, vocab_size=core.model.vocab_size)
        return Branch(core, core.new_path(tokens, namespace, name="prompt"))

    def branch_from_dict(self, state: Mapping[str, Any]) -> Branch:
        """Return the branch that `Branch.to_dict` described. Its KV comes from the cache, or is computed when needed.

        Raises:
            InvalidRequest: The description is not one of these.
        """
        return branch_from_dict(self._core, state)

    def session(
        self,
        *,
        system: str | None = None,
        tools: Toolbox | Sequence[Callable[..., Any]] = (),
        pin_ttl: float | None = None,
        **options: Any,
    ) -> Session:
        """Open a chat session, whose next turn computes its new words only.

        Args:
            system: The system message.
            tools: Python functions that the model may call, or a `Toolbox`.
            pin_ttl: Keep the conversation from eviction for so many seconds after its last use.
            options: More fields of `phloem.runtime.frontend.session.SessionConfig`.

        Raises:
            InvalidRequest: An option is wrong, or the model's chat template does not take it.
        """
        # The one step up the floors: a door to the frontend, which a user looks for here.
        from phloem.runtime.frontend.session import Session, SessionConfig

        return Session(self, SessionConfig(system=system, tools=tools, pin_ttl=pin_ttl, **options))

    def expand_many(
        self, branches: Sequence[Branch], n: int, params: SamplingParams | None = None
    ) -> Iterator[Branch]:
        """Generate n children from each branch; yield each child, with its `completion`, as soon as it is done.

        Leaving the loop early aborts and releases the rest.

        Raises:
            InvalidRequest: `n`, a parameter, a branch or its length is wrong; nothing has been started then.
            PhloemError: A child failed; the others have been aborted and released.
        """
        return expand(self._core, branches, n, params)

    def aexpand_many(
        self, branches: Sequence[Branch], n: int, params: SamplingParams | None = None
    ) -> AsyncIterator[Branch]:
        """Do as `expand_many`, for an event loop. Closing the iterator aborts and releases the rest."""
        return aexpand(self._core, branches, n, params)

    def expansion(self) -> Expansion:
        """Return an empty expansion: as `expand_many`, but more can be added while children are under way."""
        return Expansion(self._core)

    def explain(self, prompt: Prompt, *, namespace: Namespace | None = None) -> Explanation:
        """Tell how much of a prompt would come from the cache, and why the rest would not. Runs and changes nothing.

        `describe` of `phloem.runtime.explain` puts it into words.

        Raises:
            InvalidRequest: The prompt is empty, too long, or of a wrong type.
        """
        return self._explain(self._job(prompt, None, namespace, None).path).result()

    async def aexplain(self, prompt: Prompt, *, namespace: Namespace | None = None) -> Explanation:
        """Do as `explain`, for an event loop; a prompt is encoded in a thread."""
        job = await asyncio.to_thread(self._job, prompt, None, namespace, None)
        return await asyncio.wrap_future(self._explain(job.path))

    def abort(self, request_id: str) -> None:
        """End a request in whatever phase it is; its completion says "abort". Unknown or finished ids are ignored."""
        self._core.abort(request_id)

    def stats(self) -> EngineStats:
        """Return counters since the start, and the state of the pool and the queues, as of between two steps."""
        return self._core.call(self._core.loop.stats).result()

    def check(self) -> None:
        """Prove every invariant of the tree and the pool. O(size of the tree); for tests and doubts.

        Raises:
            InvariantError: One does not hold: a bug of phloem's own.
        """
        self._core.call(lambda: self._core.paths.check()).result()

    def clear_cache(self) -> None:
        """Forget every cached prefix. Requests under way keep what they use until they end."""
        self._core.call(self._core.paths.clear).result()

    @property
    def is_closed(self) -> bool:
        """Whether it was closed, or its thread has ended on an error of phloem's own."""
        return self._core.loop.is_closed

    def close(self) -> None:
        """End what runs, with :class:`EngineClosed`, and the engine's thread. May be called twice."""
        self._core.close()

    async def _prepare(self, params: SamplingParams | Sequence[SamplingParams] | None) -> None:
        for each in params if isinstance(params, Sequence) else (params,):
            await self._core.prepare(each)

    def _explain(self, path: TokenPath) -> Future[Explanation]:
        return self._core.call(lambda: self._core.paths.explain(path, reusable=len(path.tokens) - 1))

    def _jobs(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None,
        namespace: Namespace | None,
        timeout_s: float | None,
    ) -> list[_Job]:
        many = as_prompts(prompts)
        each = list(params) if isinstance(params, Sequence) else [params] * len(many)
        if len(each) != len(many):
            raise InvalidRequest(
                f"params has {len(each)} entries for {len(many)} prompts; pass one, or one per prompt"
            )
        return [
            self._job(
                prompt,
                of_prompt,
                namespace,
                timeout_s,
                name=f"prompts[{index}]" if len(many) > 1 else "prompt",
            )
            for index, (prompt, of_prompt) in enumerate(zip(many, each, strict=True))
        ]

    def _job(
        self,
        prompt: Prompt,
        params: SamplingParams | None,
        namespace: Namespace | None,
        timeout_s: float | None,
        *,
        name: str = "prompt",
    ) -> _Job:
        core = self._core
        tokens = encode(prompt, core.tokenizer, vocab_size=core.model.vocab_size, name=name)
        deadline(timeout_s)
        return _Job(core.new_path(tokens, namespace, name=name), core.checked(params), timeout_s)

    def _start_all(
        self,
        jobs: Sequence[_Job],
        make_sink: Callable[[], AnySink],
        make: Callable[[AnySink, Progress], Handle],
    ) -> list[Handle]:
        """Submit all jobs, in the order of a walk through the tree of their prompts; return handles in the given order.

        Depth first, each prompt comes right after those that it shares most with: a small pool computes shared parts once.
        """
        cohort = Cohort() if len(jobs) > 1 else None
        handles: list[list[Handle]] = [[] for _ in jobs]
        for index in sorted(range(len(jobs)), key=lambda index: jobs[index].path.tokens.tolist()):
            handles[index] = [
                make(sink, Progress(request_id, self.abort))
                for request_id, sink in self._start(jobs[index], make_sink, cohort)
            ]
        return [handle for of_job in handles for handle in of_job]

    def _start(
        self, job: _Job, make_sink: Callable[[], AnySink], cohort: Cohort | None
    ) -> list[tuple[str, AnySink]]:
        core, params = self._core, job.params
        if params.n == 1:
            sink = make_sink()
            request = core.request(job.path, params, timeout_s=job.timeout_s, cohort=cohort)
            core.submit(request, sink)
            return [(request.id, sink)]
        sinks = [make_sink() for _ in range(params.n)]
        children = core.children(len(job.path.tokens), params, sinks, timeout_s=job.timeout_s)
        core.loop.fan_out(job.path, children)
        return [(child.request_id, sink) for child, sink in zip(children, sinks, strict=True)]


@dataclass(frozen=True, slots=True)
class _Job:
    """A prompt that was checked."""

    path: TokenPath
    params: SamplingParams
    timeout_s: float | None


def _require_single(params: SamplingParams) -> None:
    if params.n != 1:
        raise InvalidRequest(
            f"a stream is of one completion; n is {params.n}, use generate or Branch.expand", field="n"
        )


def _build(name: str | Path, config: EngineConfig) -> EngineCore:
    """Load the model and start the loop."""
    directory = resolve_model(name).path
    model = read_model_config(directory)
    _check_max_model_len(model, config)
    placement = place(config, model)
    toolkit = Toolkit.for_gpu() if placement.backend == "flashinfer" else None
    loaded = load_model(
        directory,
        dtype=placement.dtype,
        deterministic=placement.deterministic,
        int8=config.quantization == "int8",
        max_position=config.max_model_len,
        device=placement.device,
        ops=fused_ops(toolkit),
    )
    warn_if_not_exact(placement, config.num_threads)
    return start(Assembler(loaded, config, placement, toolkit))


def start(parts: Assembler) -> EngineCore:
    """Put the parts together, and start the loop."""
    loaded, config = parts.loaded, parts.config
    store = parts.store()
    context = config.max_model_len or loaded.config.max_position
    limit = min(context, parts.num_pool_blocks(store) * store.block_size)
    sandbox = parts.sandbox()
    tokenizer = loaded.tokenizer if sandbox is None else loaded.tokenizer.with_renderer(sandbox.render)
    return EngineCore(
        model=loaded.config,
        tokenizer=tokenizer,
        loop=EngineLoop(
            parts.scheduler(store),
            parts.runner(store, max_len=limit),
            loaded.tokenizer,
            num_threads=config.num_threads,
            runs_ahead=parts.placement.backend == "flashinfer",
        ),
        identity=Namespace(model=loaded.fingerprint, kv_dtype=str(store.dtype).removeprefix("torch.")),
        max_model_len=limit,
        grammars=GrammarCompiler(tokenizer, loaded.config.vocab_size, sandbox=sandbox),
        sandbox=sandbox,
        length_advice="the KV pool holds {limit}{room}: raise num_blocks or kv_memory_bytes"
        if limit < context
        else "the context is {limit}{room}: shorten it",
    )


def _check_max_model_len(model: ModelConfig, config: EngineConfig) -> None:
    if config.max_model_len is not None and config.max_model_len > model.max_position:
        raise InvalidRequest(
            f"max_model_len={config.max_model_len} is beyond the model's context of {model.max_position}",
            field="max_model_len",
        )
