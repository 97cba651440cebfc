"""What `Engine` and `Branch` share: one model's tokenizer, limits and loop, and the making of requests."""

from __future__ import annotations

import dataclasses
import itertools
import secrets
import time
import weakref
from array import array
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TypeVar

from phloem.radix import Namespace
from phloem.runtime.engine_loop import EngineLoop
from phloem.runtime.errors import InvalidRequest, PromptTooLong
from phloem.runtime.fan_out import Child
from phloem.runtime.generation import Sink
from phloem.runtime.grammar import Constraint, GrammarCompiler
from phloem.runtime.models.config import ModelConfig
from phloem.runtime.output import OutputStream
from phloem.runtime.path import Path
from phloem.runtime.path_cache import PathCache
from phloem.runtime.request import Cohort, Request
from phloem.runtime.sampling_params import SamplingParams
from phloem.runtime.sandbox import Sandbox
from phloem.runtime.tokenizer import Tokenizer

MAX_FORKS = 100_000
MAX_TIMEOUT_S = 1_000_000_000

Value = TypeVar("Value")


@dataclass(frozen=True)
class EngineCore:
    """A running engine without its face. May be used from any thread. When the last reference goes, the loop ends."""

    model: ModelConfig
    tokenizer: Tokenizer
    loop: EngineLoop
    identity: Namespace
    """Namespace of this model's KV, without a caller's salt and adapter."""

    max_model_len: int
    """Longest path, in tokens."""

    grammars: GrammarCompiler
    length_advice: str
    """What to change when a path is longer than that."""

    sandbox: Sandbox | None = None
    """Where grammars and templates are tried; None if they are trusted."""

    _request_numbers: itertools.count[int] = field(default_factory=lambda: itertools.count(1))

    def __post_init__(self) -> None:
        weakref.finalize(self, self.loop.close_soon).atexit = False

    def close(self) -> None:
        """End what runs, with `EngineClosed`, and the engine's thread. May be called twice."""
        self.loop.close()
        if self.sandbox is not None:
            self.sandbox.close()

    def abort(self, request_id: str) -> None:
        """End a request in whatever phase it is. Unknown and finished ids are ignored.

        Raises:
            InvalidRequest: It is no string.
        """
        if not isinstance(request_id, str):
            raise InvalidRequest(f"request_id must be a string, not {request_id!r}", field="request_id")
        self.loop.abort(request_id)

    @property
    def paths(self) -> PathCache:
        """Only for functions that run in the engine's thread: see `call`."""
        return self.loop.scheduler.paths

    def call(self, function: Callable[[], Value]) -> Future[Value]:
        """Run a function in the engine's thread, between two steps.

        Raises:
            EngineClosed: The engine was closed.
        """
        return self.loop.call(function)

    def next_request_id(self) -> str:
        """Return an id that no other request of this engine has."""
        return str(next(self._request_numbers))

    def namespace(self, namespace: Namespace | None) -> Namespace:
        """Return where the KV of a caller's namespace is kept.

        Raises:
            InvalidRequest: It is no Namespace.
        """
        if namespace is None:
            return self.identity
        if not isinstance(namespace, Namespace):
            raise InvalidRequest(
                f"namespace must be a Namespace, not {type(namespace).__name__}", field="namespace"
            )
        return dataclasses.replace(self.identity, salt=namespace.salt, adapter=namespace.adapter)

    def check_length(self, num_tokens: int, *, new_tokens: int, name: str) -> None:
        """Check that a path and what is to come fit.

        Raises:
            PromptTooLong: They do not.
        """
        if num_tokens + new_tokens <= self.max_model_len:
            return
        room = ", and at least one must be left for the answer" if new_tokens else ""
        raise PromptTooLong(
            f"{name} has {num_tokens} tokens; {self.length_advice.format(limit=self.max_model_len, room=room)}",
            field=name,
        )

    def new_path(self, tokens: array[int], namespace: Namespace | None, *, name: str) -> Path:
        """Make a path of checked tokens.

        Raises:
            PromptTooLong: It leaves no room for a token more.
            InvalidRequest: The namespace is none.
        """
        self.check_length(len(tokens), new_tokens=1, name=name)
        return Path(self.namespace(namespace), tokens)

    def checked(self, params: SamplingParams | None) -> SamplingParams:
        """Return parameters that this model can serve; None are the defaults.

        Raises:
            InvalidRequest: They are none, or name token ids that the model does not have.
            GrammarError: The grammar is unsound, unsupported, or nothing satisfies it.
        """
        params = SamplingParams() if params is None else params
        if not isinstance(params, SamplingParams):
            raise InvalidRequest(
                f"params must be SamplingParams, not {type(params).__name__}", field="params"
            )
        self.constraint(params)
        for name, ids in (("logit_bias", params.logit_bias), ("stop_token_ids", params.stop_token_ids)):
            for token_id in ids:
                if token_id >= self.model.vocab_size:
                    raise InvalidRequest(
                        f"{name} names token {token_id}; this model's token ids go from 0 to {self.model.vocab_size - 1}",
                        field=name,
                    )
        return params

    def children(
        self,
        path_len: int,
        params: SamplingParams,
        sinks: Sequence[Sink],
        *,
        keeps_path: bool = False,
        timeout_s: float | None = None,
        first: int = 0,
    ) -> list[Child]:
        """Make children that generate from the end of a path of `path_len` tokens, each with its own draws.

        Child i draws as child `first + i`.
        """
        seed = self.seed_of(params)
        room = self.max_model_len - path_len
        return [
            Child(
                request_id=self.next_request_id(),
                params=params,
                seed=seed,
                index=index,
                sink=sink,
                max_new_tokens=room if params.max_tokens is None else min(room, params.max_tokens),
                max_len=self.max_model_len,
                constraint=self.constraint(params),
                keeps_path=keeps_path,
                deadline_s=deadline(timeout_s),
            )
            for index, sink in enumerate(sinks, start=first)
        ]

    def request(
        self,
        path: Path,
        params: SamplingParams,
        *,
        keeps_path: bool = False,
        timeout_s: float | None = None,
        cohort: Cohort | None = None,
    ) -> Request:
        """Make a request that generates on a path."""
        limit = self.max_model_len
        return Request(
            id=self.next_request_id(),
            path=path,
            params=params,
            seed=self.seed_of(params),
            max_len=limit if params.max_tokens is None else min(limit, len(path.tokens) + params.max_tokens),
            logits_from=None if params.prompt_logprobs is None else params.prompt_logprobs_from,
            constraint=self.constraint(params),
            keeps_path=keeps_path,
            deadline_s=deadline(timeout_s),
            cohort=cohort,
        )

    def constraint(self, params: SamplingParams) -> Constraint | None:
        """Return a fresh constraint for one generation; compiled once per grammar.

        Raises:
            GrammarError: The grammar is unsound, unsupported, or nothing satisfies it.
        """
        if params.grammar is None and not params.heal:
            return None
        return self.grammars.compile(params.grammar, after=params.heal)

    async def prepare(self, params: SamplingParams | None) -> None:
        """Compile the grammar of parameters, if there is one, without holding up an event loop.

        Raises:
            GrammarError: As `constraint`.
            QueueFull: Other grammars before it took too long.
        """
        if isinstance(params, SamplingParams) and (params.grammar is not None or params.heal):
            await self.grammars.prepare(params.grammar, after=params.heal)

    def submit(self, request: Request, sink: Sink) -> None:
        """Queue a request.

        Raises:
            EngineClosed: The engine was closed.
        """
        self.loop.submit(OutputStream(request, sink, self.tokenizer))

    def drop(self, children: Iterable[Child]) -> None:
        """Abort children that nobody waits for any more, and give back their paths. Does not wait."""
        self.loop.drop(list(children))

    def seed_of(self, params: SamplingParams) -> int:
        """Return the seed that was asked for, or a random one."""
        return secrets.randbits(63) if params.seed is None else params.seed


def deadline(timeout_s: float | None) -> float | None:
    """Return when a timeout that begins now ends, on `time.monotonic`'s clock.

    Raises:
        InvalidRequest: It is not above 0.
    """
    if timeout_s is None:
        return None
    number = isinstance(timeout_s, (int, float)) and not isinstance(timeout_s, bool)
    if not number or not 0 < timeout_s <= MAX_TIMEOUT_S:
        raise InvalidRequest(
            f"timeout_s must be a number above 0 and at most {MAX_TIMEOUT_S:,}, not {timeout_s!r}",
            field="timeout_s",
        )
    return time.monotonic() + timeout_s


def check_count(name: str, value: object) -> None:
    """Check a number of branches.

    Raises:
        InvalidRequest: It is not a whole number from 1 to 100,000.
    """
    good = isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= MAX_FORKS
    if not good:
        raise InvalidRequest(
            f"{name} must be a whole number from 1 to {MAX_FORKS:,}, not {value!r}", field=name
        )


def check_expansion(core: EngineCore, n: object, params: SamplingParams | None) -> SamplingParams:
    """Check the arguments of `expand`.

    Raises:
        InvalidRequest: One is wrong.
    """
    check_count("n", n)
    params = core.checked(params)
    if params.n != 1:
        raise InvalidRequest("expand takes the number of children by itself; leave params.n at 1", field="n")
    if params.prompt_logprobs is not None:
        raise InvalidRequest(
            "expand gives no prompt_logprobs; use score, or generate", field="prompt_logprobs"
        )
    return params
