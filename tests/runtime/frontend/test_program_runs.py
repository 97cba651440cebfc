"""Running programs: once, in an event loop, as a stream, over many inputs; what ends with them, and what they leave."""

import asyncio
import io
import json
import sys
import threading
from pathlib import Path

import pytest
from small_programs import GREEDY, TEXT, plain, run

from phloem.runtime import BranchReleased, Engine, InvalidRequest, UnknownCapture
from phloem.runtime.frontend.program import Run, State, program
from phloem.runtime.frontend.program.choose import KnownOptions


def test_a_run_ends_its_branches(tiny_engine: Engine) -> None:
    kept = []

    def fails(s: State) -> None:
        s += TEXT
        s.gen(**GREEDY)
        kept.append(s)
        raise ZeroDivisionError("the program's own")

    with pytest.raises(ZeroDivisionError):
        run(tiny_engine, fails)
    with pytest.raises(BranchReleased, match="or its run, ended"):
        kept[0].gen()
    with pytest.raises(BranchReleased):
        kept[0] += "text"
    assert tiny_engine.stats().cache.locked == 0


def test_asynchronous_programs(tiny_engine: Engine) -> None:
    @program
    async def aplain(s: State) -> list[str]:
        s += TEXT
        await s.agen("answer", **GREEDY)
        await s.aselect("colour", [" red", " blue"])
        await s.ascore(["a"])
        async with s.fork([" a", " b"]) as kids:
            return await kids.agen("kid", **GREEDY)

    def same(s: State) -> list[str]:
        s += TEXT
        s.gen("answer", **GREEDY)
        s.select("colour", [" red", " blue"])
        with s.fork([" a", " b"]) as kids:
            return kids.gen("kid", **GREEDY)

    expected = run(tiny_engine, same)
    for done in (aplain.run(tiny_engine), asyncio.run(aplain.arun(tiny_engine))):
        assert done.value == expected.value
        assert done.token_ids == expected.token_ids
    assert asyncio.run(plain.arun(tiny_engine))["answer"] == plain.run(tiny_engine)["answer"]


@pytest.mark.parametrize("kind", ["thread", "loop"])
def test_cancelling_a_run_ends_what_it_generates(tiny_engine: Engine, kind: str) -> None:
    async def slow_loop(s: State) -> None:
        s += TEXT
        await s.agen(max_tokens=3000, ignore_eos=True)

    def slow_thread(s: State) -> None:
        s += TEXT
        s.gen(max_tokens=3000, ignore_eos=True)

    async def cancel() -> None:
        task = asyncio.ensure_future(program(slow_loop if kind == "loop" else slow_thread).arun(tiny_engine))
        while not tiny_engine.stats().running:
            await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        while tiny_engine.stats().running:
            await asyncio.sleep(0.01)

    tiny_engine_blocks = tiny_engine.stats().cache.locked
    asyncio.run(cancel())
    assert tiny_engine.stats().cache.locked == tiny_engine_blocks == 0


def test_streaming_gives_the_pieces_and_then_the_run(tiny_engine: Engine) -> None:
    *pieces, last = plain.stream(tiny_engine)
    assert "".join(piece.text for piece in pieces) == last.run["answer"] == plain.run(tiny_engine)["answer"]
    assert {piece.name for piece in pieces} == {"answer"}

    async def collect() -> list[str]:
        return [piece.text or piece.run["answer"] async for piece in plain.astream(tiny_engine)]

    found = asyncio.run(collect())
    assert "".join(found[:-1]) == found[-1] == last.run["answer"]


def test_leaving_a_stream_ends_the_run(tiny_engine: Engine) -> None:
    @program
    def endless(s: State) -> None:
        s += TEXT
        s.gen("answer", max_tokens=3000, ignore_eos=True)

    stream = endless.stream(tiny_engine)
    next(stream)
    stream.close()
    while tiny_engine.stats().running:
        pass
    assert tiny_engine.stats().generated_tokens < 3000

    def fails(s: State) -> None:
        s += TEXT
        s.gen(temperature=-1)

    with pytest.raises(InvalidRequest, match="in fails"):
        list(program(fails).stream(tiny_engine))


SHARED = "A text that all inputs share, long enough for several blocks and then a part of one. "


@program
def ask(s, number, of="inputs"):
    s += SHARED
    s += f"{number} {of}"
    if number == 3:
        raise ZeroDivisionError("three")
    s.gen("answer", **GREEDY)


def test_map_gives_the_runs_in_order_and_computes_what_they_share_once(tiny_path: Path) -> None:
    inputs = [f"{number} of a thousand" for number in range(10, 1010)]
    with Engine(tiny_path, dtype="float32", num_blocks=4096) as engine:
        runs = ask.map(engine, inputs, concurrency=16)
        shared = len(SHARED) + 1
        assert sum(each.usage.prompt_tokens for each in runs) > 1000 * (shared + 20)
        assert sum(each.usage.computed_tokens for each in runs) < shared + sum(
            len(f"{each} inputs") for each in inputs
        )
        for number in (0, 1, 500, 999):
            assert runs[number].captures == ask.run(engine, inputs[number]).captures


def test_map_takes_single_arguments_tuples_and_mappings(tiny_engine: Engine) -> None:
    runs = ask.map(tiny_engine, [1, (2, "things"), {"number": 4, "of": "all"}])
    for each, end in zip(runs, ["1 inputs", "2 things", "4 all"], strict=True):
        assert each.text == f"<|bos|>{SHARED}{end}{each['answer']}"


def test_a_failing_input_does_not_stop_the_others(tiny_engine: Engine) -> None:
    runs = ask.map(tiny_engine, [1, 2, 3, 4], concurrency=2)
    assert [type(each.error) for each in runs] == [type(None), type(None), ZeroDivisionError, type(None)]
    assert runs[2].text.endswith("3 inputs")
    with pytest.raises(ZeroDivisionError):
        runs[2]["answer"]
    with pytest.raises(UnknownCapture):
        runs[1]["question"]
    with pytest.raises(ZeroDivisionError, match="three"):
        ask.map(tiny_engine, [1, 2, 3, 4], concurrency=2, on_error="raise")


def test_an_error_that_is_to_stop_the_others_does(tiny_engine: Engine) -> None:
    started = threading.Event()

    @program
    def some(s: State, number: int) -> None:
        s += TEXT
        if number == 0:
            started.wait()
            raise ZeroDivisionError
        started.set()
        s.gen(max_tokens=3000, ignore_eos=True)

    with pytest.raises(ZeroDivisionError):
        some.map(tiny_engine, [0, 1], concurrency=2, on_error="raise")
    assert tiny_engine.stats().running == 0


def test_amap_is_map_for_an_event_loop(tiny_engine: Engine) -> None:
    @program
    async def aask(s: State, number: int) -> None:
        s += SHARED
        s += f"{number} inputs"
        if number == 3:
            raise ZeroDivisionError("three")
        await s.agen("answer", **GREEDY)

    expected = ask.map(tiny_engine, [1, 2, 3, 4])
    for each in (ask, aask):
        found = asyncio.run(each.amap(tiny_engine, [1, 2, 3, 4], concurrency=2))
        assert [one.captures for one in found] == [one.captures for one in expected]
        with pytest.raises(ZeroDivisionError):
            asyncio.run(each.amap(tiny_engine, [1, 2, 3, 4], on_error="raise"))
    assert [one.captures for one in aask.map(tiny_engine, [1, 2])] == [one.captures for one in expected[:2]]


@program
def everything(s, number):
    s += SHARED
    mark = s.mark()
    s += f"{number} "
    s.gen("drawn", seed=number, max_tokens=9, ignore_eos=True)
    s.select("chosen", [" red", " green", " blue"], by="pmi")
    with s.fork([" a", " bb", " ccc"]) as kids:
        kids.gen("kid", seed=number, max_tokens=7, ignore_eos=True)
        s["kids"] = kids["kid"]
        s.adopt(kids[number % 3])
    s.gen("several", n=2, seed=1, max_tokens=5, ignore_eos=True)
    s["long"] = s.token_ids
    s.rewind(mark)
    s.gen("rewound", **GREEDY)
    return s["rewound"]


def test_answers_are_those_of_a_cold_engine_also_when_memory_is_short(tiny_path: Path) -> None:
    def outcomes(runs: list[Run]) -> list[tuple[object, ...]]:
        return [(run.value, run.captures, run.token_ids) for run in runs]

    options = {"dtype": "float32", "max_model_len": 256}
    with Engine(tiny_path, num_blocks=1024, prefix_cache=False, **options) as cold:
        expected = outcomes(everything.map(cold, range(6), concurrency=1))
        assert cold.stats().cache.hit_tokens == 0
    with Engine(tiny_path, num_blocks=24, **options) as warm:
        assert outcomes(everything.map(warm, range(6), concurrency=6)) == expected
        stats = warm.stats()
        warm.check()
    assert stats.cache.evictions > 0, "or memory was not short"
    assert stats.cache.hits > 20
    assert stats.cache.locked == 0


class Terminal(io.StringIO):
    """What standard error is at a desk."""

    def isatty(self) -> bool:
        return True


def test_a_progress_bar_on_a_terminal_only(tiny_engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    for stream, progress, is_shown in (
        (Terminal(), True, True),
        (Terminal(), False, False),
        (io.StringIO(), True, False),
    ):
        monkeypatch.setattr("sys.stderr", stream)
        monkeypatch.setenv("TERM", "xterm")
        ask.map(tiny_engine, [1, 2], progress=progress)
        assert ("ask" in stream.getvalue()) is is_shown


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"inputs": "text"}, "inputs must be a list"),
        ({"inputs": [1], "concurrency": 0}, "concurrency must be a whole number from 1 to 1024"),
        ({"inputs": [1], "on_error": "ignore"}, "on_error must be"),
    ],
)
def test_arguments_of_map_that_are_wrong(
    tiny_engine: Engine, arguments: dict[str, object], message: str
) -> None:
    with pytest.raises(InvalidRequest, match=message):
        ask.map(tiny_engine, **arguments)
    with pytest.raises(InvalidRequest, match=r"ask.run\(engine, ...\), not on str"):
        ask.run("engine", 1)


def traced(tiny_engine: Engine) -> Run:
    def work(s: State) -> None:
        s += TEXT
        s.gen("answer", **GREEDY)
        s.select("colour", [" red", " blue"])
        with s.fork(2) as kids:
            kids.gen("kid", **GREEDY)

    return run(tiny_engine, work)


def test_the_trace_as_a_tree(tiny_engine: Engine) -> None:
    done = traced(tiny_engine)
    head, *lines = str(done.trace).splitlines()
    usage = done.usage
    assert (
        head
        == f"work: {usage.prompt_tokens} tokens in, {usage.cached_tokens} cached, {usage.completion_tokens} out"
    )
    assert [line.split("]")[0].strip() + "] " + line.split()[1] for line in lines] == [
        "[0] text", "[0] gen", "[0] select", "[0] fork", "[0.0] gen", "[0.1] gen",
    ]  # fmt: skip
    assert lines[1].split()[2:9] == ["answer", "44", "in", "0", "cached", "8", "out"]
    assert lines[4].startswith("    [0.0] gen kid")
    assert done.trace.steps[1].line.startswith("test_program_runs.py:")


def test_the_trace_for_chrome_and_perfetto(tiny_engine: Engine, tmp_path: Path) -> None:
    trace = traced(tiny_engine).trace
    trace.save(tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert [each["args"]["name"] for each in events if each["ph"] == "M"] == [
        "state 0",
        "state 0.0",
        "state 0.1",
    ]
    spans = [each for each in events if each["ph"] == "X"]
    assert [each["name"] for each in spans][:3] == ["text", "gen answer", "select colour"]
    assert spans[1]["args"].items() >= {"in": 44, "cached": 0, "out": 8}.items()
    assert all(each["dur"] >= 0 and each["ts"] >= 0 for each in spans)


def test_a_step_that_fails_says_so(tiny_engine: Engine) -> None:
    @program
    def fails(s: State) -> None:
        s += TEXT
        s.gen("x", regex="(")

    [failed] = fails.map(tiny_engine, [()])
    assert failed.trace.steps[-1].error == "GrammarError"
    assert str(failed.trace).endswith("GrammarError")


def num_distinct(paths: list[list[int]]) -> int:
    """The tokens of the tree that the paths make."""
    nodes: dict[tuple[int, int], int] = {}
    for path in paths:
        node = 0
        for token in path:
            node = nodes.setdefault((node, token), len(nodes) + 1)
    return len(nodes)


@pytest.mark.model
@pytest.mark.slow
def test_256_inputs_compute_their_shared_thousand_tokens_once(smollm2_path: Path) -> None:
    """The number that is promised: at most 1.02 times the distinct tokens."""

    @program
    def count(s: State, number: int) -> None:
        s += shared
        s += f"\n\nQ: What follows {number} and {number * 7 % 1000}, when the steps between numbers stay the same?\nA:"
        s.gen("answer", max_tokens=4, temperature=0)

    with Engine(smollm2_path) as engine:
        words = engine.tokenizer.encode(
            " ".join(f"word{n} and its number {n * 37 % 1001}." for n in range(100))
        )
        shared = engine.tokenizer.decode(words[:1000])
        before = engine.stats().computed_tokens
        runs = count.map(engine, range(256), progress=False)
        computed = engine.stats().computed_tokens - before
        distinct = num_distinct([run.token_ids for run in runs])
        assert distinct > 1000 + 256 * 20
        assert computed <= 1.02 * distinct
        engine.check()


def test_a_step_tells_its_line_in_a_call_of_several(tiny_engine: Engine) -> None:
    @program
    def spread(s: State) -> int:
        s += "text"
        s.gen(
            "x",
            max_tokens=1,
        )
        return sys._getframe().f_lineno

    done = spread.run(tiny_engine)
    lines = [int(step.line.partition(":")[2].partition(",")[0]) for step in done.trace.steps]
    assert lines == [done.value - 5, done.value - 4]


def test_options_that_a_program_chooses_from_again_are_tokenised_once(tiny_engine: Engine) -> None:
    known = KnownOptions(tiny_engine.tokenizer.encode_continuation)
    first = known.of([" yes", " no"], "sum")
    assert [list(each) for each in first.ids] == [
        tiny_engine.tokenizer.encode_continuation(each) for each in (" yes", " no")
    ]
    assert known.of((" yes", " no"), "mean") is first
    assert known.of([" no", " yes"], "sum").texts == (" no", " yes")
    for _ in range(2):
        with pytest.raises(InvalidRequest, match="as options"):
            known.of([" no", " no"], "sum")
