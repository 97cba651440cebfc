"""From sampled tokens to what the caller sees: text, the end of it, usage."""

from __future__ import annotations

import math
import time

from phloem.runtime.generation import Sink
from phloem.runtime.outputs import Chunk, Completion, FinishReason, Usage
from phloem.runtime.request import Request
from phloem.runtime.tokenizer import IncrementalDetokenizer, StopChecker, Tokenizer


class OutputStream:
    """The output side of one request. Owned by the engine's loop; the scheduler's side is the `Request`."""

    def __init__(self, request: Request, sink: Sink, tokenizer: Tokenizer) -> None:
        self.request = request
        self.finish_reason: FinishReason | None = None
        self._sink = sink
        self._detokenizer = IncrementalDetokenizer(tokenizer, context=request.tokens[-16:].tolist())
        self._stops = StopChecker(request.params.stop)
        self._stop_ids = self._ending_ids(tokenizer)
        self._text: list[str] = []
        self._submitted_s = time.perf_counter()
        self._first_token_s = math.nan

    def push(self, token_id: int) -> None:
        """Take the token that was just sampled (and is in the request's path), and pass its text on."""
        if math.isnan(self._first_token_s):
            self._first_token_s = time.perf_counter() - self._submitted_s
        request = self.request
        num_output = len(request.tokens) - request.num_prompt_tokens
        text = ""
        if num_output >= request.params.min_tokens and token_id in self._stop_ids:
            self.finish_reason = "stop"
        else:
            text = self._next_text(token_id, may_stop=num_output >= request.params.min_tokens)
        if self.finish_reason is None and len(request.tokens) >= request.max_len:
            self.finish_reason = "length"
        if self.finish_reason is None:
            self._emit(text, [token_id])
        else:
            self._end(text, [token_id])

    def complete(self) -> None:
        """End the output of a request that was to compute its path and sample nothing."""
        self.finish_reason = "length"
        self._end("", [])

    def abort(self) -> None:
        """End the output here, keeping what there is."""
        self.finish_reason = "abort"
        self._end("", [])

    def fail(self, error: Exception) -> None:
        """End with an error."""
        self._sink.put(error)

    def _ending_ids(self, tokenizer: Tokenizer) -> frozenset[int]:
        params = self.request.params
        eos_ids = () if params.ignore_eos else tokenizer.eos_token_ids
        return frozenset((*eos_ids, *params.stop_token_ids))

    def _next_text(self, token_id: int, *, may_stop: bool) -> str:
        delta = self._detokenizer.push(token_id)
        if not may_stop:
            # Text before min_tokens can neither be a stop string nor begin one.
            return delta
        text = self._stops.push(delta)
        if self._stops.matched is not None:
            self.finish_reason = "stop"
        return text

    def _end(self, text: str, token_ids: list[int]) -> None:
        if self._stops.matched is None:
            text += self._stops.push(self._detokenizer.flush())
            if self._stops.matched is not None:
                self.finish_reason = "stop"
            else:
                text += self._stops.flush()
        self._emit(text, token_ids, self._complete(text))

    def _emit(self, text: str, token_ids: list[int], completion: Completion | None = None) -> None:
        self._text.append(text)
        self._sink.put(Chunk(text, token_ids, completion))

    def _complete(self, last_text: str) -> Completion:
        request = self.request
        assert self.finish_reason is not None
        return Completion(
            request_id=request.id,
            text="".join(self._text) + last_text,
            token_ids=request.output_ids,
            finish_reason=self.finish_reason,
            usage=Usage(
                prompt_tokens=request.num_prompt_tokens,
                cached_tokens=request.cached_tokens,
                completion_tokens=len(request.tokens) - request.num_prompt_tokens,
            ),
            first_token_s=self._first_token_s,
            total_s=time.perf_counter() - self._submitted_s,
        )
