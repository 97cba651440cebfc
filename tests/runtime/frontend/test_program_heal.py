"""Text that ends inside a word goes on as if it had been tokenised with what follows (BEHAVIOURS 38)."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from merging_model import SCHEME, SLASHES, make_merging_model

from phloem.runtime import Engine, InvalidRequest, SamplingParams
from phloem.runtime.frontend.program import Run, State, program

TEXT = "see http:"


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[Engine]:
    with Engine(make_merging_model(tmp_path / "model"), dtype="float32", num_blocks=64) as engine:
        yield engine
        engine.check()
        assert engine.stats().cache.locked == 0


def liking(*token_ids: int, weight: float = 100.0) -> dict[str, object]:
    """Options under which a model generates some tokens."""
    return {"temperature": 0, "logit_bias": dict.fromkeys(token_ids, weight), "ignore_eos": True}


def heal(engine: Engine, text: str = TEXT, **options: object) -> Run:
    def write(s: State) -> None:
        s += text
        s.gen("rest", **options)

    return program(write).run(engine)


def test_b38_a_colon_goes_on_as_the_token_that_it_begins(engine: Engine) -> None:
    done = heal(engine, max_tokens=2, **liking(SCHEME, SLASHES))
    joint = engine.tokenizer.encode("see http://")
    assert joint[-1] == SCHEME
    assert done.token_ids[: len(joint)] == joint
    assert done["rest"].startswith("//")
    assert done.text == f"<|bos|>{TEXT}{done['rest']}"
    assert len(done.token_ids) == len(joint) - 1 + 2 + 1, (
        "the token that was left out is not counted by max_tokens"
    )


def test_without_it_the_seam_stays(engine: Engine) -> None:
    done = heal(engine, heal=False, max_tokens=1, **liking(SCHEME, SLASHES))
    assert done.token_ids[:-1] == engine.tokenizer.encode(TEXT)


def test_a_model_that_goes_on_otherwise_gives_what_it_gives_without(engine: Engine) -> None:
    options = {"temperature": 0, "max_tokens": 5, "logit_bias": {SCHEME: -100.0}, "ignore_eos": True}
    assert heal(engine, **options).token_ids == heal(engine, heal=False, **options).token_ids


def test_text_whose_last_tokens_begin_no_other_is_left_alone(engine: Engine) -> None:
    for text, count in (("see http", 0), ("see http://", 0), ("see ht", 1), ("see http:/", 2), ("", 0)):
        assert engine.tokenizer.num_joinable(engine.tokenizer.encode(text)) == count, text
    with engine.branch("see ") as branch:
        expected = branch.generate(SamplingParams(temperature=0, max_tokens=4, ignore_eos=True))
    assert heal(engine, "see ", temperature=0, max_tokens=4, ignore_eos=True)["rest"] == expected.text


def test_with_one_token_a_byte_nothing_is_ever_healed(tiny_engine: Engine) -> None:
    assert tiny_engine.tokenizer.num_joinable(list(b"http:")) == 0


def test_several_tokens_are_left_out_where_they_begin_one(engine: Engine) -> None:
    done = heal(engine, "see http:/", max_tokens=1, **liking(SCHEME))
    assert done.token_ids[: len(engine.tokenizer.encode("see http://"))] == engine.tokenizer.encode(
        "see http://"
    )


def test_stop_strings_and_streams_do_not_see_what_was_left_out(engine: Engine) -> None:
    done = heal(engine, max_tokens=4, stop=[":", "p"], **liking(SCHEME, ord("x")))
    assert done["rest"].startswith("//")
    cut = heal(engine, max_tokens=4, stop="/", **liking(SCHEME))
    assert (cut["rest"], cut.text) == ("", f"<|bos|>{TEXT}")

    @program
    def streamed(s: State) -> None:
        s += TEXT
        s.gen("rest", max_tokens=4, **liking(SCHEME, ord("x")))

    *pieces, last = streamed.stream(engine)
    assert "".join(piece.text for piece in pieces) == last.run["rest"]
    assert last.run["rest"].startswith("//")


def test_a_grammar_applies_from_the_seam_on(engine: Engine) -> None:
    by_regex = heal(engine, regex="//[a-z]{3}", **liking(SCHEME))
    assert by_regex.token_ids[: len(engine.tokenizer.encode("see http://"))][-1] == SCHEME
    assert by_regex["rest"][:2] == "//"
    assert len(by_regex["rest"]) == 5
    by_json = heal(engine, json={"enum": [12, 345]}, **liking(SCHEME))
    assert by_json["rest"] in (12, 345)
    assert by_json.text == f"<|bos|>{TEXT}{by_json['rest']}"


def test_draws_and_forks_heal_too(engine: Engine) -> None:
    def draw(s: State) -> tuple[list[str], list[str]]:
        s += TEXT
        with s.fork(2) as kids:
            found = kids.gen("kid", max_tokens=1, **liking(SCHEME))
        return found, s.gen("several", n=2, max_tokens=1, seed=1, logit_bias={SCHEME: 100.0})

    found, several = program(draw).run(engine).value
    assert all(text.startswith("//") for text in [*found, *several])


def test_a_mark_before_a_healed_seam_brings_the_text_back(engine: Engine) -> None:
    def retry(s: State) -> None:
        s += TEXT
        before, mark = s.token_ids, s.mark()
        s.gen(max_tokens=1, **liking(SCHEME))
        assert s.token_ids[: len(before)] != before
        s.rewind(mark)
        assert s.token_ids == before
        s.gen("rest", max_tokens=1, **liking(SCHEME))

    assert program(retry).run(engine)["rest"].startswith("//")


def test_a_seam_that_is_not_said_again_in_time_stays(engine: Engine) -> None:
    def slow(s: State) -> None:
        s += "see http://"  # cut below, so that the seam is one token that takes three
        s.gen(
            "rest", max_tokens=1, temperature=0, logit_bias={SCHEME: -100.0, SLASHES: -100.0}, ignore_eos=True
        )

    num_joinable = engine.tokenizer.num_joinable
    engine.tokenizer.num_joinable = lambda ids: 1 if len(ids) and ids[-1] == SCHEME else num_joinable(ids)
    done = program(slow).run(engine)
    assert done["rest"] == ""
    assert done.text == "<|bos|>see http://"
    assert done.token_ids == engine.tokenizer.encode("see http://")


def test_a_generation_that_fails_leaves_the_text_as_it_was(engine: Engine) -> None:
    def fails(s: State) -> None:
        s += TEXT
        before = s.token_ids
        with pytest.raises(InvalidRequest):
            s.gen(logit_bias={10**6: 1.0})
        assert s.token_ids == before
        s.gen("rest", max_tokens=1, **liking(SCHEME))

    assert program(fails).run(engine)["rest"].startswith("//")


def test_the_turns_of_a_chat_are_no_seams(engine: Engine) -> None:
    def chat(s: State) -> None:
        s.user("see http:")
        with s.assistant():
            s.gen("answer", temperature=0, max_tokens=3, ignore_eos=True)

    messages = [{"role": "user", "content": "see http:"}]
    [alone] = engine.generate(messages, SamplingParams(temperature=0, max_tokens=3, ignore_eos=True))
    done = program(chat).run(engine)
    assert done["answer"] == alone.text
    assert done.trace.steps[2].tokens_in == alone.usage.prompt_tokens


def test_what_heal_must_be(engine: Engine) -> None:
    for wrong in (5, "\ud800"):
        with pytest.raises(InvalidRequest, match="heal must be a string"):
            SamplingParams(heal=wrong)


def test_the_engine_heals_for_itself(engine: Engine) -> None:
    params = SamplingParams(
        heal=":", max_tokens=2, temperature=0, logit_bias={SCHEME: 100.0}, ignore_eos=True
    )
    [done] = engine.generate("see http", params)
    assert done.token_ids[0] == SCHEME
    assert done.text.startswith("//")


@pytest.mark.model
def test_b38_the_real_tokenizer(smollm2_path: Path) -> None:
    with Engine(smollm2_path, num_blocks=64) as engine:
        encode = engine.tokenizer.encode
        assert encode("http:") + encode("//") != encode("http://")
        text = "The home page of the project is at http:"
        done = heal(engine, text, max_tokens=8, temperature=0)
        assert done["rest"].startswith("//")
        joint = encode(text + "//")
        assert done.token_ids[: len(joint)] == joint
        whole = encode(text + done["rest"])
        assert done.token_ids == whole, "generated as the joint tokenisation would be"
        # The prompt's KV but for the token that was left out is found again.
        again = heal(engine, text, max_tokens=8, temperature=0)
        assert again.usage.computed_tokens == 1
