"""SGLang's frontend on the server with the real model: the outcome of its programs is that in the process."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from live_server import LiveServer, live_server
from sglang_programs import METHODS, PhloemBackend, run, sgl

from phloem.runtime import Engine

pytestmark = [pytest.mark.slow, pytest.mark.model]

PLACES = [" in Europe", " in Asia", " in South America", " in Africa"]
COUNTRIES = ["France", "Japan", "Peru", "Kenya"]


@pytest.fixture(scope="module")
def server(smollm2_path: Path) -> Iterator[LiveServer]:
    with Engine(smollm2_path, num_blocks=1024) as engine, live_server(engine) as server:
        yield server
        server.wait_until_idle()


@pytest.fixture
def endpoint(server: LiveServer) -> Any:
    return sgl.RuntimeEndpoint(server.url, chat_template_name="chatml")


def place(s, country, method):
    s += f"Chile lies in South America. China lies in Asia.\n{country} lies"
    s += sgl.select("place", PLACES, choices_method=method)


def test_select_decides_as_in_the_process(server: LiveServer, endpoint: Any) -> None:
    inside = PhloemBackend(server.engine)
    decided = set()
    for method in METHODS.values():
        for country in COUNTRIES:
            there, here = (run(backend, place, country, method) for backend in (endpoint, inside))
            assert there["place"] == here["place"]
            meta, expected = (state.get_meta_info("place") for state in (there, here))
            for key in ("normalized_prompt_logprobs", "normalized_unconditional_prompt_logprobs"):
                if key in expected:
                    assert meta[key] == pytest.approx(expected[key], abs=1e-5)
            assert [[entry[1:] for entry in option] for option in meta["input_token_logprobs"]] == [
                [list(entry[1:]) for entry in option] for option in expected["input_token_logprobs"]
            ]
            decided.add(there["place"])
    assert len(decided) > 1


def test_a_choice_may_join_the_last_word(endpoint: Any) -> None:
    """Where text ends inside a word, the last token and the choice's first are one: nothing is dropped, and the mean is over all."""

    def broken(s):
        s += "The capital of France is Par"
        s += sgl.select("end", ["is", "ade"])

    state = run(endpoint, broken)
    assert state["end"] == "is"
    assert state.get_meta_info("end")["input_token_logprobs"][0][0][2] == " Paris"


def test_a_chat_a_fork_and_a_batch(server: LiveServer, endpoint: Any) -> None:
    @sgl.function
    def chat(s, country):
        s += sgl.system("You answer in one sentence.")
        s += sgl.user(f"What is the capital of {country}?")
        s += sgl.assistant(sgl.gen("answer", temperature=0, max_tokens=24))
        s += sgl.user("Name a colour.")
        forks = s.fork(2)
        for fork in forks:
            fork += sgl.assistant(sgl.gen("colour", temperature=0, max_tokens=12))
        forks.join()

    states = chat.run_batch([{"country": country} for country in COUNTRIES], backend=endpoint)
    assert "Paris" in states[0]["answer"]
    for state in states:
        assert len(set(state["colour"])) == 1, "both forks are greedy"
    number = run(endpoint, lambda s: s.__iadd__("2 + 2 =" + sgl.gen("sum", regex=" [0-9]", temperature=0)))
    assert number.text() in [f"2 + 2 = {digit}" for digit in range(10)]
