"""SGLang's frontend over an engine: what forks, streams and batches of its programs share, and when they let it go."""

import pytest
from sglang_programs import GREEDY, TEXT, PhloemBackend, alone, plain, run, sgl

from phloem.radix import Namespace
from phloem.runtime import Engine


def test_forks_share_all_kv(tiny_engine: Engine, backend: PhloemBackend) -> None:
    def forked(s):
        s += TEXT + sgl.gen("before", temperature=1, max_tokens=12, ignore_eos=True)
        kids = s.fork(3)
        for index, kid in enumerate(kids):
            kid += f"{index}:" + sgl.gen("answer", **GREEDY)
        kids.join()
        s += ">so " + sgl.gen("last", **GREEDY)
        return [kid.get_meta_info("answer") for kid in kids], [kid.text() for kid in kids]

    state = run(backend, forked)
    metas, texts = state.ret_value
    shared = len(TEXT) + 1 + 12
    assert [(meta["prompt_tokens"], meta["cached_tokens"]) for meta in metas] == [(shared + 2, shared)] * 3
    assert state["answer"] == [
        text[-len(answer) :] for text, answer in zip(texts, state["answer"], strict=True)
    ]
    assert all(text.startswith(TEXT + state["before"]) for text in texts)
    last = state.get_meta_info("last")
    assert (last["prompt_tokens"], last["cached_tokens"]) == (shared + 4, shared)
    # Every distinct token was computed once: the text, what was generated (but for the last token of each), and 1 for each fork.
    assert tiny_engine.stats().computed_tokens <= shared + 3 * (2 + 8) + (4 + 8) + 1


def test_forks_answer_as_a_cold_engine_does(tiny_engine: Engine, backend: PhloemBackend) -> None:
    def forked(s):
        s += TEXT
        kids = s.fork(2)
        kids += lambda index: f" {index}" + sgl.gen("answer", **GREEDY)
        [inner] = kids[0].fork(1)
        inner += "?" + sgl.gen("inner", **GREEDY)
        inner_text = inner.text()
        kids.join()
        return inner_text

    state = run(backend, forked)
    answers, inner = state["answer"], state.ret_value
    assert answers == [alone(tiny_engine, f"{TEXT} {index}") for index in range(2)]
    assert inner.startswith(f"{TEXT} 0{answers[0]}?")


def test_a_fork_of_one_starts_from_its_parent_too(tiny_engine: Engine, backend: PhloemBackend) -> None:
    def copied(s):
        s += TEXT + sgl.gen("before", temperature=1, max_tokens=12, ignore_eos=True)
        with s.copy() as child:
            child += "!" + sgl.gen("answer", **GREEDY)
            child.sync()
            meta = child.get_meta_info("answer")
        return meta

    meta = run(backend, copied).ret_value
    shared = len(TEXT) + 1 + 12
    assert (meta["prompt_tokens"], meta["cached_tokens"]) == (shared + 1, shared - 1)


def test_forks_begin_after_their_parent_went_on_or_ended(tiny_engine: Engine, backend: PhloemBackend) -> None:
    def left(s):
        s += TEXT + sgl.gen("before", temperature=1, max_tokens=12, ignore_eos=True)
        kids = s.fork(2)
        s += " and " + sgl.gen("after", **GREEDY)
        kids[0] += "!" + sgl.gen("answer", **GREEDY)
        kids[0].sync()
        return kids

    state = run(backend, left)
    kids = state.ret_value
    kids[1] += "!" + sgl.gen("answer", **GREEDY)
    kids[1].sync()
    shared = len(TEXT) + 1 + 12
    for kid in kids.states:
        meta = kid.get_meta_info("answer")
        assert (meta["prompt_tokens"], meta["cached_tokens"]) == (shared + 1, shared)
        kid.stream_executor.end()
    assert kids[0]["answer"] == kids[1]["answer"]


def test_join_appends_the_forks_tokens(tiny_engine: Engine, backend: PhloemBackend) -> None:
    def joined(s):
        s += TEXT
        kids = s.fork(2)
        for kid in kids.states:
            kid += " x" + sgl.gen("answer", temperature=1, max_tokens=12, ignore_eos=True)
        kids.join("concate_and_append")
        s += sgl.gen("last", **GREEDY)

    state = run(backend, joined)
    last = state.get_meta_info("last")
    shared, gained = len(TEXT) + 1, 2 + 12
    # Not encoded again, and the first fork's KV is where it belongs.
    assert last["prompt_tokens"] == shared + 2 * gained
    assert last["cached_tokens"] == shared + gained
    assert state.text().startswith(TEXT + " x")


# Streams and batches


@pytest.mark.parametrize(("text", "size"), [("", 2), (TEXT, 1), ("", 1)])
def test_join_of_forks_that_nothing_was_computed_for(
    tiny_engine: Engine, backend: PhloemBackend, text: str, size: int
) -> None:
    def joined(s):
        s += text
        kids = s.fork(size)
        kids += lambda index: f"{index} and "
        kids.join("concate_and_append")
        s += sgl.gen("last", **GREEDY)

    state = run(backend, joined)
    whole = text + "".join(f"{index} and " for index in range(size))
    assert state.text() == whole + state["last"]
    assert state["last"] == alone(tiny_engine, whole)


def test_a_stream_gives_the_text_in_pieces(tiny_engine: Engine, backend: PhloemBackend) -> None:
    state = plain.run(backend=backend, stream=True)
    pieces = list(state.text_iter("answer"))
    state.sync()
    assert "".join(pieces) == state["answer"] == alone(tiny_engine, TEXT)
    assert state.get_meta_info("answer")["completion_tokens"] == 8
    assert state.get_meta_info("answer")["finish_reason"] == {"type": "length"}
    assert state.text() == TEXT + state["answer"]


def test_a_batch_computes_what_its_programs_share_once(tiny_engine: Engine, backend: PhloemBackend) -> None:
    shared = TEXT * 2

    @sgl.function
    def ask(s, question):
        s += shared
        s += question
        s += sgl.gen("answer", **GREEDY)

    questions = [f" {index}?" for index in range(8)]
    states = ask.run_batch([{"question": each} for each in questions], backend=backend, num_threads=4)
    answers = [state["answer"] for state in states]
    computed = tiny_engine.stats().computed_tokens
    assert answers == [alone(tiny_engine, shared + question) for question in questions]
    assert computed <= 1.02 * (len(shared) + 1 + 8 * (3 + 8))


def test_states_release_their_memory_at_the_end(tiny_engine: Engine, backend: PhloemBackend) -> None:
    states = [plain.run(backend=backend, text=f"{index} {TEXT}") for index in range(3)]
    for state in states:
        state.sync()
    assert tiny_engine.stats().cache.locked == 0, "the states are still there, but ended"
    tiny_engine.check()
    # One that is used again takes its KV from the cache.
    states[0].stream_executor.use_thread = False
    states[0] += "!" + sgl.gen("more", **GREEDY)
    meta = states[0].get_meta_info("more")
    assert meta["cached_tokens"] == 48, "the whole blocks of 54 tokens"
    assert tiny_engine.stats().cache.locked == 0


def test_work_that_is_queued_when_the_function_returns_loses_nothing(
    tiny_engine: Engine, backend: PhloemBackend
) -> None:
    @sgl.function
    def queued(s):
        s += TEXT + sgl.gen("0", **GREEDY)
        for index in range(1, 5):
            s += "!" + sgl.gen(str(index), **GREEDY)
        s += " text after all"

    state = queued.run(backend=backend)
    for index in range(1, 5):
        meta = state.get_meta_info(str(index))
        assert meta["cached_tokens"] == meta["prompt_tokens"] - 2, "what was generated last, and the new text"
    state.sync()
    assert tiny_engine.stats().cache.locked == 0


def test_shutdown_ends_what_is_open(tiny_engine: Engine, backend: PhloemBackend) -> None:
    seen = {}

    def going(s):
        s += TEXT + sgl.gen("answer", **GREEDY)
        seen["locked"] = tiny_engine.stats().cache.locked
        backend.shutdown()
        seen["after"] = tiny_engine.stats().cache.locked

    run(backend, going)
    assert seen["locked"] > 0 == seen["after"]


def test_namespaces_keep_caches_apart(tiny_engine: Engine, backend: PhloemBackend) -> None:
    run(backend, plain.func)
    state = run(PhloemBackend(tiny_engine, namespace=Namespace(salt="b")), plain.func)
    assert state.get_meta_info("answer")["cached_tokens"] == 0
