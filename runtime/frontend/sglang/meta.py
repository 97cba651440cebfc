"""What SGLang's states tell of a generation or a choice (`get_meta_info`), under the names of SGLang's server."""

from __future__ import annotations

from typing import Any, TypeAlias

from phloem.runtime.branch import Score
from phloem.runtime.outputs import Chunk, Completion, Usage
from phloem.runtime.tokenizer import Tokenizer

Entry: TypeAlias = "tuple[float | None, int, str | None]"
"""Log-probability (None where there is none), token id, and the token's text if it was asked for."""


def usage_meta(*usages: Usage) -> dict[str, Any]:
    """Return the sums of several requests."""
    return {
        "prompt_tokens": sum(usage.prompt_tokens for usage in usages),
        "cached_tokens": sum(usage.cached_tokens for usage in usages),
        "completion_tokens": sum(usage.completion_tokens for usage in usages),
    }


def chunk_meta(chunk: Chunk) -> dict[str, Any]:
    """Return what is known before the end."""
    return {**({} if chunk.usage is None else usage_meta(chunk.usage)), "finish_reason": None}


def completion_meta(tokenizer: Tokenizer, completion: Completion, *, with_text: bool) -> dict[str, Any]:
    """Return what is known at the end, with log-probabilities if they were asked for."""
    meta: dict[str, Any] = {
        "id": completion.request_id,
        **usage_meta(completion.usage),
        "finish_reason": {"type": completion.finish_reason},
        "e2e_latency": completion.total_s,
    }
    if completion.logprobs is not None:
        meta["output_token_logprobs"] = [
            entry(tokenizer, each.logprob, each.token_id, with_text=with_text) for each in completion.logprobs
        ]
        meta["output_top_logprobs"] = [
            [entry(tokenizer, logprob, token_id, with_text=with_text) for token_id, logprob in each.top]
            for each in completion.logprobs
        ]
    return meta


def score_meta(tokenizer: Tokenizer, score: Score) -> list[Entry]:
    """Return the log-probabilities of a continuation's tokens."""
    return [entry(tokenizer, each.logprob, each.token_id, with_text=True) for each in score.token_logprobs]


def entry(tokenizer: Tokenizer, logprob: float | None, token_id: int, *, with_text: bool) -> Entry:
    """Return one token's."""
    return logprob, token_id, tokenizer.decode([token_id], skip_special_tokens=False) if with_text else None
