"""Searches in an event loop: the same trees, and an end at once when they are cancelled."""

import asyncio
import threading

import pytest
from search_trees import PROMPT, sample, shape, worth

from phloem.runtime import Cancelled, Engine, InvalidRequest
from phloem.runtime.frontend.search import (
    Growth,
    Node,
    Propose,
    SearchTree,
    arun,
    breadth_first,
    mcts,
    self_consistency,
)


def test_searches_beside_each_other_find_what_they_find_alone(engine: Engine) -> None:
    expected = []
    for seed in range(3):
        with SearchTree(engine, PROMPT, seed=seed) as tree:
            breadth_first(tree, sample(3), worth, keep=2, depth=3)
            expected.append(shape(tree))

    async def search(seed: int) -> list[object]:
        with SearchTree(engine, PROMPT, seed=seed) as tree:
            leaves = await arun(breadth_first, tree, sample(3), worth, keep=2, depth=3)
            assert leaves == tree.ranked()
            return shape(tree)

    async def main() -> list[object]:
        return await asyncio.gather(*(search(seed) for seed in range(3)))

    assert asyncio.run(main()) == expected


def test_the_loop_goes_on_while_a_search_waits(engine: Engine) -> None:
    asked, answered = threading.Event(), threading.Event()

    def slow(node: Node) -> float:
        asked.set()
        assert answered.wait(60)
        return worth(node)

    async def main() -> None:
        with SearchTree(engine, PROMPT) as tree:
            task = asyncio.ensure_future(arun(mcts, tree, sample(2), slow, expansions=2))
            while not asked.is_set():
                await asyncio.sleep(0.01)
            answered.set()
            assert await task == tree.ranked()

    asyncio.run(main())


def test_a_cancelled_search_ends_at_once_and_can_be_gone_on_with(engine: Engine) -> None:
    with SearchTree(engine, PROMPT, seed=5) as tree:
        breadth_first(tree, sample(3, max_tokens=250), worth, keep=2, depth=2)
        expected = shape(tree)

    async def main() -> None:
        with SearchTree(engine, PROMPT, seed=5) as tree:
            before = engine.stats().generated_tokens
            task = asyncio.ensure_future(
                arun(breadth_first, tree, sample(3, max_tokens=250), worth, keep=2, depth=2)
            )
            while engine.stats().running < 3:
                await asyncio.sleep(0.001)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            stats = engine.stats()
            assert stats.running == stats.waiting == 0
            assert stats.generated_tokens - before < 3 * 250
            assert list(tree.nodes()) == [tree.root]
            await arun(breadth_first, tree, sample(3, max_tokens=250), worth, keep=2, depth=2)
            assert shape(tree) == expected

    asyncio.run(main())


@pytest.mark.parametrize("kind", ["sample", "propose"])
def test_what_was_whole_before_a_cancel_stays(engine: Engine, kind: str) -> None:
    step = sample(3) if kind == "sample" else Propose(lambda nodes: [[" a", " b"]] * len(nodes))
    with SearchTree(engine, PROMPT, seed=5) as tree:
        mcts(tree, step, worth, expansions=4)
        expected = shape(tree)

    async def main() -> None:
        with SearchTree(engine, PROMPT, seed=5) as tree:
            loop = asyncio.get_running_loop()

            def value(node: Node) -> float:
                if node.depth == 2:
                    loop.call_soon_threadsafe(task.cancel)
                    assert interrupted.wait(60)
                return worth(node)

            interrupted = threading.Event()
            interrupt = tree.interrupt
            tree.interrupt = lambda: (interrupt(), interrupted.set())
            task = asyncio.ensure_future(arun(mcts, tree, step, value, expansions=4))
            with pytest.raises(asyncio.CancelledError):
                await task
            assert {node.depth for node in tree.nodes()} == {0, 1}
            mcts(tree, step, worth, expansions=4)
            assert shape(tree) == expected

    asyncio.run(main())


def test_an_interrupt_before_the_first_step_is_seen(engine: Engine) -> None:
    with SearchTree(engine, PROMPT) as tree:
        tree.interrupt()
        with pytest.raises(Cancelled, match="goes on where it was"):
            self_consistency(tree, sample(3), lambda text: text)
        tree.end_interrupt()
        assert len(self_consistency(tree, sample(3), lambda text: text).votes) >= 1


def test_a_search_of_ones_own_and_its_errors(engine: Engine) -> None:
    def own(tree: SearchTree, *, count: int) -> int:
        with Growth(tree, sample(count), worth) as growth:
            growth.add(tree.root)
            growth.run()
        return len(tree.root.children)

    async def main() -> None:
        with SearchTree(engine, PROMPT) as tree:
            assert await arun(own, tree, count=3) == 3
            with pytest.raises(InvalidRequest, match="depth"):
                await arun(breadth_first, tree, sample(2), worth, keep=1, depth=0)

    asyncio.run(main())
