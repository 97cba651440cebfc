"""SGLang's own frontend, unchanged, on the server: each thing that its programs can do, and the same outcome as in the process."""

import asyncio
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any

import pytest
from live_server import LiveServer, live_server
from sglang_programs import (
    CHOICES,
    GREEDY,
    METHODS,
    TEXT,
    PhloemBackend,
    alone,
    check_typed,
    plain,
    run,
    sgl,
    typed,
)

from phloem.runtime import Engine

LIMIT_S = 60


@pytest.fixture
def endpoint(server: LiveServer) -> Iterator[Any]:
    """The client, as the default backend of all programs."""
    endpoint = sgl.RuntimeEndpoint(server.url, chat_template_name="chatml")
    sgl.set_default_backend(endpoint)
    yield endpoint
    sgl.set_default_backend(None)


def in_time(work: Callable[[], Any]) -> Any:
    """Do something with states that have threads: after an error in one, the client would wait for ever."""
    future: Future[Any] = Future()

    def do() -> None:
        try:
            future.set_result(work())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=do, daemon=True).start()
    return future.result(timeout=LIMIT_S)


def computed(server: LiveServer) -> int:
    server.wait_until_idle()
    return server.engine.stats().computed_tokens


# Without a program


def test_the_client_learns_of_the_model_and_orders(server: LiveServer, endpoint: Any) -> None:
    assert endpoint.get_model_name() == "tiny"
    server.engine.generate(TEXT)
    sgl.flush_cache()
    assert server.engine.stats().cache.nodes == 0
    assert sgl.get_server_info()["context_length"] == 4096
    endpoint.cache_prefix(TEXT)
    assert plain.run(use_thread=False).get_meta_info("answer")["cached_tokens"] == len(TEXT)


def test_keys_are_sent(engine: Engine) -> None:
    with live_server(engine, api_keys=("key-of-alice",), admin_key="key-of-the-admin") as server:
        with pytest.raises(RuntimeError, match="API key"):
            sgl.RuntimeEndpoint(server.url)
        alice = sgl.RuntimeEndpoint(server.url, api_key="key-of-alice")
        assert run(alice, plain.func)["answer"]
        with pytest.raises(RuntimeError, match="admin"):
            alice.flush_cache()
        sgl.RuntimeEndpoint(server.url, api_key="key-of-the-admin").flush_cache()


# Generating


def test_a_program_gives_what_the_engine_gives(server: LiveServer, endpoint: Any) -> None:
    state = in_time(plain.run)
    answer = in_time(lambda: state["answer"])
    assert in_time(state.text) == TEXT + answer
    meta = state.get_meta_info("answer")
    assert (meta["prompt_tokens"], meta["completion_tokens"]) == (len(TEXT) + 1, 8)
    assert meta["finish_reason"]["type"] == "length"
    assert answer == alone(server.engine, TEXT)


def test_options_stops_and_log_probabilities(endpoint: Any) -> None:
    def told(s):
        s += TEXT + sgl.gen("free", temperature=0, max_tokens=30)
        s += TEXT + sgl.gen(
            "told", return_logprob=True, top_logprobs_num=2, return_text_in_logprobs=True, logprob_start_len=40, **GREEDY
        )  # fmt: skip
        s += sgl.gen(
            "sampled", temperature=1.1, top_k=5, top_p=0.9, min_p=0.01, frequency_penalty=0.1, max_tokens=4
        )

    state = run(endpoint, told)
    meta = state.get_meta_info("told")
    assert len(meta["output_token_logprobs"]) == len(meta["output_top_logprobs"]) == 8
    assert "".join(text for _, _, text in meta["input_token_logprobs"][-5:]) == TEXT[-5:]
    stop = state["free"][4:6]
    cut = run(endpoint, lambda s: s.__iadd__(TEXT + sgl.gen("cut", temperature=0, max_tokens=30, stop=stop)))
    assert cut["cut"] == state["free"][: state["free"].index(stop)]


def test_regex_types_and_schemas(endpoint: Any) -> None:
    check_typed(run(endpoint, typed.func))


def test_roles(endpoint: Any) -> None:
    def chat(s):
        s += sgl.system("Be short.")
        s += sgl.user("Hello")
        s += sgl.assistant(sgl.gen("first", temperature=0, regex="[a-z]{6}"))
        s += sgl.user("And?")
        with s.assistant():
            s += sgl.gen("second", temperature=0, max_tokens=8)

    state = run(endpoint, chat)
    assert state.text().startswith(
        f"<|im_start|>system\nBe short.<|im_end|>\n<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n{state['first']}<|im_end|>"
    )
    assert state.messages()[2] == {"role": "assistant", "content": state["first"]}
    first, second = (state.get_meta_info(name) for name in ("first", "second"))
    assert second["cached_tokens"] >= first["prompt_tokens"] + first["completion_tokens"] - 1


# Choosing


@pytest.mark.parametrize("name", METHODS)
def test_select_decides_as_in_the_process(server: LiveServer, endpoint: Any, name: str) -> None:
    inside = PhloemBackend(server.engine)
    for text in (TEXT, "Is it? ", "A b\u00e9b\u00e9, une \u00e9tude: caf\u00e9", "Na\u00efve \U0001f600"):

        def choose(s, text=text):
            s += text
            s += sgl.select("choice", CHOICES, choices_method=METHODS[name])
            s += sgl.gen("next", **GREEDY)

        there, here = run(endpoint, choose), run(inside, choose)
        assert there["choice"] == here["choice"]
        assert there["next"] == here["next"]
        meta, expected = there.get_meta_info("choice"), here.get_meta_info("choice")
        for key in ("normalized_prompt_logprobs", "normalized_unconditional_prompt_logprobs"):
            if key in expected:
                assert meta[key] == pytest.approx(expected[key])
        assert [[tuple(entry) for entry in option] for option in meta["input_token_logprobs"]] == [
            [(logprob, token_id, piece) for (logprob, token_id, _), piece in zip(option, choice, strict=True)]
            for option, choice in zip(expected["input_token_logprobs"], CHOICES, strict=True)
        ]


def test_a_choice_after_hardly_a_word(endpoint: Any) -> None:
    # Only by the default method: the others fail in the client on the first token, of which there is no log-probability.
    state = run(endpoint, lambda s: s.__iadd__("a" + sgl.gen("choice", choices=CHOICES)))
    assert state["choice"] in CHOICES


def test_choices_share_the_state(server: LiveServer, endpoint: Any) -> None:
    endpoint.flush_cache()
    before = computed(server)
    run(endpoint, lambda s: s.__iadd__(TEXT + sgl.gen("choice", choices=CHOICES)))
    assert computed(server) - before <= len(TEXT) + 1 + sum(len(choice) + 1 for choice in CHOICES)


# Forks


def test_forks_and_their_joins(server: LiveServer, endpoint: Any) -> None:
    def forked(s, mode):
        s += TEXT
        forks = s.fork(3)
        forks += lambda index: f" The number {index}:"
        for fork in forks:
            fork += sgl.gen("part", regex="[a-z]{4}", temperature=0)
        forks.join(mode)
        s += "."
        s += sgl.gen("end", **GREEDY)

    endpoint.flush_cache()
    before = computed(server)
    state = in_time(lambda: sgl.function(forked).run("gather_variable", backend=endpoint))
    in_time(state.sync)
    parts = state["part"]
    assert len(parts) == 3
    assert state.text() == f"{TEXT}.{state['end']}"
    # The first text once, and of each fork what it added: its words and its answer.
    assert computed(server) - before <= len(TEXT) + 3 * (len(" The number 0:") + 1 + 4) + 10
    joined = in_time(lambda: sgl.function(forked).run("concate_and_append", backend=endpoint))
    in_time(joined.sync)
    added = "".join(f" The number {index}:{part}" for index, part in enumerate(parts))
    assert joined.text() == f"{TEXT}{added}.{joined['end']}"


def test_a_copy_leaves_the_state_as_it_is(endpoint: Any) -> None:
    def copied(s):
        s += TEXT
        with s.copy() as aside:
            aside += " aside" + sgl.gen("aside", **GREEDY)
        s += sgl.gen("answer", **GREEDY)

    state = in_time(lambda: sgl.function(copied).run(backend=endpoint))
    answer = in_time(lambda: state["answer"])
    assert state.text() == TEXT + answer
    assert answer == run(endpoint, plain.func)["answer"]


def test_a_fork_of_nothing(endpoint: Any) -> None:
    def forked(s):
        for fork in s.fork(2):
            fork += TEXT + sgl.gen("part", **GREEDY)

    in_time(sgl.function(forked).run(backend=endpoint).sync)


# Streams and batches


def test_a_stream_is_the_text_in_pieces(endpoint: Any) -> None:
    @sgl.function
    def long(s):
        s += TEXT + sgl.gen("answer", temperature=0, max_tokens=20, ignore_eos=True) + "!"

    whole = in_time(lambda: long.run()["answer"])
    state = long.run(stream=True)
    pieces = in_time(lambda: list(state.text_iter()))
    assert "".join(pieces) == f"{TEXT}{whole}!"
    assert len(pieces) > 5

    async def read() -> str:
        state = long.run(stream=True)
        return "".join([piece async for piece in state.text_async_iter(var_name="answer")])

    assert in_time(lambda: asyncio.run(read())) == whole
    assert in_time(lambda: state.get_meta_info("answer"))["completion_tokens"] == 20


def test_a_batch_computes_its_common_beginning_once(server: LiveServer, endpoint: Any) -> None:
    beginning = "The same words before each of all the questions that will be asked here. " * 2
    words = [f"question {index}?" for index in range(8)]

    @sgl.function
    def ask(s, word):
        s += beginning + word
        s += sgl.gen("answer", **GREEDY)

    endpoint.flush_cache()
    before = computed(server)
    states = in_time(lambda: ask.run_batch([{"word": word} for word in words], num_threads=8))
    answers = in_time(lambda: [state["answer"] for state in states])
    assert computed(server) - before <= len(beginning) + 1 + 8 * (len(words[0]) + 16 + 8)
    for word, answer in zip(words, answers, strict=True):
        assert answer == alone(server.engine, beginning + word)


# Errors


def test_what_is_refused_is_told_by_its_message(endpoint: Any) -> None:
    with pytest.raises(RuntimeError, match="temperature must be a finite number of at least 0"):
        run(endpoint, lambda s: s.__iadd__(TEXT + sgl.gen("answer", temperature=-1)))
    with pytest.raises(RuntimeError, match="5001 tokens; at most 4095"):
        run(endpoint, plain.func, text="x" * 5000)
    assert run(endpoint, plain.func)["answer"], "and the next one is served"
