"""Why tokens were computed, per request, and leases, through the engine."""

import asyncio
from pathlib import Path

import pytest

from phloem.radix import Explanation, MissReason, Namespace
from phloem.runtime import CacheFull, Completion, Engine, InvalidRequest, SamplingParams
from phloem.runtime.explain import describe

ONE = SamplingParams(temperature=0, max_tokens=1)


def ids(count: int, *, start: int = 0) -> list[int]:
    return [(7 * n + start) % 250 for n in range(count)]


def run(engine: Engine, prompt: list[int], params: SamplingParams = ONE) -> Completion:
    [done] = engine.generate(prompt, params)
    assert done.explanation is not None
    explanation = done.explanation
    assert explanation.cached_tokens == done.usage.cached_tokens
    assert explanation.cached_tokens + sum(miss.num_tokens for miss in explanation.misses) == len(prompt)
    return done


def reasons(explanation: Explanation) -> list[tuple[str, int, int]]:
    return [(miss.reason.value, miss.start, miss.end) for miss in explanation.misses]


def test_a_first_prompt_was_never_seen_and_a_repeated_one_computes_its_last_token(
    tiny_engine: Engine,
) -> None:
    assert reasons(run(tiny_engine, ids(40)).explanation) == [("never_seen", 0, 40)]
    again = run(tiny_engine, ids(40)).explanation
    assert again.cached_tokens == 39
    assert reasons(again) == [("last_token", 39, 40)]


def test_a_prompt_that_leaves_an_earlier_one_is_told_where_and_from_whom(tiny_engine: Engine) -> None:
    first = run(tiny_engine, ids(40))
    other = run(tiny_engine, [*ids(20), 249, *ids(10)])
    [miss] = other.explanation.misses
    assert (miss.reason, miss.start, miss.end) == (MissReason.DIVERGED, 20, 31)
    assert (miss.token, miss.other_token, miss.label) == (249, ids(40)[20], first.request_id)
    text = describe(other.explanation, tiny_engine.tokenizer.decode)
    assert text.startswith("20 of 31 tokens cached\n11 diverged at token 20 from request 1: ")


def test_what_was_evicted_is_told_from_what_was_never_seen(tiny_path: Path) -> None:
    with Engine(tiny_path, num_blocks=8, block_size=8) as engine:
        run(engine, ids(40))
        run(engine, ids(60, start=3))
        again = run(engine, [*ids(40), 1, 2, 3]).explanation
        assert again.tokens("evicted") > 0
        assert again.tokens("evicted") + again.cached_tokens >= 32


def test_with_the_cache_off_all_is_bypassed(tiny_path: Path) -> None:
    with Engine(tiny_path, num_blocks=16, prefix_cache=False) as engine:
        assert reasons(run(engine, ids(20)).explanation) == [("bypassed", 0, 20)]


def test_prompt_logprobs_are_why_known_tokens_run(tiny_engine: Engine) -> None:
    run(tiny_engine, ids(40))
    asked = run(tiny_engine, ids(40), SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0))
    assert asked.explanation.tokens("last_token") >= 32
    assert asked.explanation.cached_tokens == 0


def test_other_namespaces_are_not_told_of(tiny_engine: Engine) -> None:
    run(tiny_engine, ids(40))
    explanation = tiny_engine.explain(ids(40), namespace=Namespace(salt="a"))
    assert reasons(explanation) == [("never_seen", 0, 40)]


def test_a_dry_run_changes_nothing_and_agrees_with_the_run(tiny_engine: Engine) -> None:
    run(tiny_engine, ids(40))
    prompt = [*ids(30), 1, 2]
    before = tiny_engine.stats()
    explanations = [tiny_engine.explain(prompt) for _ in range(3)]
    assert tiny_engine.stats() == before
    assert explanations[0] == explanations[2] == run(tiny_engine, prompt).explanation


def test_a_branch_explains_itself(tiny_engine: Engine) -> None:
    with tiny_engine.branch(ids(40)) as branch:
        assert branch.explain().cached_tokens == 0
        branch.generate(SamplingParams(temperature=0, max_tokens=4, ignore_eos=True))
        assert branch.explain().cached_tokens == 43
        assert branch.append([1, 2]).explain().cached_tokens == 43


# Leases


def test_a_pinned_branch_stays_cached_whatever_comes(tiny_path: Path) -> None:
    with Engine(tiny_path, num_blocks=16, block_size=8) as engine:
        with engine.branch(ids(32)) as branch:
            assert branch.pin(ttl=600) == 32
        assert engine.stats().cache.pinned == 4
        for start in range(1, 8):
            run(engine, ids(90, start=start))
        assert run(engine, ids(32)).usage.cached_tokens == 31
        engine.check()


def test_unpinning_and_clearing_end_a_lease(tiny_path: Path) -> None:
    with Engine(tiny_path, num_blocks=16, block_size=8) as engine, engine.branch(ids(33)) as branch:
        assert branch.pin() == 32
        branch.unpin()
        branch.unpin()
        assert engine.stats().cache.pinned == 0
        branch.pin()
        engine.clear_cache()
        assert engine.stats().cache.pinned == 0
        engine.check()


def test_what_is_cached_is_pinned_without_computing(tiny_path: Path) -> None:
    with Engine(tiny_path, num_blocks=16, block_size=8) as engine, engine.branch(ids(32)) as branch:
        run(engine, ids(33))
        before = engine.stats().computed_tokens
        assert branch.pin() == asyncio.run(branch.apin()) == 32
        lease = branch.lease
        assert lease is not None
        assert lease.ended is None
        assert engine.stats().computed_tokens == before
        branch.unpin()
        assert branch.lease is None
        assert lease.ended == "released"
        engine.check()


def test_a_lease_ends_by_itself(tiny_path: Path) -> None:
    import time

    with Engine(tiny_path, num_blocks=16, block_size=8) as engine:
        with engine.branch(ids(33)) as branch:
            branch.pin(ttl=0.05)
        time.sleep(0.1)
        run(engine, [1, 2])
        assert engine.stats().cache.pinned == 0


def test_a_pin_that_cannot_be_is_refused_with_the_reason(tiny_path: Path) -> None:
    with Engine(tiny_path, num_blocks=16, block_size=8) as engine:
        with engine.branch(ids(5)) as short, pytest.raises(InvalidRequest, match="no whole block"):
            short.pin()
        with engine.branch(ids(33)) as branch:
            for bad in (0, -1, float("nan")):
                with pytest.raises(InvalidRequest):
                    branch.pin(ttl=bad)
        with engine.branch(ids(80)) as large, pytest.raises(CacheFull, match="pinned"):
            large.pin()
        engine.check()
