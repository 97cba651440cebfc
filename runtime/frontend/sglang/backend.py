"""The backend class: what SGLang's interpreter asks for, done with branches of an engine."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

from sglang.lang.backend.base_backend import BaseBackend
from sglang.lang.chat_template import ChatTemplate, chat_template_registry
from sglang.lang.choices import ChoicesDecision, ChoicesSamplingMethod
from sglang.lang.interpreter import StreamExecutor
from sglang.lang.ir import SglSamplingParams

from phloem.radix import Namespace
from phloem.runtime.branch import Branch
from phloem.runtime.engine import Engine
from phloem.runtime.errors import Cancelled, InvalidRequest
from phloem.runtime.frontend.program.calls import BLOCKING, finish
from phloem.runtime.frontend.program.choose import check_options
from phloem.runtime.frontend.program.generate import drop_end
from phloem.runtime.frontend.sglang.meta import (
    Entry,
    chunk_meta,
    completion_meta,
    entry,
    score_meta,
    usage_meta,
)
from phloem.runtime.frontend.sglang.options import Order, translate
from phloem.runtime.frontend.sglang.paths import Held, Paths
from phloem.runtime.frontend.sglang.template import template_of
from phloem.runtime.outputs import Chunk, Completion
from phloem.runtime.sampling_params import SamplingParams


class PhloemBackend(BaseBackend):  # type: ignore[misc]
    """Runs SGLang programs on an engine in this process.

    ::

        with Engine("smollm2-135m") as engine:
            sgl.set_default_backend(PhloemBackend(engine))
            state = question.run("What is a bee?")

    Each state is a branch: forks share its KV, what was generated or chosen is never encoded again, and `state.get_meta_info(name)` tells
    what was reused (`cached_tokens`). An ended state's memory can be evicted at once. The engine stays its owner's to close.

    SGLang reports an error of a `gen` as a warning, and in `state.error()`; `run(..., use_thread=False)` raises it.

    Args:
        engine: It does the work; many programs may use it at the same time.
        namespace: Keeps the cache of these programs apart.
        chat_template: For `s.user()` and its like: the name of one of SGLang's, or a template. None: the model's own.

    Raises:
        InvalidRequest: SGLang knows no chat template of this name.
    """

    is_chat_model = False
    """Text can be completed, so SGLang need not call for whole messages."""

    def __init__(
        self,
        engine: Engine,
        *,
        namespace: Namespace | None = None,
        chat_template: str | ChatTemplate | None = None,
    ) -> None:
        super().__init__()
        self.support_concate_and_append = True
        self.chat_template = _chosen_template(engine, chat_template)
        self._engine = engine
        self._namespace = namespace
        self._paths = Paths(engine, namespace)

    def get_model_name(self) -> str:
        """Return what kind of model it is."""
        return self._engine.model.architecture

    def get_server_info(self) -> dict[str, Any]:
        """Return `Engine.stats()` as plain data."""
        return asdict(self._engine.stats())

    def flush_cache(self) -> None:
        """Forget every cached prefix of the engine, of all namespaces."""
        self._engine.clear_cache()

    def cache_prefix(self, prefix_str: str) -> None:
        """Compute a text that many programs begin with. `run_batch` calls it."""
        self._engine.generate(prefix_str, SamplingParams(max_tokens=0), namespace=self._namespace)

    def commit_lazy_operations(self, s: StreamExecutor) -> None:
        """Compute the state's text, before it is forked."""
        if s.text_:
            with self._paths.following(s) as held:
                finish(held.path.compute(BLOCKING))

    def end_program(self, s: StreamExecutor) -> None:
        """Let the state's memory be evicted, when nothing runs on it any more. May be called often."""
        self._paths.end(s)

    def shutdown(self) -> None:
        """End all states. The engine goes on."""
        self._paths.end_all()

    def generate(
        self, s: StreamExecutor, sampling_params: SglSamplingParams
    ) -> tuple[str, dict[str, Any]] | tuple[list[str], list[dict[str, Any]]]:
        """Generate; return the text and what there is to tell, or lists of both for `n` above 1 (the state takes the first).

        Raises:
            InvalidRequest: An option is out of range, or none that phloem has.
            PromptTooLong: The state's text leaves no room for a token more.
        """
        with self._paths.following(s) as held:
            order = translate(sampling_params)
            if order.n > 1:
                completions = _expand(held, order)
                return [each.text for each in completions], [self._meta(each, order) for each in completions]
            *_, last = _stream(held, order)
            assert last.completion is not None
            return last.completion.text, self._meta(last.completion, order)

    def generate_stream(
        self, s: StreamExecutor, sampling_params: SglSamplingParams
    ) -> Iterator[tuple[str, dict[str, Any]]]:
        """Generate piece by piece; yield texts, and what there is to tell so far.

        Raises:
            InvalidRequest: As `generate`; or `n` is not 1.
        """
        with self._paths.following(s) as held:
            order = translate(sampling_params)
            if order.n != 1:
                raise InvalidRequest(f"a stream is of one text; n is {order.n}", field="n")
            for chunk in _stream(held, order):
                done = chunk.completion
                yield chunk.text, chunk_meta(chunk) if done is None else self._meta(done, order)

    def select(
        self,
        s: StreamExecutor,
        choices: list[str],
        temperature: float,
        choices_method: ChoicesSamplingMethod,
    ) -> ChoicesDecision:
        """Choose by the log-probabilities of the choices, each tokenised alone and scored in one batch; keep the winner's KV.

        Raises:
            InvalidRequest: There are no choices, two are equal, or the temperature is not 0.
        """
        tokenizer = self._engine.tokenizer
        with self._paths.following(s) as held:
            _check_choices(choices, temperature)
            encoded = [tokenizer.encode_continuation(choice) for choice in choices]
            scores = held.settled().score(encoded)
            alone = (
                [self._alone(ids) for ids in encoded]
                if choices_method.requires_unconditional_logprobs
                else None
            )
            decision = choices_method(
                choices=choices,
                normalized_prompt_logprobs=[score.mean for score in scores],
                input_token_logprobs=[score_meta(tokenizer, score) for score in scores],
                output_token_logprobs=[[] for _ in choices],
                unconditional_token_logprobs=alone,
            )
            if decision.decision in choices:
                held.path.append_scored(encoded[choices.index(decision.decision)])
                held.cover(decision.decision)
        decision.meta_info = {**(decision.meta_info or {}), **usage_meta(*(score.usage for score in scores))}
        return decision

    def concatenate_and_append(self, src_rids: Sequence[str], dst_rid: str) -> None:
        """Append what forks gained to their parent, by its tokens: the KV of the first one's is reused.

        What follows the first one is computed, since its tokens lie after other ones now.
        """
        executors = self._paths.find([dst_rid, *src_rids])
        if len(executors) <= len(src_rids) or not executors[1].fork_start_text_pos:
            return  # nothing was computed of one of them: the text is tokenised when it is needed
        parent, *forks = executors
        start: int = forks[0].fork_start_text_pos
        with self._paths.following(parent, parent.text_[:start]) as held:
            for fork in forks:
                with self._paths.following(fork) as gained:
                    held.take(gained, fork.text_[start:])

    def _meta(self, completion: Completion, order: Order) -> dict[str, Any]:
        return completion_meta(self._engine.tokenizer, completion, with_text=order.with_text)

    def _alone(self, ids: Sequence[int]) -> list[Entry]:
        """Return log-probabilities of a choice's tokens without any text before it, as SGLang computes them: nothing for the first."""
        tokenizer = self._engine.tokenizer
        first = entry(tokenizer, None, ids[0], with_text=True)
        if len(ids) == 1:
            return [first]
        with self._engine.branch(ids[:1], namespace=self._namespace) as branch:
            [score] = branch.score([ids[1:]])
        return [first, *score_meta(tokenizer, score)]


def _stream(held: Held, order: Order) -> Iterator[Chunk]:
    """Generate on a state's path, which follows when the last chunk has come."""
    with held.settled().stream(order.params) as generation:
        for chunk in generation:
            if chunk.completion is not None:
                held.path.follow(chunk.completion.token_ids)
                _take(held, chunk.completion)
            yield chunk


def _expand(held: Held, order: Order) -> list[Completion]:
    branches: list[Branch] = held.settled().expand(order.n, order.params)
    completions = [branch.completion for branch in branches if branch.completion is not None]
    held.path.follow(completions[0].token_ids, branches[0])
    for branch in branches[1:]:
        branch.release()
    _take(held, completions[0])
    return completions


def _take(held: Held, completion: Completion) -> None:
    drop_end(held.path, completion)
    if completion.finish_reason == "abort":
        raise Cancelled("the generation was ended from outside", partial=completion.text)
    held.cover(completion.text)


def _check_choices(choices: Sequence[str], temperature: float) -> None:
    check_options(choices, "mean")
    if temperature > 1e-5:
        raise InvalidRequest(
            f"select takes the best choice; temperature must be 0, not {temperature}", field="temperature"
        )


def _chosen_template(engine: Engine, wanted: str | ChatTemplate | None) -> ChatTemplate:
    if isinstance(wanted, str):
        if wanted not in chat_template_registry:
            raise InvalidRequest(
                f"SGLang has no chat template {wanted!r}; it has {', '.join(sorted(chat_template_registry))}",
                field="chat_template",
            )
        return chat_template_registry[wanted]
    return template_of(engine) if wanted is None else wanted
