"""What callers get back: completions, stream chunks, usage and statistics. Frozen: they cross threads."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from phloem.radix import CacheStats, Explanation

FinishReason = Literal["stop", "length", "abort"]


@dataclass(frozen=True, slots=True)
class Usage:
    """Where the tokens of one request came from. `prompt_tokens = cached_tokens + computed_tokens`."""

    prompt_tokens: int
    cached_tokens: int
    """Prompt tokens whose KV was there already, to the token (also inside a block)."""

    completion_tokens: int

    @property
    def computed_tokens(self) -> int:
        """Prompt tokens that had to be computed."""
        return self.prompt_tokens - self.cached_tokens


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """How likely a token was under the model, before temperature, penalties and filters."""

    token_id: int
    logprob: float
    """Natural logarithm of the probability."""

    top: tuple[tuple[int, float], ...] = ()
    """The likeliest tokens at this place, (id, logprob), likeliest first: as many as were asked for."""


@dataclass(frozen=True, slots=True)
class Completion:
    """A finished generation."""

    request_id: str
    text: str
    """Without special tokens and without the stop string."""

    token_ids: list[int]
    """Every token that was sampled, an end-of-sequence token included: what the tree holds KV for."""

    finish_reason: FinishReason
    usage: Usage
    first_token_s: float
    """From submission to the first token, in seconds; NaN when there was none."""

    total_s: float
    """From submission to the end, in seconds."""

    explanation: Explanation | None = None
    """What of the prompt was reused, and why the rest was not; None when the request never ran. See `phloem.runtime.explain.describe`."""

    logprobs: list[TokenLogprob] | None = None
    """Of `token_ids`; None when they were not asked for."""

    prompt_logprobs: list[TokenLogprob] | None = None
    """Of the prompt's tokens after the first, or after `prompt_logprobs_from`; None when they were not asked for."""

    fits_grammar: bool | None = None
    """Whether the text is complete under its grammar; False where something cut it off. None without a grammar."""

    candidate_logprobs: tuple[float, ...] = ()
    """What `Branch.next_token_logprobs` asked for."""

    stopped_by: str | int | None = None
    """The stop string, or the id of the token, at which it ended; None where something else ended it (a length, a grammar)."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """A piece of a streamed generation; the texts of all chunks together are the completion's text."""

    text: str
    token_ids: list[int]
    logprobs: list[TokenLogprob] | None = None
    """Of `token_ids`; None when they were not asked for."""

    completion: Completion | None = None
    """In the last chunk only."""

    usage: Usage | None = None
    """So far; None in chunks that no engine made."""


@dataclass(frozen=True, slots=True)
class EngineStats:
    """Counters since the engine started, and the state of its pool (in blocks) and queues now."""

    cache: CacheStats
    kept_tails: int
    """Partly filled blocks of finished paths, kept for prompts that begin alike; they count as private."""

    dropped_tails: int
    """Of these, how many had to make room."""

    running: int
    waiting: int
    steps: int
    computed_tokens: int
    """Tokens that went through the model, decodes included."""

    generated_tokens: int
    """Tokens that were sampled."""

    forced_tokens: int
    """Tokens that a grammar left no choice about, appended without a step of their own."""

    preemptions: int
    failed_steps: int
    scheduler_s: float
    """Seconds spent on choosing rows, allocating and committing: all of a step but the model and the output."""
