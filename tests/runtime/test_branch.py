"""Branches on a tiny random model: fork, at, expand, append, release. Scores: test_score.py."""

import asyncio
import contextlib
import gc
import json
import threading
from array import array
from pathlib import Path

import pytest
import torch

from phloem.runtime import (
    Branch,
    BranchReleased,
    Cancelled,
    Completion,
    Engine,
    InvalidRequest,
    PromptTooLong,
    SamplingParams,
)

GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
SEEDED = SamplingParams(seed=11, max_tokens=8, ignore_eos=True)


def ids(count: int, *, start: int = 0) -> list[int]:
    return [(7 * n + start) % 250 for n in range(count)]


def alone(engine: Engine, prompt: list[int], params: SamplingParams) -> Completion:
    [done] = engine.generate(prompt, params)
    return done


def test_generating_extends_the_path_and_the_next_call_finds_it(tiny_engine: Engine) -> None:
    with tiny_engine.branch(ids(20)) as branch:
        first = branch.generate(GREEDY)
        assert branch.token_ids == ids(20) + first.token_ids
        second = branch.generate(GREEDY)
        assert second.usage.cached_tokens == 20 + 8 - 1, "its own tail too, to the token"
        assert (
            first.token_ids + second.token_ids
            == alone(
                tiny_engine, ids(20), SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
            ).token_ids
        )


def test_append_takes_text_and_ids(tiny_engine: Engine) -> None:
    with tiny_engine.branch(ids(5)) as branch:
        branch.append("ab").append([1, 2])
        assert branch.token_ids == [
            *ids(5),
            *tiny_engine.tokenizer.encode("ab", add_special_tokens=False),
            1,
            2,
        ]
        assert len(branch) == 9
        for bad in ("", [], [-1], [10**6], 5):
            with pytest.raises(InvalidRequest):
                branch.append(bad)
        assert len(branch) == 9


@pytest.mark.parametrize("length", [1, 5, 16, 17, 40])
def test_forks_share_the_path_and_go_their_own_ways(tiny_engine: Engine, length: int) -> None:
    with tiny_engine.branch(ids(length)) as root:
        root.score([[1]])  # computes the path
        kids = root.fork(3)
        for number, kid in enumerate(kids):
            kid.append([100 + number])
        found = [kid.generate(GREEDY) for kid in kids]
        for number, done in enumerate(found):
            # Or all of it, where somebody's block that was filled since has the last token too.
            assert done.usage.cached_tokens in (length - 1, length)
            assert done.token_ids == alone(tiny_engine, [*ids(length), 100 + number], GREEDY).token_ids
        assert root.token_ids == ids(length)
        tiny_engine.check()
        for kid in kids:
            kid.release()


def test_a_fork_copies_no_kv_and_a_child_that_writes_copies_its_tail(tiny_engine: Engine) -> None:
    with tiny_engine.branch(ids(24)) as root:
        root.score([[1]])
        before = tiny_engine.stats()
        kids = root.fork(50)
        after = tiny_engine.stats()
        assert after.cache.private == before.cache.private == 1 + before.kept_tails
        assert after.cache.locked == before.cache.locked
        kids[0].generate(GREEDY)
        tiny_engine.check()
        after = tiny_engine.stats()
        assert after.cache.private == 2 + after.kept_tails
        for kid in kids:
            kid.release()


def test_b34_children_of_a_prompt_shorter_than_a_block_cost_one_prefill(tiny_engine: Engine) -> None:
    done = tiny_engine.generate(ids(9), SamplingParams(n=4, seed=1, max_tokens=5, ignore_eos=True))
    assert [each.usage.computed_tokens for each in done] == [9, 1, 1, 1]
    # 8 prompt tokens once, the last one for each child, and 4 more for each (the fifth is never computed).
    assert tiny_engine.stats().computed_tokens == 8 + 4 + 4 * 4


@pytest.mark.parametrize("index", [1, 2, 15, 16, 17, 31, 32, 33, 39, 40])
def test_at_gives_a_branch_at_any_token(tiny_engine: Engine, index: int) -> None:
    with tiny_engine.branch(ids(40)) as root:
        root.score([[1]])
        with root.at(index) as branch:
            assert branch.token_ids == ids(40)[:index]
            done = branch.append([200]).generate(GREEDY)
            assert done.usage.cached_tokens == index
            assert done.token_ids == alone(tiny_engine, [*ids(40)[:index], 200], GREEDY).token_ids


@pytest.mark.parametrize("index", [0, -1, 41, 1.5, True, "3"])
def test_at_a_place_that_is_not_there_is_refused(tiny_engine: Engine, index: object) -> None:
    with (
        tiny_engine.branch(ids(40)) as root,
        pytest.raises(InvalidRequest, match="from 1 to the path's length of 40"),
    ):
        root.at(index)


@pytest.mark.parametrize("n", [0, -1, 10**9, 1.5, True])
def test_a_number_of_children_out_of_range_is_refused(tiny_engine: Engine, n: object) -> None:
    with tiny_engine.branch(ids(20)) as root:
        for call in (root.fork, root.expand):
            with pytest.raises(InvalidRequest, match="n must be a whole number from 1 to 100,000"):
                call(n)


def test_b33_children_differ_repeat_and_do_not_need_each_other(tiny_engine: Engine) -> None:
    with tiny_engine.branch(ids(20)) as root:
        first, again = ([kid.completion.token_ids for kid in root.expand(4, SEEDED)] for _ in range(2))
        assert first == again
        assert len({tuple(tokens) for tokens in first}) == 4
        by_n = [
            done.token_ids
            for done in tiny_engine.generate(
                ids(20), SamplingParams(seed=11, n=4, max_tokens=8, ignore_eos=True)
            )
        ]
        assert by_n == first
        assert alone(tiny_engine, ids(20), SEEDED).token_ids == first[0], (
            "child 0 is what one request would draw"
        )
        fewer = [kid.completion.token_ids for kid in root.expand(2, SEEDED)]
        assert fewer == first[:2]


def test_expanded_children_are_branches_to_go_on_from(tiny_engine: Engine) -> None:
    with tiny_engine.branch(ids(20)) as root:
        kids = root.expand(3, SEEDED)
        for kid in kids:
            assert kid.token_ids == ids(20) + kid.completion.token_ids
            more = kid.generate(GREEDY)
            assert more.usage.cached_tokens == 27
            assert (
                more.token_ids == alone(tiny_engine, [*ids(20), *kid.completion.token_ids], GREEDY).token_ids
            )
            kid.release()


def test_expand_many_yields_children_as_they_finish(tiny_engine: Engine) -> None:
    roots = [tiny_engine.branch(ids(20, start=n)) for n in range(3)]
    kids = list(tiny_engine.expand_many(roots, 2, GREEDY))
    assert len(kids) == 6
    starts = sorted(tuple(kid.token_ids[:20]) for kid in kids)
    assert starts == sorted(tuple(ids(20, start=n)) for n in (0, 0, 1, 1, 2, 2))
    for branch in (*roots, *kids):
        branch.release()


def test_leaving_expand_many_early_aborts_and_releases_the_rest(tiny_engine: Engine) -> None:
    root = tiny_engine.branch(ids(20))
    endless = SamplingParams(max_tokens=500, ignore_eos=True, temperature=0)
    ends = SamplingParams(seed=1, max_tokens=500, stop_token_ids=range(130), ignore_eos=True)
    many = tiny_engine.expand_many([root], 3, ends)
    next(many).release()
    many.close()
    many = tiny_engine.expand_many([root], 2, endless)
    del many
    gc.collect()
    assert tiny_engine.stats().running == tiny_engine.stats().waiting == 0, (
        "nothing starts before the first next()"
    )
    root.release()
    gc.collect()
    tiny_engine.check()
    assert tiny_engine.stats().running == tiny_engine.stats().waiting == 0


# Sampling


def test_logit_bias_and_penalties_change_what_is_sampled(tiny_engine: Engine) -> None:
    free = alone(tiny_engine, ids(20), GREEDY).token_ids
    biased = alone(
        tiny_engine,
        ids(20),
        SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, logit_bias={42: 100}),
    )
    assert biased.token_ids == [42] * 8
    both = SamplingParams(
        temperature=0,
        max_tokens=8,
        ignore_eos=True,
        logit_bias=dict.fromkeys(range(40, 48), 100),
        presence_penalty=50,
    )
    assert sorted(alone(tiny_engine, ids(20), both).token_ids) == list(range(40, 48)), "each of them once"
    repeated = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, frequency_penalty=0.5)
    assert alone(tiny_engine, ids(20), repeated).token_ids[0] == free[0]


def test_repetition_penalty_agrees_with_transformers(tiny_path: Path, tiny_engine: Engine) -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(tiny_path, dtype=torch.float32)
    prompt = torch.tensor([ids(30)])
    expected = model.generate(
        prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=20, do_sample=False, eos_token_id=None,
        repetition_penalty=1.7,
    )  # fmt: skip
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True, repetition_penalty=1.7)
    assert alone(tiny_engine, ids(30), params).token_ids == expected[0, 30:].tolist()


# Lifetime


def test_two_generations_at_once_on_one_branch_are_refused(tiny_engine: Engine) -> None:
    with tiny_engine.branch(ids(20)) as branch:
        running = branch.stream(SamplingParams(max_tokens=800, ignore_eos=True))
        for call in (lambda: branch.generate(GREEDY), lambda: branch.append([1])):
            with pytest.raises(InvalidRequest, match="generating"):
                call()
        running.abort()
        running.result()
        assert branch.generate(GREEDY).finish_reason == "length"


def test_a_branch_can_be_forked_and_scored_while_it_generates(tiny_engine: Engine) -> None:
    with tiny_engine.branch(ids(20)) as branch:
        running = branch.stream(SamplingParams(temperature=0, max_tokens=400, ignore_eos=True))
        for _, _chunk in zip(range(30), running, strict=False):
            pass
        [fork] = branch.fork()
        tokens = fork.token_ids
        assert len(tokens) >= 50
        assert len(branch.score([[1, 2]])) == 1
        found = fork.generate(GREEDY).token_ids
        running.abort()
        running.result()
        fork.release()
        tiny_engine.clear_cache()
        assert found == alone(tiny_engine, tokens, GREEDY).token_ids


def test_a_released_branch_frees_its_blocks_at_once_and_says_so_when_used(tiny_engine: Engine) -> None:
    branch = tiny_engine.branch(ids(40))
    branch.generate(GREEDY)
    assert tiny_engine.stats().cache.locked > 0
    branch.release()
    branch.release()
    assert tiny_engine.stats().cache.locked == 0
    for call in (
        lambda: branch.generate(), lambda: branch.fork(), lambda: branch.at(1), lambda: branch.score([[1]]),
        lambda: branch.append([1]), lambda: branch.token_ids, lambda: len(branch), lambda: branch.expand(2),
    ):  # fmt: skip
        with pytest.raises(BranchReleased):
            call()


def test_releasing_a_branch_that_generates_aborts_it(tiny_engine: Engine) -> None:
    branch = tiny_engine.branch(ids(20))
    running = branch.stream(SamplingParams(max_tokens=900, ignore_eos=True))
    next(iter(running))
    branch.release()
    assert running.result().finish_reason == "abort"
    assert tiny_engine.stats().cache.locked == 0


def test_a_branch_that_nobody_holds_is_released(tiny_engine: Engine) -> None:
    branch = tiny_engine.branch(ids(40))
    branch.generate(GREEDY)
    assert tiny_engine.stats().cache.locked > 0
    del branch
    gc.collect()
    assert tiny_engine.stats().cache.locked == 0


def test_releasing_the_parent_does_not_hurt_its_children(tiny_engine: Engine) -> None:
    root = tiny_engine.branch(ids(24))
    root.score([[1]])
    [kid] = root.fork()
    root.release()
    tiny_engine.check()
    assert kid.append([9]).generate(GREEDY).usage.cached_tokens == 24
    kid.release()


def test_branches_that_wait_give_way_when_memory_is_short(tiny_path: Path) -> None:
    with Engine(tiny_path, dtype="float32", num_blocks=10, block_size=8) as engine:
        branches = [engine.branch(ids(30, start=n)) for n in range(6)]
        first = [branch.generate(GREEDY).token_ids for branch in branches]
        second = [branch.generate(GREEDY).token_ids for branch in branches]
        engine.check()
        assert engine.stats().preemptions == 0
        params = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
        for n, (one, two) in enumerate(zip(first, second, strict=True)):
            assert one + two == alone(engine, ids(30, start=n), params).token_ids
        for branch in branches:
            branch.release()
        assert engine.stats().cache.locked == 0
        assert engine.stats().cache.private == engine.stats().kept_tails


def test_a_branch_survives_as_plain_data(tiny_engine: Engine) -> None:
    with tiny_engine.branch(ids(40)) as branch:
        branch.generate(GREEDY)
        state = json.loads(json.dumps(branch.to_dict()))
        expected = branch.token_ids
    with tiny_engine.branch_from_dict(state) as again:
        assert again.token_ids == expected
        assert again.generate(GREEDY).usage.cached_tokens >= 32
    for bad in (
        {},
        {"token_ids": []},
        {**state, "more": 1},
        {**state, "token_ids": [-1]},
        {**state, "salt": ""},
        5,
    ):
        with pytest.raises(ValueError, match=r"token_ids|salt|description"):
            tiny_engine.branch_from_dict(bad)


def test_a_path_never_outgrows_the_context(tiny_path: Path) -> None:
    with Engine(tiny_path, num_blocks=64, max_model_len=30) as engine, engine.branch(ids(20)) as branch:
        with pytest.raises(PromptTooLong):
            branch.append(ids(11))
        with pytest.raises(PromptTooLong):
            branch.score([ids(11)])
        assert (
            branch.generate(SamplingParams(temperature=0, max_tokens=None, ignore_eos=True)).finish_reason
            == "length"
        )
        assert len(branch) == 30
        for call in (branch.generate, branch.next_token_logprobs, lambda: branch.expand(2)):
            with pytest.raises(PromptTooLong):
                call()
        with pytest.raises(PromptTooLong):
            engine.expand_many([branch], 2)


def test_the_async_twins_do_the_same(tiny_engine: Engine) -> None:
    async def run(root: Branch) -> tuple[list[list[int]], list[float], str]:
        kids = await root.aexpand(3, SEEDED)
        scores = await root.ascore([[1, 2], [3]])
        text = "".join([chunk.text async for chunk in kids[0].astream(GREEDY)])
        done = await kids[1].agenerate(GREEDY)
        assert done.finish_reason == "length"
        found = [kid.completion.token_ids for kid in kids]
        for kid in kids:
            kid.release()
        return found, [score.total for score in scores], text

    with tiny_engine.branch(ids(20)) as root:
        found, totals, text = asyncio.run(run(root))
        assert found == [kid.completion.token_ids for kid in root.expand(3, SEEDED)]
        assert totals == [score.total for score in root.score([[1, 2], [3]])]
        assert text


def test_a_fork_of_a_thousand_runs_to_the_end(tiny_engine: Engine) -> None:
    with tiny_engine.branch(ids(60)) as root:
        kids = root.expand(1000, SamplingParams(seed=3, max_tokens=2, ignore_eos=True))
        assert len({tuple(kid.completion.token_ids) for kid in kids}) > 100
        tiny_engine.check()
        for kid in kids:
            kid.release()
    assert tiny_engine.stats().cache.locked == 0


def test_leases_tokens_and_explanations_have_twins_for_event_loops(tiny_engine: Engine) -> None:
    async def twins(root: Branch, other: Branch) -> None:
        assert await root.apin(ttl=50) == 32
        pinned_s, unpinned_s = await Branch.apinned_s_of([root, other])
        assert 40 < pinned_s <= 50
        assert unpinned_s == 0
        await root.aunpin()
        assert await Branch.apinned_s_of([root]) == [0]
        assert await Branch.apinned_s_of([]) == []
        assert await root.atoken_ids() == root.token_ids
        assert await tiny_engine.aexplain(ids(50)) == tiny_engine.explain(ids(50))
        generation = await root.asubmit(SamplingParams(max_tokens=3, ignore_eos=True))
        assert len((await generation.result()).token_ids) == 3
        late = await root.asubmit(SamplingParams(max_tokens=None, ignore_eos=True), timeout_s=0.01)
        with pytest.raises(Cancelled):
            await late.result()

    with tiny_engine.branch(ids(40)) as root, tiny_engine.branch(ids(4)) as other:
        asyncio.run(twins(root, other))


def test_every_blocking_call_has_a_twin_for_event_loops(tiny_engine: Engine) -> None:
    params = SamplingParams(max_tokens=4, temperature=1.0, seed=3, ignore_eos=True)

    async def twins(root: Branch) -> tuple[object, object, list[list[int]], int]:
        likeliest = await root.anext_token_logprobs(top=3)
        candidates = await root.anext_token_logprobs([5, 6])
        kids = [kid async for kid in tiny_engine.aexpand_many([root, root], 3, params)]
        found = sorted(kid.completion.token_ids for kid in kids)
        for kid in kids:
            kid.release()
        return likeliest, candidates, found, await root.apin(ttl=5)

    with tiny_engine.branch(ids(40)) as root:
        likeliest, candidates, found, pinned = asyncio.run(twins(root))
        root.unpin()
        assert likeliest == root.next_token_logprobs(top=3)
        assert candidates == root.next_token_logprobs([5, 6])
        kids = list(tiny_engine.expand_many([root, root], 3, params))
        assert found == sorted(kid.completion.token_ids for kid in kids)
        for kid in kids:
            kid.release()
        assert pinned == 32


def test_leaving_an_async_expansion_early_drops_the_rest(tiny_engine: Engine) -> None:
    async def first_of(root: Branch) -> Branch:
        params = SamplingParams(max_tokens=200, temperature=0, ignore_eos=True)
        born = tiny_engine.aexpand_many([root], 5, params)
        kid = await anext(born)
        await born.aclose()
        return kid

    with tiny_engine.branch(ids(10)) as root:
        asyncio.run(first_of(root)).release()
        assert tiny_engine.stats().running == tiny_engine.stats().waiting == 0


@pytest.mark.parametrize("use", ["generate", "score", "expand"])
def test_a_branch_that_is_released_while_another_thread_begins_to_use_it_loses_no_block(
    tiny_engine: Engine, use: str
) -> None:
    calls = {
        "generate": lambda branch: branch.generate(GREEDY),
        "score": lambda branch: branch.score([[1]]),
        "expand": lambda branch: [kid.release() for kid in branch.expand(1, GREEDY)],
    }

    def work(branch: Branch, ready: threading.Event) -> None:
        ready.set()
        with contextlib.suppress(BranchReleased):
            calls[use](branch)

    for number in range(100):
        branch, ready = tiny_engine.branch(ids(20)), threading.Event()
        thread = threading.Thread(target=work, args=(branch, ready))
        thread.start()
        ready.wait()
        for _ in range(number % 10 * 20):  # some microseconds more each time
            pass
        branch.release()
        thread.join()
    assert tiny_engine.stats().cache.locked == 0


@pytest.mark.parametrize("wrong", [-1, 260, 10**6])
def test_ids_in_an_array_are_checked_as_those_in_a_list(tiny_engine: Engine, wrong: int) -> None:
    given = array("i", ids(20))
    with tiny_engine.branch(given) as branch:
        given[0] = 99
        assert branch.token_ids == ids(20), "the caller's array stays the caller's"
    for kind in (list, lambda tokens: array("i", tokens)):
        with pytest.raises(
            InvalidRequest, match=rf"prompt\[1\] is {wrong}; this model's token ids go from 0 to 259"
        ):
            tiny_engine.branch(kind([5, wrong]))
