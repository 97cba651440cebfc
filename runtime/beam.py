"""Beam search, as a function over branches: every beam is a fork, and the losers are released."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from phloem.runtime.branch import Branch
from phloem.runtime.errors import InvalidRequest

MAX_WIDTH = 256


@dataclass(frozen=True, slots=True)
class Beam:
    """One continuation that the search found."""

    token_ids: list[int]
    """What follows on the branch, an end-of-sequence token included."""

    logprob: float
    """Of the whole continuation."""

    score: float
    """`logprob / len(token_ids) ** length_penalty`: what beams are ranked by."""


@dataclass(slots=True)
class _Live:
    """A beam that goes on."""

    branch: Branch
    token_ids: list[int]
    logprob: float


@dataclass(frozen=True, slots=True)
class _Step:
    """A way for a beam to go on by one token."""

    parent: _Live
    token_id: int
    logprob: float


def beam_search(
    root: Branch,
    *,
    width: int = 4,
    max_tokens: int = 64,
    length_penalty: float = 1.0,
    stop_token_ids: Sequence[int] | None = None,
) -> list[Beam]:
    """Return the best continuations of a branch, best first, at most `width` of them. The branch does not change.

    The rules are those of transformers: of the 2 x `width` likeliest steps of all beams, those that end a text do so if they are
    among the first `width`, and the first `width` others go on; the search ends when no live beam can beat the
    worst of `width` ended ones at its present length.

    Args:
        root: Where to begin.
        width: Beams kept at each step.
        max_tokens: Longest continuation; beams that are as long end there.
        length_penalty: Above 0 it favours long continuations, since log-probabilities are negative.
        stop_token_ids: What ends a text. None: the model's end-of-sequence tokens.

    Raises:
        InvalidRequest: `width` or `max_tokens` is out of range.
    """
    _check("width", width, MAX_WIDTH)
    _check("max_tokens", max_tokens, 1_000_000)
    ends = frozenset(root.eos_token_ids if stop_token_ids is None else stop_token_ids)
    live = [_Live(root.fork()[0], [], 0.0)]
    ended: list[Beam] = []
    try:
        for length in range(1, max_tokens + 1):
            steps = _best_steps(live, 2 * width)
            ending = [step for step in steps[:width] if step.token_id in ends]
            ended += [_beam(step.parent.token_ids, step, length_penalty) for step in ending]
            ended = sorted(ended, key=lambda beam: -beam.score)[:width]
            going_on = [step for step in steps if step.token_id not in ends][:width]
            live = _advance(live, going_on)
            if len(ended) == width and live[0].logprob / length**length_penalty <= ended[-1].score:
                return ended
        ended += [
            Beam(beam.token_ids, beam.logprob, beam.logprob / max_tokens**length_penalty) for beam in live
        ]
        return sorted(ended, key=lambda beam: -beam.score)[:width]
    finally:
        for beam in live:
            beam.branch.release()


def _best_steps(live: list[_Live], count: int) -> list[_Step]:
    """Return the likeliest steps over all beams, likeliest first."""
    found = Branch.next_token_logprobs_of([beam.branch for beam in live], top=count)
    steps = [
        _Step(beam, token_id, beam.logprob + logprob)
        for beam, candidates in zip(live, found, strict=True)
        for token_id, logprob in candidates
    ]
    return sorted(steps, key=lambda step: -step.logprob)[:count]


def _advance(live: list[_Live], steps: list[_Step]) -> list[_Live]:
    """Fork the beams along the chosen steps, and release what they came from."""
    following = [
        _Live(
            step.parent.branch.fork()[0].append([step.token_id]),
            [*step.parent.token_ids, step.token_id],
            step.logprob,
        )
        for step in steps
    ]
    for beam in live:
        beam.branch.release()
    return following


def _beam(token_ids: list[int], step: _Step, length_penalty: float) -> Beam:
    whole = [*token_ids, step.token_id]
    return Beam(whole, step.logprob, step.logprob / len(whole) ** length_penalty)


def _check(name: str, value: object, most: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= most:
        raise InvalidRequest(f"{name} must be a whole number from 1 to {most:,}, not {value!r}", field=name)
