"""Which of several options a model favours, by one of four rules."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Literal, get_args

from phloem.runtime.branch import Score
from phloem.runtime.errors import InvalidRequest

Rule = Literal["sum", "mean", "greedy", "pmi"]
MAX_KNOWN = 64
"""Lists of options whose tokens are remembered."""


@dataclass(frozen=True, slots=True)
class Rating:
    """The outcome of a choice."""

    values: list[float]
    """A number per option."""

    winner: int
    """Its index; the first of equal ones."""


@dataclass(frozen=True, slots=True)
class Options:
    """What there is to choose from, checked."""

    texts: tuple[str, ...]
    ids: tuple[array[int], ...]
    """Of each text, tokenised alone. Shared by all choices among the same texts: not to be changed."""


class KnownOptions:
    """The tokens of the options that a program chooses from: it asks the same of each of its inputs. Threads may share it."""

    def __init__(self, encode: Callable[[str], list[int]]) -> None:
        """Remember what `encode`, the tokenizer's `encode_continuation`, gives."""
        self._encoded = lru_cache(maxsize=MAX_KNOWN)(partial(_encoded, encode))

    def of(self, options: Sequence[str], by: str) -> Options:
        """Return options with their tokens.

        Raises:
            InvalidRequest: As `check_options`; or no UTF-8 can hold one.
        """
        if by not in get_args(Rule) or not isinstance(options, (list, tuple)) or not options:
            options = check_options(options, by)
        try:
            return self._encoded(*options)
        except TypeError:  # one can't be looked up, and is no string therefore
            return self._encoded(*check_options(options, by))


def _encoded(encode: Callable[[str], list[int]], *texts: str) -> Options:
    checked = tuple(check_options(texts, "sum"))
    return Options(checked, tuple(array("i", encode(each)) for each in checked))


def check_options(options: Sequence[str], by: str) -> list[str]:
    """Return the options.

    Raises:
        InvalidRequest: There are none, one is empty or no string, two are equal, or the rule is unknown.
    """
    if isinstance(options, str) or not isinstance(options, Sequence) or not options:
        raise InvalidRequest(
            f"options must be a list of at least one string, not {options!r}", field="options"
        )
    for index, option in enumerate(options):
        if not isinstance(option, str) or not option:
            raise InvalidRequest(
                f"options[{index}] must be a string of at least one character, not {option!r}",
                field="options",
            )
        if option in options[:index]:
            raise InvalidRequest(
                f"options[{index}] is {option!r}, as options[{options.index(option)}] is: leave one out",
                field="options",
            )
    if by not in get_args(Rule):
        raise InvalidRequest(f"by must be one of {', '.join(get_args(Rule))}, not {by!r}", field="by")
    return list(options)


def rate(scores: Sequence[Score], by: Rule, unconditional: Sequence[Score] = ()) -> Rating:
    """Rate options by the scores of their own tokens.

    Args:
        scores: Of the options.
        by: "sum": the log-probability of the whole option. "mean": per token. "greedy": where the options first differ, the
            likeliest token decides, as greedy decoding among them would; the values are the sums. "pmi": how much likelier
            the option is here than at the start of a text (Holtzman et al., 2021).
        unconditional: For "pmi": the scores at the start of a text.
    """
    if by == "mean":
        values = [score.mean for score in scores]
    elif by == "pmi":
        values = [score.total - alone.total for score, alone in zip(scores, unconditional, strict=True)]
    else:
        values = [score.total for score in scores]
    return Rating(values, _greedy(scores) if by == "greedy" else values.index(max(values)))


def _greedy(scores: Sequence[Score]) -> int:
    """Follow the likeliest token among the options that are still in.

    An option that is the beginning of another one goes on with its mean, so that both have something to compare.
    """
    alive = list(range(len(scores)))
    position = 0
    while len(alive) > 1:
        best = max(alive, key=lambda index: _at(scores[index], position))
        token = _token(scores[best], position)
        alive = [best] if token is None else [i for i in alive if _token(scores[i], position) == token]
        position += 1
    return alive[0]


def _at(score: Score, position: int) -> float:
    return score.token_logprobs[position].logprob if position < len(score.token_logprobs) else score.mean


def _token(score: Score, position: int) -> int | None:
    return score.token_logprobs[position].token_id if position < len(score.token_logprobs) else None
