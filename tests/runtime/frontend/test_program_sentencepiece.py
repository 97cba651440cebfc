"""Programs over a tokenizer of SentencePiece's kind: text goes on where it ended, and is healed, as with any other."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from sentencepiece_model import make_sentencepiece_model
from small_programs import GREEDY, run

from phloem.runtime import Engine
from phloem.runtime.frontend.program import State


@pytest.fixture(params=["prepend", "first"])
def engine(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Engine]:
    path = make_sentencepiece_model(tmp_path / "model", request.param)
    with Engine(path, dtype="float32", num_blocks=64) as engine:
        yield engine
        engine.check()
        assert engine.stats().cache.locked == 0


def ids_of(engine: Engine, *tokens: str) -> list[int]:
    return [engine.tokenizer.backend.token_to_id(token) for token in tokens]


def liking(engine: Engine, *tokens: str) -> dict[str, object]:
    """Options under which a model generates some tokens."""
    return {**GREEDY, "max_tokens": 1, "logit_bias": dict.fromkeys(ids_of(engine, *tokens), 100.0)}


def test_appended_text_goes_on_where_the_text_ended(engine: Engine) -> None:
    def write(s: State) -> None:
        s += "see "
        for part in ("http:", "//", "x", " y", "  z", "é", "é."):
            s += part

    done = run(engine, write)
    assert done.text == "<|bos|> see http://x y  zéé."
    assert done.token_ids[1:4] == ids_of(engine, "▁see", "▁", "http")


@pytest.mark.parametrize(
    ("text", "liked", "joint"),
    [
        ("see http:", "://", "see http://"),
        ("see http:/", "://", "see http://"),
        ("see h", "▁http", "see http"),
        ("see ", "▁http", "see http"),
        ("see", "▁▁", "see  "),
        ("see x", "x", "see xx"),
    ],
)
def test_text_that_ends_inside_a_token_goes_on_as_if_it_had_been_encoded_with_the_rest(
    engine: Engine, text: str, liked: str, joint: str
) -> None:
    def write(s: State) -> None:
        s += text
        s.gen("rest", **liking(engine, liked))

    done = run(engine, write)
    assert (text + done["rest"]).startswith(joint)
    joint_ids = engine.tokenizer.encode(joint)
    assert done.token_ids[: len(joint_ids)] == joint_ids


def test_a_character_of_bytes_is_not_healed(engine: Engine) -> None:
    def write(s: State) -> None:
        s += "see é"
        s.gen("rest", **liking(engine, "x"))

    done = run(engine, write)
    assert done["rest"] == "x"
    assert done.token_ids == [*engine.tokenizer.encode("see é"), *ids_of(engine, "x")]


def test_options_are_scored_and_selected_without_a_space_of_their_own(engine: Engine) -> None:
    def write(s: State) -> None:
        s += "see http:"
        [score, spaced] = s.score(["//x", " x"])
        s["ids"] = [[each.token_id for each in found.token_logprobs] for found in (score, spaced)]
        s["chosen"] = s.select("choice", ["//", "z"]).value

    done = run(engine, write)
    assert done["ids"] == [ids_of(engine, "//", "x"), ids_of(engine, "▁", "x")]
    assert done.text == f"<|bos|> see http:{done['chosen']}"


def test_a_branch_continues_likewise(engine: Engine) -> None:
    with engine.branch("see http:") as branch:
        assert branch.append("//x").text == "see http://x"
        [score] = branch.score(["yz"])
        assert [each.token_id for each in score.token_logprobs] == ids_of(engine, "y", "z")


def test_what_is_left_of_a_token_that_a_stop_string_cut_is_that_text(engine: Engine) -> None:
    def write(s: State) -> None:
        s += "see x"
        s.gen("rest", stop="tp", **liking(engine, "http"))

    done = run(engine, write)
    assert done["rest"] == "h" + done["rest"][1:]
    assert done.text == f"<|bos|> see x{done['rest']}"
