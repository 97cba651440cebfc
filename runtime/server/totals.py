"""What the server has done since it started, counted as generations end. Used by the event loop."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from phloem.radix import Explanation
from phloem.runtime.outputs import Completion, Usage

UNEXPLAINED = "unexplained"
"""The reason of misses of prompts with several completions, whose shared part is not explained."""


@dataclass(slots=True)
class Totals:
    """Counters. A prompt counts once, however many completions it has."""

    prompts: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    generated_tokens: int = 0
    finished: Counter[str] = field(default_factory=Counter)
    """Generations, by the reason of their end."""

    missed_tokens: Counter[str] = field(default_factory=Counter)
    """Prompt tokens that were computed, by the reason why."""

    listeners: list[Callable[[Completion, bool], None]] = field(default_factory=list)
    """Are told each generation that has ended, and whether it is the first of its prompt, in its request's context."""

    def count(self, completion: Completion, *, is_first: bool) -> None:
        """Count a generation that has ended; `is_first` tells whether it is the first of its prompt."""
        self.finished[completion.finish_reason] += 1
        self.generated_tokens += completion.usage.completion_tokens
        if is_first:
            self.count_prompt(completion.usage, completion.explanation)
        for listener in self.listeners:
            listener(completion, is_first)

    def count_prompt(self, usage: Usage, explanation: Explanation | None = None) -> None:
        """Count a prompt that was computed, be it to generate or to score."""
        self.prompts += 1
        self.prompt_tokens += usage.prompt_tokens
        self.cached_tokens += usage.cached_tokens
        num_missed = usage.computed_tokens
        if explanation is not None and explanation.cached_tokens == usage.cached_tokens:
            for miss in explanation.misses:
                self.missed_tokens[miss.reason.value] += miss.num_tokens
                num_missed -= miss.num_tokens
        if num_missed > 0:
            self.missed_tokens[UNEXPLAINED] += num_missed
