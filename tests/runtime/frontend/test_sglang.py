"""SGLang's frontend over an engine: the real interpreter, and what its programs reuse."""

from pathlib import Path

import pytest
from chat_models import TEMPLATES, make_chat_model
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

from phloem.runtime import Engine, Grammar, InvalidRequest, ProgramError, PromptTooLong, SamplingParams

# Generating


def test_a_program_gives_what_the_engine_gives(tiny_engine: Engine, backend: PhloemBackend) -> None:
    state = plain.run(backend=backend)
    answer = state["answer"]
    assert state.text() == TEXT + answer
    meta = state.get_meta_info("answer")
    assert (meta["prompt_tokens"], meta["completion_tokens"]) == (len(TEXT) + 1, 8)
    assert meta["finish_reason"] == {"type": "length"}
    assert answer == alone(tiny_engine, TEXT)


def test_the_default_backend_is_used(tiny_engine: Engine, backend: PhloemBackend) -> None:
    sgl.set_default_backend(backend)
    try:
        assert plain.run()["answer"] == alone(tiny_engine, TEXT)
        sgl.flush_cache()
        assert tiny_engine.stats().cache.evictable == 0
        assert sgl.get_server_info()["generated_tokens"] == tiny_engine.stats().generated_tokens
        assert backend.get_model_name() == "llama"
    finally:
        sgl.set_default_backend(None)


def test_what_was_generated_is_not_encoded_again(tiny_engine: Engine, backend: PhloemBackend) -> None:
    def twice(s):
        s += TEXT + sgl.gen("first", temperature=1, max_tokens=20, ignore_eos=True)
        s += " and " + sgl.gen("second", **GREEDY)

    state = run(backend, twice)
    meta = state.get_meta_info("second")
    # The byte tokenizer would make three tokens of each broken byte, had the text been encoded again.
    assert "\ufffd" in state["first"], "or it shows nothing"
    before = len(TEXT) + 1 + 20
    assert (meta["prompt_tokens"], meta["cached_tokens"]) == (before + 5, before - 1)


def test_a_stop_string_ends_the_text_and_stays_out_of_the_state(
    tiny_engine: Engine, backend: PhloemBackend
) -> None:
    [whole] = tiny_engine.generate(TEXT, SamplingParams(**{**GREEDY, "max_tokens": 30}))
    stop = whole.text[4:6]
    before = whole.text[: whole.text.index(stop)]
    decode = tiny_engine.tokenizer.decode
    num_before = next(n for n in range(30) if decode(whole.token_ids[:n]) == before)

    def stopped(s, stop):
        s += TEXT + sgl.gen("answer", temperature=0, max_tokens=30, ignore_eos=True, stop=stop)
        s += "!" + sgl.gen("more", **GREEDY)

    for given in (stop, [stop, "never"]):
        state = run(backend, stopped, given)
        assert state["answer"] == before
        assert state.get_meta_info("answer")["finish_reason"] == {"type": "stop"}
        assert state.text() == f"{TEXT}{before}!{state['more']}"
        assert state.get_meta_info("more")["prompt_tokens"] == 1 + len(TEXT) + num_before + 1


def test_options_reach_the_engine(tiny_engine: Engine, backend: PhloemBackend) -> None:
    def cut(s):
        s += TEXT
        s += sgl.gen("by_id", temperature=0, max_tokens=50, stop_token_ids=list(range(128)))
        s += sgl.gen("long", temperature=0, max_tokens=7, min_tokens=7, stop_token_ids=list(range(258)))
        s += sgl.gen("top", temperature=1, top_k=1, max_tokens=3, ignore_eos=True)

    state = run(backend, cut)
    assert state.get_meta_info("by_id")["finish_reason"] == {"type": "stop"}
    assert state.get_meta_info("long")["completion_tokens"] == 7

    def by_default(s):
        s += TEXT + sgl.gen("answer")

    state = run(backend, by_default, max_new_tokens=8, temperature=0, ignore_eos=True)
    assert state["answer"] == alone(tiny_engine, TEXT)


def test_several_texts_of_one_gen(tiny_engine: Engine, backend: PhloemBackend) -> None:
    def several(s):
        s += TEXT + sgl.gen("answers", n=3, temperature=1, max_tokens=8, ignore_eos=True)
        s += sgl.gen("next", **GREEDY)

    state = run(backend, several)
    assert len(set(state["answers"])) == 3
    assert state.text() == TEXT + state["answers"][0] + state["next"]
    assert sum(meta["cached_tokens"] for meta in state.get_meta_info("answers")) >= 2 * len(TEXT)
    assert state.get_meta_info("next")["cached_tokens"] == len(TEXT) + 8


def test_log_probabilities(tiny_engine: Engine, backend: PhloemBackend) -> None:
    def told(s):
        s += TEXT + sgl.gen(
            "answer", return_logprob=True, top_logprobs_num=2, return_text_in_logprobs=True, **GREEDY
        )

    meta = run(backend, told).get_meta_info("answer")
    [done] = tiny_engine.generate(TEXT, SamplingParams(**GREEDY, logprobs=2))
    assert [entry[:2] for entry in meta["output_token_logprobs"]] == [
        (each.logprob, each.token_id) for each in done.logprobs
    ]
    assert [tops[0][1] for tops in meta["output_top_logprobs"]] == done.token_ids
    assert all(isinstance(text, str) for _, _, text in meta["output_token_logprobs"])


# Constrained


def test_regex_types_and_schemas(tiny_engine: Engine, backend: PhloemBackend) -> None:
    state = run(backend, typed.func)
    check_typed(state)
    assert state["regex"] == alone(
        tiny_engine, TEXT, max_tokens=20, ignore_eos=False, grammar=Grammar.regex("[a-c]{2,4}-[0-9]{3}")
    )


# Choosing


@pytest.mark.parametrize("name", METHODS)
def test_select_chooses_by_what_score_says(tiny_engine: Engine, backend: PhloemBackend, name: str) -> None:
    def choose(s):
        s += TEXT
        s += sgl.select("choice", CHOICES, choices_method=METHODS[name])
        s += sgl.gen("next", **GREEDY)

    with tiny_engine.branch(TEXT) as branch:
        scores = branch.score(CHOICES)
    expected = {
        "mean": [score.mean for score in scores],
        "greedy": [score.token_logprobs[0].logprob for score in scores],
        "unconditional": [],
    }[name]
    if name == "unconditional":
        for choice, score in zip(CHOICES, scores, strict=True):
            ids = list(choice.encode())
            lone = 0.0
            if len(ids) > 1:
                with tiny_engine.branch(ids[:1]) as branch:
                    [of_rest] = branch.score([ids[1:]])
                lone = of_rest.total
            expected.append((score.total - lone) / len(ids))

    state = run(backend, choose)
    meta = state.get_meta_info("choice")
    assert meta["normalized_prompt_logprobs"] == [score.mean for score in scores]
    assert [[each[0] for each in option] for option in meta["input_token_logprobs"]] == [
        [each.logprob for each in score.token_logprobs] for score in scores
    ]
    if name == "greedy":
        assert expected[CHOICES.index(state["choice"])] == max(expected)
    else:
        assert state["choice"] == CHOICES[expected.index(max(expected))]
    if name == "unconditional":
        assert meta["normalized_unconditional_prompt_logprobs"] == pytest.approx(expected)
    # The winner's KV is there: the next token needs the last one only.
    after = state.get_meta_info("next")
    assert after["prompt_tokens"] == len(TEXT) + 1 + len(state["choice"])
    assert after["cached_tokens"] >= after["prompt_tokens"] - 2
    assert state["next"] == alone(tiny_engine, TEXT + state["choice"])


def test_the_choices_share_the_state(tiny_engine: Engine, backend: PhloemBackend) -> None:
    def choose(s):
        s += TEXT + sgl.gen("choice", choices=CHOICES)

    meta = run(backend, choose).get_meta_info("choice")
    computed = meta["prompt_tokens"] - meta["cached_tokens"]
    assert computed == len(TEXT) + 1 + sum(map(len, CHOICES))


# Chat


def test_roles_follow_the_models_template(tiny_engine: Engine, backend: PhloemBackend) -> None:
    def chat(s):
        s += sgl.system("Be short.")
        s += sgl.user("Hello")
        s += sgl.assistant(sgl.gen("first", temperature=0, max_tokens=8))
        s += sgl.user("And?")
        with s.assistant():
            s += sgl.gen("second", temperature=0, max_tokens=8)

    state = run(backend, chat)
    messages = [
        {"role": "system", "content": "Be short."},
        {"role": "user", "content": "Hello"},
        {"role": "assistant", "content": state["first"]},
        {"role": "user", "content": "And?"},
    ]
    tokenizer = tiny_engine.tokenizer
    rendered = tokenizer.decode(tokenizer.encode_chat(messages), skip_special_tokens=False)
    assert f"<|bos|>{state.text()}".startswith(rendered)
    first, second = (state.get_meta_info(name) for name in ("first", "second"))
    assert first["prompt_tokens"] == len(tokenizer.encode_chat(messages[:2]))
    known = first["prompt_tokens"] + first["completion_tokens"]
    assert second["cached_tokens"] >= known - 2, "the second turn computes its new words only"
    [cold] = tiny_engine.generate([messages[:2]], SamplingParams(temperature=0, max_tokens=8))
    assert state["first"] == cold.text
    assert state.messages()[2] == {"role": "assistant", "content": state["first"].lstrip()}


def test_the_end_of_sequence_is_written_once(tiny_engine: Engine, backend: PhloemBackend) -> None:
    def chat(s):
        s += sgl.user("Hello")
        s += sgl.assistant(sgl.gen("first", regex="ok", max_tokens=8))
        s += sgl.user("And?")
        s += sgl.assistant(sgl.gen("second", regex="ok", max_tokens=8))

    state = run(backend, chat)
    assert state.text() == (
        "<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\nok<|im_end|>\n"
        "<|im_start|>user\nAnd?<|im_end|>\n<|im_start|>assistant\nok<|im_end|>\n"
    )
    tokens = len(tiny_engine.tokenizer.encode(state.text())) - len("ok<|") - len("\n") + 1
    assert state.get_meta_info("second")["prompt_tokens"] == tokens


def test_another_template_can_be_named(tiny_engine: Engine) -> None:
    def chat(s):
        s += sgl.user("Hello")
        s += sgl.assistant(sgl.gen("first", **GREEDY))

    state = run(PhloemBackend(tiny_engine, chat_template="default"), chat)
    assert state.text().startswith("USER:Hello\nASSISTANT:")


@pytest.mark.parametrize("name", ["injects", "trims", None])
def test_a_templates_own_words_are_kept(tmp_path: Path, name: str | None) -> None:
    def chat(s):
        s += sgl.user("Hello")
        s += sgl.assistant(sgl.gen("first", **GREEDY))

    template = None if name is None else TEMPLATES[name]
    with Engine(make_chat_model(tmp_path, template), dtype="float32", num_blocks=64) as engine:
        state = run(PhloemBackend(engine), chat)
        if name is None:
            assert state.text() == f"USER:Hello\nASSISTANT:{state['first']}\n"
        else:
            ids = engine.tokenizer.encode_chat([{"role": "user", "content": "Hello"}])
            rendered = engine.tokenizer.decode(ids, skip_special_tokens=False)
            assert f"<|bos|>{state.text()}".startswith(rendered + state["first"])


@pytest.mark.parametrize(
    ("name", "refused"), [("refuses", ["system"]), ("hoists", ["system"]), ("counts", ["system", "user"])]
)
def test_roles_that_can_not_be_appended_are_refused(tmp_path: Path, name: str, refused: list[str]) -> None:
    with Engine(make_chat_model(tmp_path, TEMPLATES[name]), dtype="float32", num_blocks=64) as engine:
        backend = PhloemBackend(engine)
        for role in refused:
            with pytest.raises(InvalidRequest, match=f"takes no '{role}' messages") as caught:
                run(backend, lambda s, role=role: s.stream_executor.submit(getattr(sgl, role)("Hello")))
            assert caught.value.field == "role"
        assert run(backend, plain.func)["answer"], "text needs no template"


# Errors


def test_bad_options_are_refused_by_name(backend: PhloemBackend) -> None:
    bad = {
        "stop_regex": {"stop_regex": "a+"},
        "logprob_start_len": {"logprob_start_len": 0},
        "temperature": {"temperature": -1},
        "top_p": {"top_p": 0},
        "n": {"n": 0},
        "dtype": {"dtype": list},
        "regex": {"regex": "a", "json_schema": "{}"},
    }
    for field, options in bad.items():

        def wrong(s, options=options):
            s += TEXT + sgl.gen("answer", **options)

        with pytest.raises(InvalidRequest) as caught:
            run(backend, wrong)
        assert caught.value.field == field, field


def test_bad_choices_are_refused(backend: PhloemBackend) -> None:
    for choices in ([], ["a", "a"], [""]):

        def wrong(s, choices=choices):
            s += TEXT + sgl.select("choice", choices)

        with pytest.raises(InvalidRequest):
            run(backend, wrong)

    def warm(s):
        s += TEXT + sgl.select("choice", ["a", "b"], temperature=0.5)

    with pytest.raises(InvalidRequest, match="temperature"):
        run(backend, warm)


def test_a_state_that_is_empty_or_too_long(tiny_engine: Engine, backend: PhloemBackend) -> None:
    with pytest.raises(ProgramError, match="empty"):
        run(backend, plain.func, text="")
    with pytest.raises(PromptTooLong):
        run(backend, plain.func, text="x" * tiny_engine.max_model_len)
    with pytest.raises(InvalidRequest, match="no chat template 'none'"):
        PhloemBackend(tiny_engine, chat_template="none")


@pytest.mark.filterwarnings("ignore:Error in stream_executor")
def test_an_error_in_a_thread_is_told_by_the_state_and_hurts_no_other(
    tiny_engine: Engine, backend: PhloemBackend
) -> None:
    @sgl.function
    def wrong(s):
        s += TEXT + sgl.gen("good", **GREEDY)
        s += sgl.gen("answer", temperature=-1)
        s += sgl.gen("never", **GREEDY)

    [bad] = wrong.run_batch([{}], backend=backend)
    assert tiny_engine.stats().cache.locked == 0
    assert isinstance(bad.stream_executor.error_, InvalidRequest)
    assert plain.run(backend=backend)["answer"] == alone(tiny_engine, TEXT)


def test_after_a_failed_gen_the_state_goes_on(tiny_engine: Engine, backend: PhloemBackend) -> None:
    def caught(s):
        s += TEXT
        with pytest.raises(InvalidRequest):
            s += sgl.gen("wrong", temperature=-1)
        s += sgl.gen("answer", **GREEDY)

    assert run(backend, caught)["answer"] == alone(tiny_engine, TEXT)
