"""Why tokens were computed: explanations of the cache, completed with what paths hold themselves, and put into words."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

from phloem.radix import Explanation, Miss, MissReason

WORDS = {
    MissReason.NEVER_SEEN: "never seen before",
    MissReason.EVICTED: "evicted",
    MissReason.NAMESPACE: "cached in another namespace only",
    MissReason.LAST_TOKEN: "computed for their logits",
    MissReason.BYPASSED: "computed because the cache is off",
}


def with_known(explanation: Explanation, known_tokens: int, *, limit: int) -> Explanation:
    """Return an explanation in which more of the first tokens are known: those below `limit` are cached, the others must run."""
    cached = min(known_tokens, limit)
    if cached <= explanation.cached_tokens:
        return explanation
    last = (Miss(cached, known_tokens, MissReason.LAST_TOKEN),) if known_tokens > cached else ()
    misses = tuple(
        dataclasses.replace(miss, start=max(miss.start, known_tokens))
        for miss in explanation.misses
        if miss.end > known_tokens
    )
    return dataclasses.replace(explanation, cached_tokens=cached, misses=last + misses)


def of_first(explanation: Explanation, num_tokens: int) -> Explanation:
    """Return the part of an explanation that is about the first tokens."""
    if num_tokens >= explanation.num_tokens:
        return explanation
    misses = tuple(
        dataclasses.replace(miss, end=min(miss.end, num_tokens))
        for miss in explanation.misses
        if miss.start < num_tokens
    )
    return Explanation(num_tokens, min(explanation.cached_tokens, num_tokens), misses)


def describe(explanation: Explanation, decode: Callable[[Sequence[int]], str]) -> str:
    """Return the explanation as text, a line each for what is cached and for every miss.

    Args:
        explanation: Of a completion, a branch or `Engine.explain`.
        decode: The tokenizer's.
    """
    lines = [f"{explanation.cached_tokens} of {explanation.num_tokens} tokens cached"]
    lines += [f"{miss.num_tokens} {_reason(miss, decode)}" for miss in explanation.misses]
    return "\n".join(lines)


def _reason(miss: Miss, decode: Callable[[Sequence[int]], str]) -> str:
    if miss.reason is not MissReason.DIVERGED:
        return WORDS[miss.reason]
    here, there = (decode([token]) if token is not None else "" for token in (miss.token, miss.other_token))
    whom = f"request {miss.label}" if miss.label else "an earlier path"
    return f"diverged at token {miss.start} from {whom}: {here!r} here, {there!r} there"
