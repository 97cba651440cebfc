"""Forks of a program's state: children that share everything, and end with their block."""

import asyncio

import pytest
from small_programs import GREEDY, TEXT, run

from phloem.runtime import BranchReleased, Engine, InvalidRequest, ProgramError, SamplingParams
from phloem.runtime.frontend.program import Fork, State


def test_children_share_the_path_and_compute_only_their_own_text(tiny_engine: Engine) -> None:
    words = [" owls", " bees", " whales"]

    def forked(s: State) -> list[str]:
        s += TEXT
        with s.fork(words) as kids:
            assert len(kids) == 3
            found = kids.gen("word", **GREEDY)
            assert found == kids["word"]
            s += "\n" + kids.join("word", ", ")
        return found

    done = run(tiny_engine, forked)
    gens = [step for step in done.trace.steps if step.operation == "gen"]
    computed = sorted(step.tokens_in - step.cached for step in gens)
    assert all(count <= size for count, size in zip(computed, (5, 5, 7), strict=True)), (
        "even their space is shared"
    )
    for word, found in zip(words, done.value, strict=True):
        [alone] = tiny_engine.generate(TEXT + word, SamplingParams(**GREEDY))
        assert found == alone.text
    assert done.text == f"<|bos|>{TEXT}\n{', '.join(done.value)}"


def test_a_state_that_is_empty_can_be_forked(tiny_engine: Engine) -> None:
    def forked(s: State) -> list[str]:
        with s.fork([TEXT, TEXT + "s"]) as kids:
            return kids.gen(**GREEDY)

    [alone] = tiny_engine.generate(TEXT, SamplingParams(**GREEDY))
    assert run(tiny_engine, forked).value[0] == alone.text


def test_children_draw_differently_and_the_same_each_time(tiny_engine: Engine) -> None:
    def drawn(s: State) -> list[str]:
        s += TEXT
        with s.fork(4) as kids:
            return kids.gen(seed=3, max_tokens=8, ignore_eos=True)

    first = run(tiny_engine, drawn).value
    assert first == run(tiny_engine, drawn).value
    assert len(set(first)) == 4


def test_captures_go_down_but_not_up(tiny_engine: Engine) -> None:
    def forked(s: State) -> None:
        s["mine"] = 1
        s += TEXT
        with s.fork(2) as kids:
            for number, kid in enumerate(kids):
                kid["number"] = number
            assert kids["number"] == [0, 1]
            assert kids["mine"] == [1, 1]
        assert s.captures == {"mine": 1}

    run(tiny_engine, forked)


def test_a_fork_after_its_context(tiny_engine: Engine) -> None:
    def after(s: State) -> None:
        s += TEXT
        with s.fork(2) as kids:
            kids.gen(**GREEDY)
        kids[1].gen(**GREEDY)

    def without(s: State) -> None:
        s += TEXT
        s.fork(2)[0].gen()

    def twice(s: State) -> None:
        s += TEXT
        with s.fork(2) as kids, kids:
            pass

    with pytest.raises(BranchReleased, match=r"`with` block, or its run, ended; use it inside .*in after"):
        run(tiny_engine, after)
    with pytest.raises(ProgramError, match=r"with s.fork\(...\) as kids .*in without"):
        run(tiny_engine, without)
    with pytest.raises(ProgramError, match=r"entered once; fork again .*in twice"):
        run(tiny_engine, twice)


def test_leaving_the_block_cancels_and_releases_the_children(tiny_engine: Engine) -> None:
    async def leaving(s: State) -> None:
        s += TEXT
        async with s.fork(3) as kids:
            tasks = [asyncio.ensure_future(kid.agen(max_tokens=3000, ignore_eos=True)) for kid in kids]
            await asyncio.sleep(0.05)
        found = await asyncio.gather(*tasks, return_exceptions=True)
        assert {type(each).__name__ for each in found} == {"Cancelled"}
        while tiny_engine.stats().running:
            await asyncio.sleep(0.01)
        assert tiny_engine.stats().cache.locked <= 3, "the parent's"
        await s.agen("answer", **GREEDY)

    [alone] = tiny_engine.generate(TEXT, SamplingParams(**GREEDY))
    assert run(tiny_engine, leaving)["answer"] == alone.text


@pytest.mark.parametrize("kind", ["each", "aeach"])
def test_an_error_in_one_child_ends_the_others(tiny_engine: Engine, kind: str) -> None:
    def work(kid: State) -> None:
        if kid.render().endswith("b"):
            raise ZeroDivisionError
        kid.gen(max_tokens=3000, ignore_eos=True)

    async def awork(kid: State) -> None:
        if kid.render().endswith("b"):
            raise ZeroDivisionError
        await kid.agen(max_tokens=3000, ignore_eos=True)

    def forked(s: State) -> None:
        s += TEXT
        with s.fork(["a", "b", "c"]) as kids:
            kids.each(work)

    async def aforked(s: State) -> None:
        s += TEXT
        async with s.fork(["a", "b", "c"]) as kids:
            await kids.aeach(awork)

    with pytest.raises(ZeroDivisionError):
        run(tiny_engine, forked if kind == "each" else aforked)
    while tiny_engine.stats().running:
        pass


def test_a_wrong_option_for_all_children_names_the_line(tiny_engine: Engine) -> None:
    def wrong(s: State) -> None:
        s += TEXT
        with s.fork(2) as kids:
            kids.gen(temperature=-1)

    with pytest.raises(InvalidRequest, match=r"test_program_fork.py:\d+, in wrong\)$"):
        run(tiny_engine, wrong)


def test_the_parent_can_go_on_from_a_child(tiny_engine: Engine) -> None:
    def best(s: State) -> None:
        s += TEXT
        with s.fork([" one", " two"]) as kids:
            kids.gen("answer", **GREEDY)
            s.adopt(kids[1])
            with pytest.raises(BranchReleased):
                kids[1].gen()
        s.gen("more", **GREEDY)

    def straight(s: State) -> None:
        s += TEXT
        s += " two"
        s.gen("answer", **GREEDY)
        s.gen("more", **GREEDY)

    done = run(tiny_engine, best)
    last = done.trace.steps[-1]
    assert last.tokens_in - last.cached == 1, "all of the child's KV is kept"
    assert done.token_ids == run(tiny_engine, straight).token_ids
    assert done["answer"] == run(tiny_engine, straight)["answer"]

    def stranger(s: State) -> None:
        s += TEXT
        with s.fork(2) as kids:
            kids[0].adopt(kids[1])

    with pytest.raises(ProgramError, match=r"state 0.1 is no fork of state 0.0"):
        run(tiny_engine, stranger)


def test_forks_of_forks(tiny_engine: Engine) -> None:
    def deep(s: State) -> int:
        s += TEXT
        with s.fork(2) as kids:
            for kid in kids:
                kid += "."
                with kid.fork(2) as grandkids:
                    assert isinstance(grandkids, Fork)
                    grandkids.gen("leaf", **GREEDY)
                    kid["leaves"] = grandkids["leaf"]
            return sum(len(leaves) for leaves in kids["leaves"])

    done = run(tiny_engine, deep)
    assert done.value == 4
    assert {step.state for step in done.trace.steps} == {
        "0",
        "0.0",
        "0.1",
        "0.0.0",
        "0.0.1",
        "0.1.0",
        "0.1.1",
    }
