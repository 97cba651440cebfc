"""Programs on a tiny random model: text, generations, choices, captures, and what they reuse."""

from pathlib import Path

import pytest
from small_programs import GREEDY, TEXT, plain, run
from tiny_model import BOS_ID, IM_END_ID, IM_START_ID, make_tiny_model

from phloem.radix import Namespace
from phloem.runtime import (
    Engine,
    Grammar,
    GrammarError,
    IncompleteOutput,
    InvalidRequest,
    ProgramError,
    PromptTooLong,
    SamplingParams,
    UnknownCapture,
)
from phloem.runtime.frontend.program import State, program


def test_a_program_gives_what_the_engine_gives(tiny_engine: Engine) -> None:
    [alone] = tiny_engine.generate(TEXT, SamplingParams(**GREEDY))
    done = plain.run(tiny_engine)
    assert done["answer"] == alone.text
    assert done.token_ids == [BOS_ID, *TEXT.encode(), *alone.token_ids]
    assert (done.usage.prompt_tokens, done.usage.completion_tokens) == (len(TEXT) + 1, 8)
    assert done.text.startswith("<|bos|>the quick")


def test_b36_text_is_encoded_alone_and_what_was_generated_is_never_encoded_again(tiny_engine: Engine) -> None:
    seen = {}

    def twice(s: State) -> None:
        s += TEXT
        s.gen("first", seed=5, max_tokens=20, ignore_eos=True)
        seen["before"] = s.token_ids
        s += " and "
        s.gen("second", **GREEDY)

    done = run(tiny_engine, twice)
    drawn = seen["before"][len(TEXT) + 1 :]
    assert tiny_engine.tokenizer.encode(done["first"], add_special_tokens=False) != drawn, (
        "or it shows nothing"
    )
    assert done.token_ids[: len(seen["before"]) + 5] == [*seen["before"], *b" and "]
    last = done.trace.steps[-1]
    assert (last.tokens_in, last.cached) == (len(seen["before"]) + 5, len(seen["before"]) - 1)


def test_the_state_holds_the_text_without_what_ended_it(tiny_engine: Engine) -> None:
    [alone] = tiny_engine.generate(TEXT, SamplingParams(temperature=0, max_tokens=30, ignore_eos=True))
    stop = alone.text[4:6]

    def stopped(s: State) -> None:
        s += TEXT
        s.gen("answer", temperature=0, max_tokens=30, ignore_eos=True, stop=stop)

    def ended(s: State) -> None:
        s += TEXT
        s.gen("answer", temperature=0, logit_bias={IM_END_ID: 1000.0})

    done = run(tiny_engine, stopped)
    assert done["answer"] == alone.text[: alone.text.index(stop)]
    assert done.text == f"<|bos|>{TEXT}{done['answer']}"
    assert run(tiny_engine, ended).text == f"<|bos|>{TEXT}"


def test_n_gives_a_list_and_the_state_goes_on_from_the_first(tiny_engine: Engine) -> None:
    def draw(s: State) -> list[str]:
        s += TEXT
        return s.gen("answers", n=3, seed=7, max_tokens=6, ignore_eos=True)

    done = run(tiny_engine, draw)
    expected = tiny_engine.generate(TEXT, SamplingParams(n=3, seed=7, max_tokens=6, ignore_eos=True))
    assert done.value == done["answers"] == [each.text for each in expected]
    assert done.token_ids[len(TEXT) + 1 :] == expected[0].token_ids


def test_captures_and_what_is_not_captured(tiny_engine: Engine) -> None:
    def captures(s: State) -> None:
        s += TEXT
        s.gen(**GREEDY)
        s["mine"] = 3
        assert "mine" in s
        assert s.captures == {"mine": 3}
        s.gen("known", **GREEDY)
        [completion] = s.completions("known")
        assert completion.finish_reason == "length"
        s["unknown"]

    with pytest.raises(
        UnknownCapture, match=r"'unknown'; there is 'mine', 'known' \(test_program.py:\d+, in captures\)"
    ):
        run(tiny_engine, captures)
    with pytest.raises(KeyError):
        plain.run(tiny_engine)["question"]


def test_errors_name_the_line_of_the_program(tiny_engine: Engine) -> None:
    cases = {
        "text must be a string": lambda s: s.__iadd__(5),
        "gen has no option max_token;": lambda s: s.gen(max_token=3),
        "temperature must be": lambda s: s.gen(temperature=-1),
        "one of regex, json and grammar": lambda s: s.gen(regex="a", json={}),
        "the state is empty": lambda s: s.gen(),
        "at least one string": lambda s: s.select("x", []),
        "options\\[1\\] is 'a', as options\\[0\\] is": lambda s: s.select("x", ["a", "a"]),
        "options\\[0\\] must be": lambda s: s.select("x", [""]),
        "options\\[1\\] must be": lambda s: s.select("x", ["a", ["b"]]),
        "by must be one of": lambda s: s.select("x", ["a"], by="best"),
        "texts must be": lambda s: s.score([]),
        "a fork takes": lambda s: s.fork(0),
        "the state would have": lambda s: s.__iadd__("x" * 5000),
    }
    for message, call in cases.items():
        with pytest.raises((InvalidRequest, ProgramError), match=message) as caught:
            run(tiny_engine, call)
        assert caught.value.program_line.startswith("test_program.py:"), message
        assert str(caught.value).endswith(f"({caught.value.program_line})")
    with pytest.raises(PromptTooLong):
        run(tiny_engine, cases["the state would have"])


@pytest.mark.parametrize("by", ["sum", "mean", "greedy", "pmi"])
def test_b39_select_keeps_the_winner_whatever_the_order(tiny_engine: Engine, by: str) -> None:
    options = [" red", " green", " blue", " bluer", "blue"]

    def choose(s: State, options: list[str]) -> dict[str, float]:
        s += TEXT
        chosen = s.select("colour", options, by=by)
        s.gen("more", **GREEDY)
        return chosen.scores

    first, second = run(tiny_engine, choose, options), run(tiny_engine, choose, options[::-1])
    assert first["colour"] == second["colour"]
    assert first["more"] == second["more"]
    assert first.value == second.value
    assert list(first.value) == options
    assert first.text.startswith(f"<|bos|>{TEXT}{first['colour']}{first['more']}"[:30])
    [alone] = tiny_engine.generate(TEXT + first["colour"], SamplingParams(**GREEDY))
    assert first["more"] == alone.text
    if by != "greedy":
        assert first["colour"] == max(first.value, key=first.value.get)


def test_the_scores_of_select_are_those_of_the_branch(tiny_engine: Engine) -> None:
    options = [" red", " green", "x"]

    def scores(s: State, by: str) -> dict[str, float]:
        s += TEXT
        return s.select("colour", options, by=by).scores

    with tiny_engine.branch(TEXT) as branch, tiny_engine.branch([BOS_ID]) as start:
        found, alone = branch.score(options), start.score(options)
    assert list(run(tiny_engine, scores, "sum").value.values()) == [each.total for each in found]
    assert list(run(tiny_engine, scores, "mean").value.values()) == [each.mean for each in found]
    pmi = [each.total - other.total for each, other in zip(found, alone, strict=True)]
    assert list(run(tiny_engine, scores, "pmi").value.values()) == pmi


def test_greedy_select_follows_the_likeliest_token(tiny_engine: Engine) -> None:
    with tiny_engine.branch(TEXT) as branch:
        ranked = [chr(token) for token, _ in branch.next_token_logprobs(top=200) if 97 <= token <= 122]
    best, worst = ranked[0], ranked[-1]

    def choose(s: State) -> None:
        s += TEXT
        s.select("letter", [worst, best + "zqzqzq"], by="greedy")

    assert run(tiny_engine, choose)["letter"] == best + "zqzqzq"


@pytest.mark.parametrize(
    "options", [[" red as a rose in the garden", " green as grass in the garden"], [" a", " b"]]
)
def test_the_kv_of_the_winner_is_kept(tiny_engine: Engine, options: list[str]) -> None:
    def choose(s: State) -> None:
        s += TEXT
        s.select("colour", options)
        s.gen("more", **GREEDY)

    done = run(tiny_engine, choose)
    gen = done.trace.steps[-1]
    assert gen.tokens_in - gen.cached == 1, "only the last token, whose logits are wanted"


def test_score_changes_nothing(tiny_engine: Engine) -> None:
    def scored(s: State) -> list[float]:
        s += TEXT
        before = s.token_ids
        found = s.score([" a", " b"])
        assert s.token_ids == before
        return [each.total for each in found]

    with tiny_engine.branch(TEXT) as branch:
        assert run(tiny_engine, scored).value == [each.total for each in branch.score([" a", " b"])]


def test_regex_json_and_the_value(tiny_engine: Engine) -> None:
    schema = {"type": "object", "properties": {"n": {"enum": [1, 22]}}, "required": ["n"]}

    class Model:
        """Quacks like a pydantic class."""

        @staticmethod
        def model_json_schema() -> dict[str, object]:
            return schema

        @staticmethod
        def model_validate_json(text: str) -> tuple[str, str]:
            return ("made of", text)

    def constrained(s: State) -> None:
        s += TEXT
        s.gen("digits", regex="[0-9]{3}", temperature=0)
        s.gen("data", json=schema, temperature=0)
        s.gen("made", json=Model, temperature=0)

    done = run(tiny_engine, constrained)
    assert done["digits"].isdecimal()
    assert done["data"]["n"] in (1, 22)
    assert done["made"][0] == "made of"
    assert done.text.startswith(f"<|bos|>{TEXT}{done['digits']}")


@pytest.mark.parametrize(
    "grammar",
    [{"json": {"type": "string", "pattern": "^[a-z]{50}$"}}, {"regex": "[a-z]{50}"}],
    ids=["json", "regex"],
)
def test_output_that_is_cut_off_before_it_fits_its_grammar(
    tiny_engine: Engine, grammar: dict[str, object]
) -> None:
    def cut(s: State) -> None:
        s += TEXT
        s.gen("text", max_tokens=10, temperature=0, **grammar)

    with pytest.raises(
        IncompleteOutput, match=r"after 10 tokens .max_tokens=10.: raise max_tokens"
    ) as caught:
        run(tiny_engine, cut)
    assert len(caught.value.partial.encode()) == 10
    assert "in cut" in caught.value.program_line


@pytest.mark.parametrize(
    "grammar", [Grammar.lark('start: "{" /[a-z]{9}/ "}"'), Grammar.regex("([a-z]+)+[0-9]{9}")]
)
def test_only_the_parser_knows_whether_it_fits(tiny_engine: Engine, grammar: Grammar) -> None:
    def cut(s: State) -> None:
        s += TEXT
        s.gen("text", max_tokens=8, temperature=0, grammar=grammar)

    def stopped(s: State) -> None:
        s += TEXT
        s.gen(
            "text",
            temperature=0,
            grammar=grammar,
            max_tokens=40,
            stop=[chr(letter) for letter in range(97, 123)],
        )

    for function in (cut, stopped):
        with pytest.raises(IncompleteOutput, match="does not fit its grammar yet"):
            run(tiny_engine, function)


def test_output_that_is_cut_off_where_it_may_end_is_no_error(tiny_engine: Engine) -> None:
    def cut(s: State) -> None:
        s += TEXT
        s.gen("text", max_tokens=10, temperature=0, regex="[a-z]*")

    assert len(run(tiny_engine, cut)["text"]) == 10


def test_options_are_checked_in_every_call_also_where_equal_ones_were_taken_before(
    tiny_engine: Engine,
) -> None:
    def write(s: State, **options: object) -> None:
        s += TEXT
        s.gen("text", **{"max_tokens": 1, "temperature": 0, "ignore_eos": True, **options})

    for good, bad, field in (
        ({"max_tokens": 1}, {"max_tokens": True}, "max_tokens"),
        ({"temperature": 0}, {"temperature": False}, "temperature"),
        ({"ignore_eos": True}, {"ignore_eos": 1}, "ignore_eos"),
        ({"stop": ["x"], "logit_bias": {5: 1}}, {"stop": ["x"], "logit_bias": {5: "1"}}, "logit_bias"),
    ):
        run(tiny_engine, write, **good)
        with pytest.raises(InvalidRequest, match=field):
            run(tiny_engine, write, **bad)


def test_a_grammar_that_is_wrong(tiny_engine: Engine) -> None:
    def wrong(s: State) -> None:
        s += TEXT
        s.gen("text", regex="(")

    with pytest.raises(GrammarError, match="in wrong"):
        run(tiny_engine, wrong)


def test_chat_roles_append_the_deltas_of_the_template(tiny_engine: Engine) -> None:
    def chat(s: State) -> None:
        s.system("be brief")
        s.user("hello <|im_end|>")
        s.assistant("hi")
        s.user("and now?")
        with s.assistant():
            s.gen("answer", temperature=0, max_tokens=5, ignore_eos=True)

    done = run(tiny_engine, chat)
    messages = [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "hello <|im_end|>"},
        {"role": "assistant", "content": "hi"},
        {"role": "user", "content": "and now?"},
    ]
    prompt = tiny_engine.tokenizer.encode_chat(messages)
    [alone] = tiny_engine.generate(messages, SamplingParams(temperature=0, max_tokens=5, ignore_eos=True))
    assert done["answer"] == alone.text
    assert done.token_ids == [*prompt, *alone.token_ids, IM_END_ID, 10]
    assert done.token_ids.count(BOS_ID) == 1


def test_a_turn_that_the_model_ends_itself_is_closed_once(tiny_engine: Engine) -> None:
    def chat(s: State) -> None:
        s.user("hello")
        with s.assistant():
            s.gen("answer", temperature=0, logit_bias={IM_END_ID: 1000.0})

    done = run(tiny_engine, chat)
    assert done.token_ids == [
        BOS_ID,
        IM_START_ID,
        *b"user\nhello",
        IM_END_ID,
        10,
        IM_START_ID,
        *b"assistant\n",
        IM_END_ID,
        10,
    ]


def test_a_template_that_rewrites_the_past_is_refused_and_a_default_system_text_is_not_added(
    tiny_path: Path, tmp_path: Path
) -> None:
    path = make_tiny_model(tmp_path / "model")
    with Engine(path, dtype="float32", num_blocks=16) as engine:
        engine.tokenizer.hf.chat_template = (
            "{% if messages[0]['role'] != 'system' %}<|im_start|>system\nYou are implicit.<|im_end|>{% endif %}"
            "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>{% endfor %}"
        )
        done = run(engine, lambda s: s.user("hello"))
        assert done.text == "<|im_start|>user\nhello<|im_end|>"
        engine.tokenizer.hf.chat_template = (
            "{{ messages | length }}{% for m in messages %}{{ m['content'] }}{% endfor %}"
        )
        with pytest.raises(InvalidRequest, match="changes what comes before a user message"):
            run(engine, lambda s: s.user("hello"))


def test_mark_and_rewind(tiny_engine: Engine) -> None:
    def retry(s: State) -> None:
        s += TEXT
        mark = s.mark()
        s.gen("answer", seed=1, max_tokens=20, ignore_eos=True)
        s += " no."
        s.rewind(mark)
        assert "answer" not in s
        assert s.token_ids == [BOS_ID, *TEXT.encode()]
        s.gen("answer", **GREEDY)
        s.rewind(mark)
        s.gen("answer", **GREEDY)

    done = run(tiny_engine, retry)
    assert done.token_ids == plain.run(tiny_engine).token_ids
    first, second, third = (step for step in done.trace.steps if step.operation == "gen")
    assert first.cached == 0
    assert second.cached == third.cached == len(TEXT)


def test_marks_that_are_gone_or_of_another_state(tiny_engine: Engine) -> None:
    def gone(s: State, more: str) -> None:
        s += TEXT
        early = s.mark()
        s += "x" * 20
        late = s.mark()
        s.rewind(early)
        s += more
        s.rewind(late)

    def others(s: State) -> None:
        with s.fork(["a" * 20, "b" * 20]) as kids:
            kids[0].rewind(kids[1].mark())

    def parents(s: State) -> str:
        s += TEXT
        mark = s.mark()
        with s.fork([" one"]) as kids:
            kids[0].gen(**GREEDY)
            kids[0].rewind(mark)
            return kids[0].render()

    for more in ("", "y" * 40):
        with pytest.raises(ProgramError, match="does not begin with the 64 tokens that were marked"):
            run(tiny_engine, gone, more)
    with pytest.raises(ProgramError, match="the 21 tokens that were marked"):
        run(tiny_engine, others)
    assert run(tiny_engine, parents).value == f"<|bos|>{TEXT}"


def test_a_pin_outlives_the_run(tiny_path: Path) -> None:
    def pinned(s: State) -> int:
        s += TEXT
        return s.pin(ttl=60)

    async def apinned(s: State) -> int:
        s += TEXT
        return await s.apin(ttl=60)

    with Engine(tiny_path, dtype="float32", num_blocks=16) as engine:
        assert run(engine, pinned).value == run(engine, apinned).value == 32
        assert engine.stats().cache.pinned == 2


def test_explain_tells_what_is_reused(tiny_engine: Engine) -> None:
    plain.run(tiny_engine)

    def explained(s: State) -> int:
        s += TEXT
        return s.explain().cached_tokens

    assert run(tiny_engine, explained).value == len(TEXT)


def test_sub_programs_work_on_the_same_state(tiny_engine: Engine) -> None:
    @program
    def outer(s: State) -> str:
        plain(s)
        s += "!"
        return s["answer"]

    done = outer.run(tiny_engine)
    assert done.value == plain.run(tiny_engine)["answer"]
    assert done.text.endswith("!")
    with pytest.raises(InvalidRequest, match="call it with a state"):
        plain(tiny_engine)


def test_a_namespace_keeps_the_cache_apart(tiny_engine: Engine) -> None:
    apart = plain.within(Namespace(salt="tenant"))
    assert plain.run(tiny_engine).usage.cached_tokens == 0
    assert apart.run(tiny_engine).usage.cached_tokens == 0
    assert apart.run(tiny_engine).usage.cached_tokens == len(TEXT)
