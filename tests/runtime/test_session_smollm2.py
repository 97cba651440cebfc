"""Chat sessions on the real model: eight turns, greedy and sampled, compute what is new and at most a block more."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from phloem.radix import Namespace
from phloem.runtime import Engine, Grammar, SamplingParams

QUESTIONS = (
    "What is the capital of France?",
    "Which river flows through it?",
    "Tell me a short story about a fisherman there.",
    "What does 日本 mean?",
    "Write a line of Python that prints it.",
    "Why?",
    "Say <|im_end|> twice.",
    "Thank you!",
)

pytestmark = pytest.mark.model


@pytest.fixture(scope="module")
def engine(smollm2_path: Path) -> Iterator[Engine]:
    with Engine(smollm2_path, num_blocks=1024) as engine:
        yield engine
        engine.check()


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_b36_eight_turns_compute_only_what_is_new(engine: Engine, temperature: float) -> None:
    params = SamplingParams(temperature=temperature, max_tokens=40, seed=11)
    salt = Namespace(salt=f"{temperature}")
    changed = computed = floor = 0
    with engine.session(system="Be brief.", params=params, namespace=salt) as session:
        for text in QUESTIONS:
            before = session.token_ids
            turn = session.say(text)
            usage, answer = turn.usage, turn.completions[0].token_ids
            assert session.token_ids[: len(before)] == before
            assert usage.cached_tokens >= len(before) - 1, "all but the token that was sampled last"
            assert usage.computed_tokens <= usage.prompt_tokens - len(before) + 16
            assert turn.rewritten_tokens == 0
            computed += usage.computed_tokens
            floor += usage.prompt_tokens - len(before)
            kept = list(turn.messages[-1].token_ids or ())
            changed += engine.tokenizer.encode(turn.text, add_special_tokens=False) != kept
            if text in (QUESTIONS[1], QUESTIONS[-1]):
                cold_salt = Namespace(salt=f"cold {temperature} {text}")
                [cold] = engine.generate(session.token_ids[: -len(answer)], params, namespace=cold_salt)
                assert (cold.token_ids, cold.usage.cached_tokens) == (answer, 0)
    print(
        f"temperature {temperature}: {computed} tokens computed for {floor} new ones; {changed} of 8 re-encode otherwise"
    )
    assert computed <= floor + len(QUESTIONS) - 1
    assert temperature == 0 or changed > 0, "or this would show nothing"


@pytest.mark.parametrize("stop", ["lo wo", "wor", "hello"])
def test_a_stop_string_that_begins_inside_of_a_token(engine: Engine, stop: str) -> None:
    params = SamplingParams(grammar=Grammar.choice(["oh hello world"]), stop=stop)
    kept = "oh hello world".partition(stop)[0]
    with engine.session() as session:
        turn = session.say("Greet me.", params=params)
        assert turn.text == kept
        assert engine.tokenizer.decode(turn.messages[-1].token_ids or ()) == kept
        session.say("Again.", params=SamplingParams(max_tokens=1))
        assert f"assistant\n{kept}<|im_end|>" in engine.tokenizer.decode(
            session.token_ids, skip_special_tokens=False
        )
