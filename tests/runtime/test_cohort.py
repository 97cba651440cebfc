"""Batches submitted depth first: what a tree of prompts shares is computed once, in memory for its longest path.

Prompts that part inside a block while both run compute the rows before that place twice, as waiting for each other would cost
more. So where prompts branch at the ends of blocks, what is computed is exactly the tree; anywhere else, it is when
one request runs at a time, and at most less than a block per request more when several do.
"""

import random
from collections.abc import Callable, Sequence

import pytest
from stepping import Stepper

from phloem.runtime.request import Cohort, Phase, Request
from phloem.runtime.scheduler import WINDOW

Prompts = list[list[int]]


def random_tokens(draw: random.Random, count: int) -> list[int]:
    return [draw.randrange(10**6) for _ in range(count)]


def random_tree(draw: random.Random, *, unit: int) -> Prompts:
    """Prompts that branch at multiples of `unit`, up to four deep; some end where others go on, some come twice."""
    prompts: Prompts = []

    def grow(prefix: list[int], depth: int) -> None:
        prompt = prefix + random_tokens(draw, unit * draw.randrange(1, 1 + max(1, 12 // unit)))
        num_children = draw.randrange(4) if depth < 3 else 0
        if num_children == 0 or draw.random() < 0.15:
            prompts.extend([prompt] * draw.choice([1, 1, 1, 2]))
        for _ in range(num_children):
            grow(prompt, depth + 1)

    for _ in range(draw.randrange(2, 5)):
        grow([], 0)
    return sorted(prompts)


def few_shot(draw: random.Random) -> Prompts:
    """A few documents, and questions on each."""
    documents = [random_tokens(draw, 40) for _ in range(3)]
    return sorted(document + random_tokens(draw, 8) for document in documents for _ in range(12))


def tree_of_thought(draw: random.Random) -> Prompts:
    """One preamble, then every text of a search that keeps five at each depth."""
    prompts, kept = [], [random_tokens(draw, 32)]
    for _ in range(3):
        level = [text + random_tokens(draw, 8) for text in kept for _ in range(4)]
        prompts += level
        kept = draw.sample(level, min(5, len(level)))
    return sorted(prompts)


def common(first: Sequence[int], second: Sequence[int]) -> int:
    pairs = enumerate(zip(first, second, strict=False))
    return next((index for index, (a, b) in pairs if a != b), min(len(first), len(second)))


def computed_once(prompts: Prompts, outputs: Sequence[int], *, block_size: int = 1) -> int:
    """Tokens to compute when the neighbours' common part is computed once, in whole blocks; the last one of a prompt always is."""
    count, before = 0, []
    for prompt in prompts:
        shared = min(common(prompt, before), len(prompt) - 1)
        count += len(prompt) - shared // block_size * block_size
        before = prompt
    # The last token of an output is sampled, and never computed.
    return count + sum(outputs) - len(outputs)


def longest_path(prompts: Prompts, outputs: Sequence[int], block_size: int) -> int:
    """Blocks of the longest path."""
    return max(
        -(-(len(prompt) + output - 1) // block_size) for prompt, output in zip(prompts, outputs, strict=True)
    )


def run(prompts: Prompts, outputs: Sequence[int], *, cohort: Cohort | None, **options: int) -> Stepper:
    stepper = Stepper(vocabulary=10**9, **options)
    for number, (prompt, output) in enumerate(zip(prompts, outputs, strict=True)):
        stepper.add(prompt, max_tokens=output, name=str(number), cohort=cohort)
    stepper.run()
    assert not stepper.refused
    return stepper


@pytest.mark.parametrize("max_running", range(1, 9))
def test_a_tree_that_branches_at_blocks_costs_its_distinct_tokens_in_memory_for_its_longest_path(
    max_running: int,
) -> None:
    evictions = saved = 0
    for seed in range(12):
        draw = random.Random(100 * max_running + seed)
        block_size = draw.choice([1, 2, 4, 8])
        prompts = random_tree(draw, unit=block_size)
        outputs = [draw.randrange(1, 10) for _ in prompts]
        stepper = run(
            prompts,
            outputs,
            cohort=Cohort(),
            num_blocks=longest_path(prompts, outputs, block_size),
            block_size=block_size,
            max_running=max_running,
            max_step_tokens=draw.choice([4, 16, 64, 512]),
        )
        assert stepper.computed == computed_once(prompts, outputs), f"seed {seed}"
        assert stepper.scheduler.preemptions == 0
        evictions += stepper.cache.stats().evictions
        saved += sum(map(len, prompts)) + sum(outputs) - stepper.computed
    assert evictions > 0
    assert saved > 0


@pytest.mark.parametrize("max_running", [1, 2, 3, 8])
def test_a_tree_that_branches_anywhere_costs_at_most_a_part_of_a_block_per_request_more(
    max_running: int,
) -> None:
    for seed in range(15):
        draw = random.Random(100 * max_running + seed)
        block_size = draw.choice([2, 3, 4, 8])
        prompts = random_tree(draw, unit=1)
        outputs = [draw.randrange(1, 10) for _ in prompts]
        stepper = run(
            prompts,
            outputs,
            cohort=Cohort(),
            num_blocks=longest_path(prompts, outputs, block_size) + draw.choice([0, 0, 1, 5]),
            block_size=block_size,
            max_running=max_running,
            max_step_tokens=draw.choice([4, 16, 64, 512]),
        )
        exact = computed_once(prompts, outputs)
        most = exact if max_running == 1 else computed_once(prompts, outputs, block_size=block_size)
        assert exact <= stepper.computed <= most, f"seed {seed}"


@pytest.mark.parametrize("shape", [few_shot, tree_of_thought])
@pytest.mark.parametrize("max_running", [1, 2, 4, 8])
@pytest.mark.parametrize("num_paths", [1, 2, 3])
def test_shared_documents_and_searches_are_computed_once(
    shape: Callable[[random.Random], Prompts], max_running: int, num_paths: int
) -> None:
    prompts = shape(random.Random(1))
    outputs = [6] * len(prompts)
    num_blocks = num_paths * longest_path(prompts, outputs, 8)
    stepper = run(
        prompts, outputs, cohort=Cohort(), num_blocks=num_blocks, block_size=8, max_running=max_running
    )
    assert stepper.computed == computed_once(prompts, outputs)
    assert stepper.cache.stats().evictions > 0


def test_where_memory_is_ample_a_cohort_takes_no_more_steps() -> None:
    steps = {True: 0, False: 0}
    for together in steps:
        for seed in range(40):
            draw = random.Random(seed)
            prompts = random_tree(draw, unit=4)
            outputs = [draw.randrange(1, 10) for _ in prompts]
            limits = {"max_running": draw.choice([2, 4, 8, 16]), "max_step_tokens": draw.choice([16, 64])}
            cohort = Cohort() if together else None
            steps[together] += len(run(prompts, outputs, cohort=cohort, num_blocks=2000, **limits).batches)
    # They choose in another order, which takes a step more here and one less there.
    assert steps[True] <= 1.01 * steps[False]


def test_several_run_at_once_as_far_as_memory_for_what_the_running_ones_will_need_goes() -> None:
    draw = random.Random(0)
    prefix = random_tokens(draw, 40)
    prompts = sorted(prefix + random_tokens(draw, 4) for _ in range(12))
    # Ten blocks are shared; each request needs one more for its prompt and two for its output.
    stepper = run(prompts, [9] * 12, cohort=Cohort(), num_blocks=10 + 3 * 4, max_running=8)
    assert max(len(batch.rows) for batch in stepper.batches) == 4
    assert stepper.scheduler.preemptions == 0
    assert len(stepper.batches) <= 3 * 9 + 3


def test_outputs_that_end_early_are_not_held_against_the_rest() -> None:
    draw = random.Random(0)
    stepper = Stepper(num_blocks=64, vocabulary=10**9)
    cohort = Cohort()
    requests = [
        stepper.add(random_tokens(draw, 8), max_tokens=200, name=str(number), cohort=cohort)
        for number in range(40)
    ]
    for _ in range(100):
        if not stepper.scheduler.has_work:
            break
        stepper.step()
        for request in requests:
            if request.phase is Phase.RUNNING and len(request.output_ids) == 4:
                stepper.scheduler.finish(request)
    assert not stepper.scheduler.has_work
    # The first one runs alone, since it might need all memory; the others as eight at once.
    assert len(stepper.batches) <= 4 + 5 * 4 + 2


def test_a_longer_cached_prefix_does_not_take_the_memory_of_one_whose_turn_comes_before() -> None:
    draw = random.Random(0)
    near, far = random_tokens(draw, 16), random_tokens(draw, 20)
    # The second waits for what the first computes, so the third starts beside it. The two end in the same step, when the fourth,
    # which needs the whole pool, has more in the cache than the second.
    prompts = [
        [*near, *random_tokens(draw, 4)],
        [*near, *random_tokens(draw, 8)],
        far,
        [*far, *random_tokens(draw, 60)],
    ]
    stepper = run(prompts, [1, 1, 1, 1], cohort=Cohort(), num_blocks=20, max_running=8)
    assert len(stepper.batches[0].rows) == 2
    assert stepper.computed == computed_once(prompts, [1] * 4)


def test_nobody_waits_for_what_is_kept_for_a_cohort_when_nothing_else_runs() -> None:
    stepper = Stepper(num_blocks=6, max_running=1, vocabulary=10**9)
    cohort = Cohort()
    first = stepper.add(list(range(16)), max_tokens=4, name="first", cohort=cohort)
    other = stepper.add(list(range(50, 70)), max_tokens=4, name="other")
    heir = stepper.add([*range(16), 99], name="heir", cohort=cohort)
    other.passes = heir.passes = 16  # nobody overtakes by a longer cached prefix
    while first.phase is not Phase.FINISHED:
        stepper.step()
    assert stepper.cache.stats().locked == 4, "what the heir shares with the first"
    stepper.run()
    assert not stepper.refused
    assert stepper.cache.stats().locked == 0


@pytest.mark.parametrize("position", ["waiting", "running"])
def test_what_is_kept_passes_on_when_a_request_is_aborted(position: str) -> None:
    draw = random.Random(0)
    prefix = random_tokens(draw, 24)
    prompts = sorted(prefix + random_tokens(draw, 4) for _ in range(4))
    stepper = Stepper(num_blocks=8, max_running=1)
    cohort = Cohort()
    requests: list[Request] = [stepper.add(prompt, max_tokens=4, cohort=cohort) for prompt in prompts]
    while requests[0].phase is not Phase.FINISHED:
        stepper.step()
    if position == "running":
        stepper.step()
    stepper.scheduler.finish(requests[1])
    assert stepper.cache.stats().locked == 6
    stepper.run()
    assert [request.cached_tokens for request in requests[2:]] == [24, 24]


def test_a_long_cohort_is_computed_once_beyond_the_window() -> None:
    draw = random.Random(3)
    heads = [random_tokens(draw, 8) for _ in range(20)]
    prompts = sorted(head + random_tokens(draw, 4) for head in heads for _ in range(12))
    assert len(prompts) > 3 * WINDOW
    stepper = run(prompts, [3] * len(prompts), cohort=Cohort(), num_blocks=9, max_running=8)
    assert stepper.computed == computed_once(prompts, [3] * len(prompts))
