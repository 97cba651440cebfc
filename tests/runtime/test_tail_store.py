"""Kept tails: prompts that end inside a block hit to the token, and nobody reads a stale one."""

from array import array

import pytest
from stepping import Stepper

from phloem.radix import Namespace
from phloem.runtime.tail_store import Tail, TailStore

HERE = (Namespace(), None, 0)


def tail(block: int, *tokens: int, place: tuple[Namespace, int | None, int] = HERE) -> Tail:
    return Tail(place, array("i", tokens), block)


def find(
    store: TailStore, *tokens: int, place: tuple[Namespace, int | None, int] = HERE
) -> tuple[int, int] | None:
    found = store.find(place, array("i", tokens))
    return None if found is None else (found[0].block, found[1])


def test_the_longest_agreement_is_found_at_its_own_place_only() -> None:
    store = TailStore(8)
    assert store.keep(tail(1, 5, 6, 7)) == []
    assert store.keep(tail(2, 5, 8)) == []
    assert find(store, 5, 6, 9) == (1, 2)
    assert find(store, 5, 8, 9) == (2, 2)
    assert find(store, 4) is None
    assert find(store, 5, place=(Namespace(salt="a"), None, 0)) is None
    assert find(store, 5, place=(Namespace(), 3, 0)) is None


def test_a_longer_tail_replaces_its_beginning_and_a_shorter_one_is_not_kept() -> None:
    store = TailStore(8)
    store.keep(tail(1, 5, 6))
    assert store.keep(tail(2, 5, 6, 7)) == [1]
    assert store.keep(tail(3, 5)) == [3]
    assert len(store) == 1


def test_the_one_used_longest_ago_goes_first() -> None:
    store = TailStore(2)
    store.keep(tail(1, 1))
    store.keep(tail(2, 2))
    used, _ = store.find(HERE, array("i", [1]))
    store.touch(used)
    assert store.keep(tail(3, 3)) == [2]
    assert store.pop_oldest() == 1
    assert store.num_dropped == 2
    assert store.clear() == [3]
    assert len(store) == 0


@pytest.mark.parametrize("length", range(1, 12))
def test_every_repeated_prompt_computes_one_token(length: int) -> None:
    stepper = Stepper(num_blocks=32, block_size=4)
    for _ in range(2):
        request = stepper.add(list(range(length)))
        stepper.run()
    assert request.cached_tokens == length - 1
    assert stepper.computed == length + 1


def test_clearing_forgets_tails_too() -> None:
    stepper = Stepper(num_blocks=32, block_size=4)
    stepper.add([1, 2, 3])
    stepper.run()
    assert len(stepper.paths.tails) == 1
    stepper.paths.clear()
    request = stepper.add([1, 2, 3])
    stepper.run()
    assert request.cached_tokens == 0
    assert stepper.cache.stats().private == len(stepper.paths.tails)


def test_a_tail_whose_path_was_evicted_is_not_found_even_if_its_block_id_comes_back() -> None:
    stepper = Stepper(num_blocks=32, block_size=4)
    stepper.add([1, 2, 3, 4, 5, 6])
    stepper.run()
    stepper.cache.evict(32)
    # The same block id, as the beginning of another path; the stepper checks every row that is read.
    for start in range(50, 90, 4):
        stepper.add([start, start + 1, start + 2, start + 3, 5, 6])
    stepper.run()


def test_tails_make_room_before_any_branch_is_suspended() -> None:
    stepper = Stepper(num_blocks=4, block_size=4)
    stepper.add([1, 2, 3])
    stepper.run()
    assert len(stepper.paths.tails) == 1
    stepper.add(list(range(20, 36)))
    stepper.run()
    assert not stepper.refused
    assert len(stepper.paths.tails) == 0
