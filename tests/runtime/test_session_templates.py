"""Sessions under templates that rewrite the past: right prompts, what can be reused is, and the log says so once."""

import logging
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from chat_models import TEMPLATES, make_chat_model
from tiny_model import BOS_ID, IM_END_ID

from phloem.radix import Namespace
from phloem.runtime import Engine, Grammar, InvalidRequest, SamplingParams
from phloem.runtime.frontend.session import template as template_module

SAMPLED = SamplingParams(temperature=1, seed=5, max_tokens=12, ignore_eos=True)
# Log-probabilities are asked for so that the model runs for every token: a grammar's forced ones alone would compute nothing.
SPACED = SamplingParams(grammar=Grammar.choice([" \nyes \n"]), logprobs=0)
THOUGHT = SamplingParams(grammar=Grammar.choice(["<think>\nhm\n</think>\n\nyes"]), logprobs=0)
KINDS = {
    "trims": ("trims the spaces around earlier answers",),
    "thinks": ("trims the spaces around earlier answers", "leaves the thinking out of earlier answers"),
    "hoists": ("moves the system text",),
    "counts": ("renders earlier turns in another way than when they were new",),
    "injects": (),
    "tools": (),
    "refuses": (),
}

MakeEngine = Callable[[str], Engine]


@pytest.fixture
def engine_of(tmp_path: Path) -> Iterator[MakeEngine]:
    engines = []

    def make(kind: str) -> Engine:
        path = make_chat_model(tmp_path / kind, TEMPLATES[kind])
        engines.append(Engine(path, dtype="float32", num_blocks=128))
        return engines[-1]

    yield make
    for engine in engines:
        engine.check()
        assert engine.stats().cache.locked == 0
        engine.close()


@pytest.mark.parametrize("kind", KINDS)
def test_the_probe_finds_out_what_a_template_does(engine_of: MakeEngine, kind: str) -> None:
    with engine_of(kind).session() as session:
        assert session.template.rewrites == KINDS[kind]
        assert session.template.is_stable == (not KINDS[kind])
        assert ("You are a good model." in session.template.own_text) == (kind == "injects")
        assert session.template.takes_tool_results == (kind != "refuses")


def lucky() -> int:
    """Return a lucky number."""
    return 7


def test_a_template_that_puts_the_tools_before_the_newest_message(engine_of: MakeEngine) -> None:
    engine = engine_of("moves_tools")
    with engine.session(params=SAMPLED) as session:
        assert session.template.is_stable
    with engine.session(params=SAMPLED, tools=[lucky]) as session:
        assert session.template.rewrites == ("moves the tools",)
        first = session.say("hello", tool_choice="none")
        second = session.say("and", tool_choice="none")
        assert bytes(min(each, 255) for each in session.token_ids).count(b"a lucky number") == 1
        assert second.usage.cached_tokens < first.usage.prompt_tokens
        assert second.rewritten_tokens > 0


def test_the_log_says_it_once(engine_of: MakeEngine, caplog: pytest.LogCaptureFixture) -> None:
    template_module._warn_once.cache_clear()
    with caplog.at_level(logging.WARNING):
        for kind in ("trims", "trims", "injects"):
            engine_of(kind).session().close()
    assert caplog.text.count("rewrites the past (it trims the spaces") == 1
    assert len(caplog.records) == 1


@pytest.mark.parametrize("kind", KINDS)
def test_every_prompt_is_what_the_template_gives(engine_of: MakeEngine, kind: str) -> None:
    engine = engine_of(kind)
    system = None if kind in ("injects", "refuses") else "be brief"
    params = {"trims": SPACED, "thinks": THOUGHT}.get(kind, SAMPLED)
    with engine.session(system=system, params=params) as session:
        messages = session.messages
        answers = {}
        for text in ("hello", "and", "more"):
            turn = session.say(text)
            messages.append({"role": "user", "content": text})
            prompt = engine.tokenizer.encode_chat(messages, answers=answers)
            answer = turn.completions[0].token_ids
            assert session.token_ids == [*prompt, *answer]
            assert prompt.count(BOS_ID) == 1
            [cold] = engine.generate(prompt, params, namespace=Namespace(salt=text))
            assert (cold.token_ids, cold.usage.cached_tokens) == (answer, 0)
            answers[len(messages)] = answer
            messages.append({"role": "assistant", "content": turn.text})


@pytest.mark.parametrize(("kind", "params"), [("trims", SPACED), ("thinks", THOUGHT)])
def test_only_what_follows_the_rewritten_place_is_computed_again(
    engine_of: MakeEngine, kind: str, params: SamplingParams
) -> None:
    with engine_of(kind).session(params=params) as session:
        first = session.say("a long question " * 5)
        prompt = first.usage.prompt_tokens
        second = session.say("and")
        assert prompt <= second.usage.cached_tokens < prompt + len(first.completions[0].token_ids) - 1
        assert second.rewritten_tokens == len("yes?\n"), "the answer as the template shows it, and its end"
        assert session.token_ids[prompt : prompt + 4] == [*b"yes", IM_END_ID]


def test_under_a_trimming_template_an_answer_without_spaces_is_appended_to(engine_of: MakeEngine) -> None:
    with engine_of("trims").session(
        params=SamplingParams(grammar=Grammar.choice(["yes"]), logprobs=0)
    ) as session:
        session.say("hello")
        before = session.token_ids
        turn = session.say("and")
        assert turn.rewritten_tokens == 0
        assert turn.usage.cached_tokens == len(before) - 1


def test_a_default_system_text_appears_once(engine_of: MakeEngine) -> None:
    with engine_of("injects").session(params=SAMPLED) as session:
        for text in ("hello", "and", "more"):
            session.say(text)
        assert bytes(min(each, 255) for each in session.token_ids).count(b"You are a good model.") == 1


def test_a_system_text_that_the_template_refuses_is_refused_at_once(engine_of: MakeEngine) -> None:
    with pytest.raises(InvalidRequest, match="no system here"):
        engine_of("refuses").session(system="be brief")


@pytest.mark.parametrize("kind", ["hoists", "counts", "thinks"])
def test_going_back_under_an_unstable_template(engine_of: MakeEngine, kind: str) -> None:
    params = THOUGHT if kind == "thinks" else SAMPLED
    with engine_of(kind).session(params=params) as session:
        texts = [session.say(text).text for text in ("hello", "and", "more")]
        with session.fork(1) as other:
            assert other.say("and").text == texts[1]
        session.rewind(1)
        assert session.say("and").text == texts[1]
