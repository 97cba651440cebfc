"""The scheduler over a real radix cache, with a shadow of the KV memory that checks every read (tests/support/stepping.py)."""

import random

import pytest
from branch_program import BranchProgram
from stepping import Stepper

from phloem.radix import Namespace, PrefixMatch, RadixCache
from phloem.radix.packing import Tokens
from phloem.runtime import CacheFull, QueueFull
from phloem.runtime.request import Cohort, Phase
from phloem.runtime.scheduler import MAX_PASSES


def tokens(count: int, *, start: int = 0) -> list[int]:
    return list(range(start, start + count))


def test_b01_a_second_prompt_hits_all_but_its_last_token() -> None:
    for length, hit in [(17, 16), (16, 15), (33, 32), (32, 31), (1, 0), (2, 1), (15, 14)]:
        stepper = Stepper(num_blocks=16, block_size=16)
        stepper.add(tokens(length))
        stepper.run()
        again = stepper.add(tokens(length))
        stepper.run()
        assert again.cached_tokens == hit, f"{length} tokens"


@pytest.mark.parametrize("divergence", [0, 1, 15, 16, 17, 32, 1234])
def test_b02_the_hit_of_diverging_prompts_is_exact(divergence: int) -> None:
    stepper = Stepper(num_blocks=256, block_size=16, max_step_tokens=4096)
    stepper.add(tokens(1300))
    stepper.run()
    other = tokens(divergence) + [7777] * (1300 - divergence)
    request = stepper.add(other)
    stepper.run()
    assert request.cached_tokens == divergence


def test_b03_salts_keep_prompts_apart() -> None:
    stepper = Stepper(num_blocks=64)
    for salt in (None, "a", "b"):
        request = stepper.add(tokens(20), salt=salt)
        stepper.run()
        assert request.cached_tokens == 0, salt


def test_b08_a_finished_prompt_leaves_its_whole_blocks() -> None:
    stepper = Stepper(num_blocks=16, block_size=16)
    stepper.add(tokens(55), max_tokens=5)  # the fifth token is sampled and never computed: 59 tokens of KV
    stepper.run()
    assert stepper.cache.stats().evictable == 3
    longer = stepper.add(tokens(55), max_tokens=5 + 19)
    stepper.run()
    assert longer.cached_tokens == 54, "three blocks, and six rows of the tail that was kept"
    assert stepper.cache.stats().evictable == 4, "one new block, and no second copy of the three"


@pytest.mark.parametrize("count", [2, 3, 8])
def test_b23_twins_cost_one_prefill(count: int) -> None:
    stepper = Stepper(num_blocks=64, block_size=4, max_step_tokens=8)
    twins = [stepper.add(tokens(40), name=str(n)) for n in range(count)]
    stepper.run()
    assert stepper.computed == 40 + (count - 1), "one prefill, and one token for each of the others"
    assert [twin.cached_tokens for twin in twins] == [0] + [39] * (count - 1)


@pytest.mark.parametrize("length", [39, 40, 41])
def test_b23_twins_of_a_cached_prompt_do_not_wait_for_each_other(length: int) -> None:
    stepper = Stepper(num_blocks=64, block_size=4, max_step_tokens=64)
    stepper.add(tokens(length))
    stepper.run()
    for _ in range(5):
        stepper.add(tokens(length))
    assert len(stepper.step().rows) == 5, (
        "also when the last block is cached whole, and its last token must run"
    )


def test_b23_a_longer_producer_serves_a_shorter_twin_and_the_other_way_round() -> None:
    for first, second in [(40, 23), (23, 40)]:
        stepper = Stepper(num_blocks=64, block_size=4, max_step_tokens=8)
        stepper.add(tokens(first))
        late = stepper.add(tokens(second))
        stepper.run()
        shared = min(first, second)
        expected = shared - 1 if first > second else shared
        assert late.cached_tokens == expected
        assert stepper.computed == first + second - late.cached_tokens


def test_b23_twins_of_other_namespaces_do_not_wait() -> None:
    stepper = Stepper(num_blocks=64, max_step_tokens=64)
    stepper.add(tokens(20), salt="a")
    stepper.add(tokens(20), salt="b")
    assert len(stepper.step().rows) == 2


def test_a_held_request_does_not_hold_up_those_behind_it() -> None:
    stepper = Stepper(num_blocks=64, max_step_tokens=16)
    stepper.add(tokens(12), name="producer")
    stepper.add(tokens(12), name="twin")
    stepper.add(tokens(4, start=50), name="other")
    assert [row.request.id for row in stepper.step().rows] == ["producer", "other"]


@pytest.mark.parametrize("steps", [0, 1, 2, 3])
def test_b24_a_producer_that_dies_hands_over_to_the_next_waiter(steps: int) -> None:
    stepper = Stepper(num_blocks=64, max_step_tokens=8)
    producer = stepper.add(tokens(40))
    twins = [stepper.add(tokens(40)) for _ in range(3)]
    for _ in range(steps):
        stepper.step()
    stepper.scheduler.finish(producer)
    stepper.run()
    assert stepper.computed == 40 + 2
    assert [twin.cached_tokens for twin in twins] == [steps * 8, 39, 39]


def test_b26_blocks_computed_before_an_abort_stay_reusable() -> None:
    stepper = Stepper(num_blocks=64, max_step_tokens=8)
    aborted = stepper.add(tokens(40))
    stepper.step()
    stepper.step()
    stepper.scheduler.finish(aborted)
    again = stepper.add(tokens(40))
    stepper.run()
    assert again.cached_tokens == 16


def test_b27_a_preempted_request_resumes_with_a_hit_and_counts_it_once() -> None:
    stepper = Stepper(num_blocks=10, block_size=4)
    old = stepper.add(tokens(12), max_tokens=16, name="old")
    young = stepper.add(tokens(12, start=50), max_tokens=16, name="young")
    stepper.run()
    assert stepper.scheduler.preemptions >= 1
    assert old.num_preemptions == 0, "the oldest is never preempted"
    assert young.num_preemptions >= 1
    assert young.cached_tokens == 0, "its own blocks are no hit of its prompt"
    for request, start in ((old, 0), (young, 50)):
        assert request.output_ids == stepper.output_of(tokens(12, start=start), max_tokens=16)
    # Its computed blocks were still there, at least in part: less was computed again than all of it.
    assert stepper.computed < 2 * 27 + 27


def test_b28_the_next_turn_finds_the_answer_of_the_last() -> None:
    for prompt, output in [(5, 3), (16, 16), (17, 30), (10, 7)]:
        stepper = Stepper(num_blocks=64)
        first = stepper.add(tokens(prompt), max_tokens=output)
        stepper.run()
        turn = stepper.add([*first.tokens, 90, 91, 92])
        stepper.run()
        assert turn.cached_tokens >= (prompt + output - 1) // 4 * 4


def test_b30_a_prompt_that_no_pool_of_this_size_holds_is_refused_at_once() -> None:
    stepper = Stepper(num_blocks=4, block_size=4)
    with pytest.raises(
        CacheFull, match=r"17 tokens needs 5 blocks of 4 tokens, and the pool has 4.*num_blocks"
    ):
        stepper.add(tokens(17))
    fits = stepper.add(tokens(16))
    stepper.run()
    assert fits.phase is Phase.FINISHED


def test_a_request_that_can_never_start_is_refused_and_the_next_one_runs() -> None:
    stepper = Stepper(num_blocks=4, block_size=4)
    held = stepper.cache.allocate(3)
    big = stepper.add(tokens(8), name="big")
    small = stepper.add(tokens(2, start=50), name="small")
    for _ in range(5):
        stepper.step()
    assert stepper.refused == [big]
    assert small.phase is Phase.FINISHED
    stepper.cache.free(held)
    stepper.cache.check()


def test_decodes_go_on_while_a_long_prompt_is_prefilled_in_chunks() -> None:
    stepper = Stepper(num_blocks=64, max_step_tokens=8)
    stepper.add(tokens(4), max_tokens=20, name="decoding")
    stepper.step()
    stepper.add(tokens(40, start=50), name="prefilling")
    for _ in range(5):
        rows = {row.request.id: row.count for row in stepper.step().rows}
        assert rows == {"decoding": 1, "prefilling": 7}


def test_no_more_than_max_running_requests_run() -> None:
    stepper = Stepper(num_blocks=64, max_running=3)
    for n in range(7):
        stepper.add(tokens(4, start=10 * n), max_tokens=3)
    while stepper.scheduler.has_work:
        assert len(stepper.step().rows) <= 3


def admissions(stepper: Stepper) -> list[str]:
    """Names in the order in which they were first computed."""
    names = [row.request.id for batch in stepper.batches for row in batch.rows]
    return list(dict.fromkeys(names))


def test_nobody_overtakes_a_request_that_waits_for_memory() -> None:
    stepper = Stepper(num_blocks=6, block_size=4)
    stepper.add(tokens(12), max_tokens=4, name="running")
    stepper.step()
    stepper.add(tokens(16, start=30), name="large")
    stepper.add(tokens(1, start=70), name="small")
    stepper.run()
    assert admissions(stepper) == ["running", "large", "small"]


def test_the_longest_cached_prefix_goes_first() -> None:
    stepper = Stepper(num_blocks=64, max_running=1)
    stepper.add(tokens(40), name="first")
    stepper.run()
    stepper.add(tokens(20, start=60), name="cold")
    stepper.add([*tokens(12), 99], name="warm")
    stepper.add([*tokens(36), 99], name="warmer")
    stepper.run()
    assert admissions(stepper) == ["first", "warmer", "warm", "cold"]


def test_a_waiting_request_is_looked_up_once_while_the_cache_does_not_change(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    looked_up: list[int] = []
    match = RadixCache.match

    def counting(cache: RadixCache, namespace: Namespace, path: Tokens) -> PrefixMatch:
        looked_up.append(len(path))
        return match(cache, namespace, path)

    stepper = Stepper(num_blocks=256, max_running=16, max_step_tokens=1024)
    stepper.add(tokens(8))
    stepper.run()
    for number in range(40):
        stepper.add([*tokens(8), 100 + number], name=str(number))
    monkeypatch.setattr(RadixCache, "match", counting)
    stepper.step()
    assert len(looked_up) == 40, "sixteen were admitted, each after a look at all that wait"
    stepper.run()


def test_the_oldest_is_passed_over_a_bounded_number_of_times() -> None:
    stepper = Stepper(num_blocks=64, max_running=1)
    stepper.add(tokens(40), name="first")
    stepper.run()
    stepper.add(tokens(20, start=60), name="cold")
    for number in range(100):
        stepper.add([*tokens(36), 90], name=f"hot {number}")
        if number % 3 == 2:
            stepper.step()
    stepper.run()
    assert admissions(stepper).index("cold") == 1 + MAX_PASSES


def test_what_another_namespace_has_cached_changes_no_order() -> None:
    stepper = Stepper(num_blocks=64, max_running=1)
    stepper.add(tokens(40), salt="rich", name="first")
    stepper.run()
    stepper.add(tokens(20, start=60), salt="poor", name="cold")
    stepper.add(tokens(40), salt="rich", name="warm")
    stepper.run()
    assert admissions(stepper) == ["first", "cold", "warm"]


def test_a_full_queue_refuses_one_more() -> None:
    stepper = Stepper(num_blocks=64, max_running=1, max_waiting=2)
    for number in range(2):
        stepper.add(tokens(4, start=number * 10))
    with pytest.raises(QueueFull, match="2 requests wait already"):
        stepper.add(tokens(4, start=50))
    stepper.step()
    stepper.add(tokens(4, start=50))
    stepper.run()


def test_with_the_cache_off_nothing_is_shared_and_nothing_is_kept() -> None:
    stepper = Stepper(num_blocks=64, prefix_cache=False)
    for _ in range(2):
        request = stepper.add(tokens(20), max_tokens=5)
        stepper.run()
        assert request.cached_tokens == 0
        assert request.output_ids == stepper.output_of(tokens(20), max_tokens=5)
        assert stepper.cache.stats().free == 64


def test_two_cold_requests_that_meet_keep_one_copy() -> None:
    # They diverge in the first block, then the same answer cannot arise; so let one be a prefix of the other's output.
    stepper = Stepper(num_blocks=64, block_size=4)
    first = stepper.add(tokens(5), max_tokens=12)
    stepper.run()
    path = first.tokens.tolist()
    stepper.cache.clear()
    decoding = stepper.add(path[:5], max_tokens=12)
    stepper.step()
    stepper.add(path[:13], max_tokens=4)
    stepper.run()
    assert decoding.output_ids == path[5:]
    assert stepper.cache.stats().evictable == 4, "16 computed tokens of one path, once"


@pytest.mark.parametrize("seed", range(60))
def test_b31_random_programs_read_only_what_is_theirs_and_give_the_same_answers(seed: int) -> None:
    draw = random.Random(seed)
    block_size = draw.choice([1, 2, 4, 8])
    num_blocks = draw.choice([3, 4, 5, 6, 8, 12, 40])
    stepper = Stepper(
        num_blocks=num_blocks,
        block_size=block_size,
        vocabulary=draw.choice([2, 3, 50]),
        policy=draw.choice(["lru", "lfu", "fifo", "priority"]),
        max_running=draw.choice([1, 2, 4, 8]),
        max_step_tokens=draw.choice([1, 2, 3, 8, 64]),
    )
    capacity = num_blocks * block_size
    bases = [[draw.randrange(3) for _ in range(draw.randrange(1, capacity))] for _ in range(3)]
    cohorts = [None, Cohort(), Cohort()]  # in any order, which costs computing and nothing else
    expected, live = {}, []
    for number in range(40):
        base = draw.choice(bases)
        prompt = base[: draw.randrange(1, len(base) + 1)] + [
            draw.randrange(3) for _ in range(draw.randrange(4))
        ]
        prompt = prompt[: capacity - 1]
        max_tokens = draw.randrange(1, min(12, capacity - len(prompt)) + 1)
        salt = draw.choice([None, None, "a"])
        cohort = draw.choice(cohorts)
        request = stepper.add(prompt, max_tokens=max_tokens, salt=salt, name=str(number), cohort=cohort)
        expected[request.id] = stepper.output_of(prompt, max_tokens=max_tokens, salt=salt)
        live.append(request)
        for _ in range(draw.randrange(4)):
            if stepper.scheduler.has_work:
                stepper.step()
        if draw.random() < 0.1:
            victim = draw.choice(live)
            stepper.scheduler.finish(victim)
            expected.pop(victim.id, None)
        if draw.random() < 0.05:
            stepper.cache.clear()
    stepper.run()
    assert not stepper.refused
    for request in live:
        if request.id in expected:
            assert request.output_ids == expected[request.id]
        assert (request.cached_tokens or 0) <= request.num_prompt_tokens - 1


@pytest.mark.parametrize("seed", range(60))
def test_b31_random_branches_read_only_what_is_theirs_and_lose_no_block(seed: int) -> None:
    program = BranchProgram(seed)
    for _ in range(80):
        program.act()
    program.finish()


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1000, 1020))
def test_b31_many_random_branches(seed: int) -> None:
    program = BranchProgram(seed)
    for _ in range(2000):
        program.act()
    program.finish()
