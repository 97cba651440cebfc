"""From sampled tokens to what the caller sees: text, the end of it, usage."""

from __future__ import annotations

import math
import time

from phloem.runtime.detokenizer import IncrementalDetokenizer, StopChecker
from phloem.runtime.errors import Cancelled
from phloem.runtime.generation import Sink
from phloem.runtime.model_runner import RowResult
from phloem.runtime.outputs import Chunk, Completion, FinishReason, TokenLogprob, Usage
from phloem.runtime.request import Request
from phloem.runtime.tokenizer import Tokenizer


class OutputStream:
    """The output side of one request. Owned by the engine's loop; the scheduler's side is the `Request`."""

    def __init__(self, request: Request, sink: Sink, tokenizer: Tokenizer) -> None:
        """Make the output of a request."""
        self.request = request
        self.finish_reason: FinishReason | None = None
        self._asked_from = request.logits_from
        self._sink = sink
        self._detokenizer = IncrementalDetokenizer(tokenizer, context=request.tokens[-16:].tolist())
        self._num_hidden = len(request.params.heal)
        self._stops = StopChecker(request.params.stop)
        self._stop_ids = self._ending_ids(tokenizer)
        self._text: list[str] = []
        self._logprobs: list[TokenLogprob] = []
        self._prompt_logprobs: list[TokenLogprob] = []
        self._candidate_logprobs: tuple[float, ...] = ()
        self._stopped_by: str | int | None = None
        self._last: Chunk | None = None
        """The end, until the scheduler has ended the request: who has seen it may use the path at once."""

        self._submitted_s = time.perf_counter()
        self._first_token_s = math.nan

    def take(self, result: RowResult) -> None:
        """Take what a step found for this request; a token it sampled is in the request's path by now."""
        if result.scored:
            self._prompt_logprobs += result.scored
            # Not again, should the request be preempted and resume.
            self.request.logits_from = result.row.scored.stop
        self._candidate_logprobs = self._candidate_logprobs or result.candidates
        if result.token_id is not None:
            self._push(result.token_id, result.sampled)

    def forced_ids(self) -> list[int]:
        """Return the tokens that the grammar leaves no choice about; none where their log-probabilities were asked for."""
        request = self.request
        if (
            request.constraint is None
            or self.finish_reason is not None
            or request.params.logprobs is not None
        ):
            return []
        return request.constraint.forced_ids(max_tokens=request.max_len - len(request.tokens))

    def take_forced(self, token_id: int) -> None:
        """Take a forced token, which is in the request's path by now."""
        self._push(token_id, None)

    def _push(self, token_id: int, logprob: TokenLogprob | None) -> None:
        if math.isnan(self._first_token_s):
            self._first_token_s = time.perf_counter() - self._submitted_s
        request = self.request
        num_output = len(request.tokens) - request.num_prompt_tokens
        text = ""
        if request.constraint is not None:
            request.constraint.advance(token_id)
        if num_output >= request.params.min_tokens and token_id in self._stop_ids:
            self.finish_reason = "stop"
            self._stopped_by = token_id
        else:
            text = self._next_text(token_id, may_stop=num_output >= request.params.min_tokens)
        if self.finish_reason is None and request.constraint is not None and request.constraint.is_finished:
            self.finish_reason = "stop"
        if self.finish_reason is None and len(request.tokens) >= request.max_len:
            self.finish_reason = "length"
        logprobs = None if logprob is None or request.params.logprobs is None else [logprob]
        self._logprobs += logprobs or []
        if self.finish_reason is None:
            self._sink.put(self._chunk(text, [token_id], logprobs))
        else:
            self._last = self._last_chunk(text, [token_id], logprobs)

    def close(self) -> None:
        """Hand out the end of an output that has ended with a token. Call it once the scheduler has ended the request."""
        assert self._last is not None
        self._sink.put(self._last)

    def complete(self) -> None:
        """End the output of a request that was to compute its path and sample nothing."""
        self.finish_reason = "length"
        self._sink.put(self._last_chunk("", []))

    def abort(self) -> None:
        """End the output here, keeping what there is."""
        self.finish_reason = "abort"
        self._sink.put(self._last_chunk("", []))

    def expire(self) -> None:
        """End with the error of a deadline that has passed; it carries what there is."""
        self.finish_reason = "abort"
        partial = self._complete("")
        self._sink.put(Cancelled(f"the deadline passed after {partial.total_s:.2f} s", partial=partial))

    def fail(self, error: Exception) -> None:
        """End with an error."""
        self._sink.put(error)

    def _ending_ids(self, tokenizer: Tokenizer) -> frozenset[int]:
        params = self.request.params
        eos_ids = () if params.ignore_eos else tokenizer.eos_token_ids
        return frozenset((*eos_ids, *params.stop_token_ids))

    def _next_text(self, token_id: int, *, may_stop: bool) -> str:
        delta = self._shown(self._detokenizer.push(token_id))
        if not may_stop:
            # Text before min_tokens can neither be a stop string nor begin one.
            return delta
        text = self._stops.push(delta)
        if self._stops.matched is not None:
            self.finish_reason, self._stopped_by = "stop", self._stops.matched
        return text

    def _shown(self, delta: str) -> str:
        """Return what of a delta lies behind the prompt's text that the output repeats."""
        shown = delta[self._num_hidden :]
        self._num_hidden -= len(delta) - len(shown)
        return shown

    def _last_chunk(
        self, text: str, token_ids: list[int], logprobs: list[TokenLogprob] | None = None
    ) -> Chunk:
        if self._stops.matched is None:
            text += self._stops.push(self._shown(self._detokenizer.flush()))
            if self._stops.matched is not None:
                self.finish_reason, self._stopped_by = "stop", self._stops.matched
            else:
                text += self._stops.flush()
        return self._chunk(text, token_ids, logprobs, self._complete(text))

    def _chunk(
        self,
        text: str,
        token_ids: list[int],
        logprobs: list[TokenLogprob] | None,
        completion: Completion | None = None,
    ) -> Chunk:
        self._text.append(text)
        usage = self._usage() if completion is None else completion.usage
        return Chunk(text, token_ids, logprobs, completion, usage)

    def _usage(self) -> Usage:
        request = self.request
        return Usage(
            prompt_tokens=request.num_prompt_tokens,
            cached_tokens=request.cached_tokens or 0,
            completion_tokens=len(request.tokens) - request.num_prompt_tokens,
        )

    def _complete(self, last_text: str) -> Completion:
        request = self.request
        assert self.finish_reason is not None
        return Completion(
            request_id=request.id,
            text="".join(self._text) + last_text,
            token_ids=request.output_ids,
            finish_reason=self.finish_reason,
            usage=self._usage(),
            first_token_s=self._first_token_s,
            total_s=time.perf_counter() - self._submitted_s,
            explanation=request.explanation,
            logprobs=None if request.params.logprobs is None else self._logprobs,
            prompt_logprobs=None if self._asked_from is None else self._prompt_logprobs,
            fits_grammar=self._fits_grammar(),
            candidate_logprobs=self._candidate_logprobs,
            stopped_by=self._stopped_by,
        )

    def _fits_grammar(self) -> bool | None:
        constraint = self.request.constraint
        if constraint is None or self.request.params.grammar is None:
            return None
        return constraint.is_finished or constraint.may_end
