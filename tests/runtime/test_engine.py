"""The engine on a tiny random model: what callers see."""

import asyncio
import math
import threading
import time
from pathlib import Path

import pytest
import torch
from tiny_model import IM_END_ID, make_tiny_model

from phloem.radix import Namespace
from phloem.runtime import (
    Cancelled,
    Completion,
    Engine,
    EngineClosed,
    InvalidRequest,
    PromptTooLong,
    SamplingParams,
    StepFailed,
)

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
TEXT = "the quick brown fox jumps over the lazy dog"


def ids(count: int, *, start: int = 0) -> list[int]:
    return [(7 * n + start) % 250 for n in range(count)]


def one(engine: Engine, prompt: object, params: SamplingParams = GREEDY, **options: object) -> Completion:
    [completion] = engine.generate(prompt, params, **options)
    return completion


def test_a_single_prompt_and_a_list_of_them_both_give_a_list(tiny_engine: Engine) -> None:
    single = tiny_engine.generate(TEXT, GREEDY)
    many = tiny_engine.generate([TEXT, ids(9)], GREEDY)
    assert len(single) == 1
    assert len(many) == 2
    assert single[0].token_ids == many[0].token_ids
    assert tiny_engine.generate([], GREEDY) == []


def test_usage_adds_up(tiny_engine: Engine) -> None:
    for _ in range(2):
        usage = one(tiny_engine, ids(40)).usage
        assert usage.prompt_tokens == 40 == usage.cached_tokens + usage.computed_tokens
        assert usage.completion_tokens == 12
    assert usage.cached_tokens == 39


def test_the_answer_is_the_same_from_a_warm_cache(tiny_engine: Engine) -> None:
    cold = one(tiny_engine, ids(40))
    warm = one(tiny_engine, ids(40))
    assert warm.usage.cached_tokens == 39
    assert warm.token_ids == cold.token_ids


@pytest.mark.parametrize("length", [1, 2, 15, 16, 17, 31, 32, 33, 100])
def test_b01_a_second_prompt_hits_all_but_the_last_token(tiny_engine: Engine, length: int) -> None:
    params = SamplingParams(temperature=0, max_tokens=1)
    one(tiny_engine, ids(length), params)
    again = one(tiny_engine, ids(length), params)
    assert again.usage.cached_tokens == length - 1


def test_b03_salts_and_adapters_keep_prompts_apart(tiny_engine: Engine) -> None:
    one(tiny_engine, ids(40))
    for namespace in (Namespace(salt="x"), Namespace(adapter="x"), Namespace(salt="y")):
        cold = one(tiny_engine, ids(40), namespace=namespace)
        warm = one(tiny_engine, ids(40), namespace=namespace)
        assert (cold.usage.cached_tokens, warm.usage.cached_tokens) == (0, 39)


def test_b28_the_next_turn_hits_the_prompt_and_the_answer_of_the_last(tiny_engine: Engine) -> None:
    first = one(tiny_engine, ids(30))
    turn = one(tiny_engine, [*ids(30), *first.token_ids, 5, 6, 7])
    assert turn.usage.cached_tokens >= (30 + 12 - 1) // 16 * 16


def test_greedy_generation_agrees_with_transformers(tiny_path: Path, tiny_engine: Engine) -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(tiny_path, dtype=torch.float32)
    prompt = torch.tensor([ids(50)])
    expected = model.generate(
        prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=40, do_sample=False, eos_token_id=None
    )
    done = one(tiny_engine, ids(50), SamplingParams(temperature=0, max_tokens=40, ignore_eos=True))
    assert done.token_ids == expected[0, 50:].tolist()


def test_max_tokens_ends_with_length(tiny_engine: Engine) -> None:
    done = one(tiny_engine, TEXT, SamplingParams(temperature=0, max_tokens=5, ignore_eos=True))
    assert (done.finish_reason, done.stopped_by) == ("length", None)
    assert len(done.token_ids) == 5


def test_stop_token_ids_end_it_and_are_part_of_the_path_but_not_of_the_text(tiny_engine: Engine) -> None:
    free = one(tiny_engine, TEXT)
    stop = free.token_ids[4]
    done = one(
        tiny_engine,
        TEXT,
        SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, stop_token_ids=[stop]),
    )
    first = free.token_ids.index(stop)
    assert (done.finish_reason, done.stopped_by) == ("stop", stop)
    assert done.token_ids == free.token_ids[: first + 1]
    assert free.text.startswith(done.text)
    assert len(done.text) < len(free.text)


def test_min_tokens_postpones_stop_ids_and_eos(tiny_engine: Engine) -> None:
    free = one(tiny_engine, TEXT)
    params = SamplingParams(temperature=0, max_tokens=12, min_tokens=8, stop_token_ids=free.token_ids[:3])
    done = one(tiny_engine, TEXT, params)
    assert len(done.token_ids) >= 8
    assert not set(done.token_ids[:8]) & {*free.token_ids[:3], IM_END_ID}


def test_a_stop_string_is_cut_off_also_where_it_spans_tokens(tiny_engine: Engine) -> None:
    params = SamplingParams(seed=3, max_tokens=60, ignore_eos=True, temperature=1.5)
    free = one(tiny_engine, TEXT, params)
    stop = free.text[20:23]
    done = one(
        tiny_engine,
        TEXT,
        SamplingParams(seed=3, max_tokens=60, ignore_eos=True, temperature=1.5, stop=("never", stop)),
    )
    assert (done.finish_reason, done.stopped_by) == ("stop", stop)
    assert done.text == free.text[: free.text.index(stop)]
    assert len(done.token_ids) < 60


def test_streamed_chunks_are_the_completion_and_hold_no_broken_characters(tiny_engine: Engine) -> None:
    params = SamplingParams(seed=5, max_tokens=80, ignore_eos=True, temperature=1.5)
    whole = one(tiny_engine, TEXT, params)
    chunks = list(tiny_engine.stream(TEXT, params))
    assert "".join(chunk.text for chunk in chunks) == whole.text
    assert [i for chunk in chunks for i in chunk.token_ids] == whole.token_ids
    assert chunks[-1].completion is not None
    assert chunks[-1].completion.text == whole.text
    assert all(chunk.completion is None for chunk in chunks[:-1])


def test_a_seed_repeats_and_does_not_depend_on_company(tiny_engine: Engine) -> None:
    params = [SamplingParams(seed=n, max_tokens=10, ignore_eos=True) for n in range(6)]
    together = [done.token_ids for done in tiny_engine.generate([TEXT] * 6, params)]
    alone = [one(tiny_engine, TEXT, each).token_ids for each in params]
    assert together == alone
    assert len({tuple(tokens) for tokens in together}) == 6


def test_without_a_seed_draws_differ(tiny_engine: Engine) -> None:
    params = SamplingParams(max_tokens=20, ignore_eos=True)
    assert one(tiny_engine, TEXT, params).token_ids != one(tiny_engine, TEXT, params).token_ids


def test_times_are_measured(tiny_engine: Engine) -> None:
    done = one(tiny_engine, TEXT)
    assert 0 < done.first_token_s <= done.total_s


def test_chat_messages_go_through_the_template(tiny_engine: Engine) -> None:
    messages = [{"role": "user", "content": "hi"}]
    rendered = tiny_engine.tokenizer.encode_chat(messages)
    assert one(tiny_engine, messages).token_ids == one(tiny_engine, rendered).token_ids


# Bad input


@pytest.mark.parametrize(
    ("prompt", "says"),
    [
        ("", "prompt is empty"),
        ([1, 2, -1], r"prompt\[2\] is -1"),
        ([1, 260], r"prompt\[1\] is 260; .* 0 to 259"),
        ([1, 2.5], r"prompt\[1\] must be a token id"),
        ([1, True], r"prompt\[1\] must be a token id"),
        ([2**40], "is 1099511627776"),
        (b"bytes", "must be text"),
        (7, "must be text"),
        (None, "must be text"),
        ([{"role": "user"}], "content"),
        ([{"content": "x"}], "role"),
    ],
)
def test_a_bad_prompt_is_refused_and_the_engine_lives(tiny_engine: Engine, prompt: object, says: str) -> None:
    with pytest.raises(InvalidRequest, match=says):
        tiny_engine.generate(prompt, GREEDY)
    assert len(one(tiny_engine, TEXT).token_ids) == 12


def test_one_bad_prompt_among_many_is_named_and_nothing_was_started(tiny_engine: Engine) -> None:
    with pytest.raises(InvalidRequest, match=r"prompts\[1\] is empty"):
        tiny_engine.generate([TEXT, "", TEXT], GREEDY)
    assert tiny_engine.stats().steps == 0


def test_params_must_fit_the_prompts(tiny_engine: Engine) -> None:
    with pytest.raises(InvalidRequest, match="2 entries for 3 prompts"):
        tiny_engine.generate([TEXT] * 3, [GREEDY] * 2)
    with pytest.raises(InvalidRequest, match="must be SamplingParams"):
        tiny_engine.generate(TEXT, {"max_tokens": 3})


def test_b04_a_bad_namespace_is_refused(tiny_engine: Engine) -> None:
    with pytest.raises(InvalidRequest, match="namespace"):
        tiny_engine.generate(TEXT, GREEDY, namespace="tenant")
    for salt in ("", "x" * 10_000, 5):
        with pytest.raises(ValueError, match="salt"):
            tiny_engine.generate(TEXT, GREEDY, namespace=Namespace(salt=salt))


def test_b30_a_prompt_longer_than_the_pool_is_refused_at_once(tiny_engine: Engine) -> None:
    with pytest.raises(PromptTooLong, match=r"has 1024 tokens; the KV pool holds 1024, .* raise num_blocks"):
        tiny_engine.generate(ids(1024), GREEDY)
    longest = one(tiny_engine, ids(1023), GREEDY)
    assert (longest.finish_reason, len(longest.token_ids)) == ("length", 1)


def test_a_prompt_longer_than_the_context_is_refused_at_once(tiny_path: Path) -> None:
    with Engine(tiny_path, num_blocks=64, max_model_len=100) as engine:
        with pytest.raises(PromptTooLong, match=r"has 100 tokens; the context is 100, .* shorten it"):
            engine.generate(ids(100), GREEDY)
        assert (
            one(
                engine, ids(95), SamplingParams(max_tokens=None, temperature=0, ignore_eos=True)
            ).finish_reason
            == "length"
        )


def test_bad_sizes_are_refused(tiny_path: Path) -> None:
    for options, says in [
        ({"kv_memory_bytes": 1000}, "does not hold one block of"),
        ({"num_blocks": 10**12}, "at most .* blocks fit"),
        ({"kv_memory_bytes": 10**15}, "more than"),
        ({"max_model_len": 10**6}, "beyond the model's context of 4096"),
        ({"eviction_policy": "mru"}, "lru"),
        ({"nonsense": 1}, "unknown engine option 'nonsense'"),
    ]:
        with pytest.raises(ValueError, match=says):
            Engine(tiny_path, **options)


# Failure, abort, close


def test_b29_a_step_that_raises_ends_its_requests_and_leaves_nothing_matchable(
    tiny_engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoder = tiny_engine._core.loop.runner.decoder
    forward = type(decoder).forward

    def failing(self: object, *args: object) -> torch.Tensor:
        forward(self, *args)
        raise RuntimeError("the machine is on fire")

    monkeypatch.setattr(type(decoder), "forward", failing)
    with pytest.raises(StepFailed, match="the machine is on fire"):
        tiny_engine.generate(ids(40), GREEDY)
    monkeypatch.undo()
    assert tiny_engine.stats().failed_steps == 1
    assert tiny_engine.stats().cache.evictable == 0
    assert one(tiny_engine, ids(40)).usage.cached_tokens == 0


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_b29_a_row_whose_numbers_go_wrong_fails_alone(
    tiny_engine: Engine, monkeypatch: pytest.MonkeyPatch, bad: float
) -> None:
    healthy = one(tiny_engine, TEXT).token_ids
    tiny_engine.clear_cache()
    decoder = tiny_engine._core.loop.runner.decoder
    forward = type(decoder).forward

    def poisoned(self: object, token_ids: torch.Tensor, *args: object) -> torch.Tensor:
        hidden = forward(self, token_ids, *args)
        return torch.where((token_ids == 249)[:, None], bad, hidden)

    monkeypatch.setattr(type(decoder), "forward", poisoned)
    sick = tiny_engine.stream([*ids(31), 249], GREEDY)
    well = tiny_engine.stream(TEXT, GREEDY)
    with pytest.raises(StepFailed, match="NaN"):
        sick.result()
    assert well.result().token_ids == healthy
    monkeypatch.undo()
    assert one(tiny_engine, [*ids(31), 249]).usage.cached_tokens == 0


def test_b26_an_abort_gives_what_there_is_and_keeps_the_computed_blocks(tiny_engine: Engine) -> None:
    generation = tiny_engine.stream(ids(40), SamplingParams(temperature=0, max_tokens=900, ignore_eos=True))
    chunks = []
    for chunk in generation:
        chunks.append(chunk)
        if len(chunks) == 5:
            generation.abort()
    done = generation.result()
    assert done.finish_reason == "abort"
    assert done.text == "".join(chunk.text for chunk in chunks)
    assert 5 <= len(done.token_ids) < 900
    assert one(tiny_engine, ids(40)).usage.cached_tokens == 39


def test_b24_aborting_twice_or_an_unknown_id_does_nothing(tiny_engine: Engine) -> None:
    tiny_engine.abort("nobody")
    generation = tiny_engine.stream(TEXT, SamplingParams(max_tokens=900, ignore_eos=True))
    generation.abort()
    generation.abort()
    assert generation.result().finish_reason == "abort"
    generation.abort()
    assert one(tiny_engine, TEXT).finish_reason == "length"


def test_b25_aborting_one_does_not_touch_ten(tiny_engine: Engine) -> None:
    generations = [
        tiny_engine.stream(TEXT, SamplingParams(temperature=0, max_tokens=40, ignore_eos=True))
        for _ in range(10)
    ]
    assert [generation.request_id for generation in generations] == [str(n) for n in range(1, 11)]
    tiny_engine.abort("1")
    assert generations[9].result().finish_reason == "length"
    assert generations[0].result().finish_reason == "abort"


def test_leaving_the_with_block_of_a_stream_aborts_it(tiny_engine: Engine) -> None:
    with tiny_engine.stream(TEXT, SamplingParams(max_tokens=900, ignore_eos=True)) as generation:
        next(iter(generation))
    assert generation.result().finish_reason == "abort"


def test_close_ends_what_runs_and_later_calls_say_so(tiny_path: Path) -> None:
    engine = Engine(tiny_path, num_blocks=64)
    generation = engine.stream(TEXT, SamplingParams(max_tokens=900, ignore_eos=True))
    next(iter(generation))
    engine.close()
    engine.close()
    with pytest.raises(EngineClosed):
        generation.result()
    for call in (lambda: engine.generate(TEXT), engine.stats, engine.check, lambda: engine.stream(TEXT)):
        with pytest.raises(EngineClosed):
            call()
    engine.abort("1")
    assert "phloem-engine" not in {thread.name for thread in threading.enumerate()}


def test_an_internal_error_ends_the_engine_but_hangs_nobody(
    tiny_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Engine(tiny_path, num_blocks=64) as engine:
        monkeypatch.setattr(engine._core.loop.scheduler, "schedule", lambda: 1 / 0)
        with pytest.raises(EngineClosed, match=r"internal error.*ZeroDivisionError"):
            engine.generate(TEXT)


def test_clearing_the_cache_while_busy_works(tiny_engine: Engine) -> None:
    before = one(tiny_engine, ids(40)).token_ids
    generation = tiny_engine.stream(ids(40), GREEDY)
    tiny_engine.clear_cache()
    assert generation.result().token_ids == before
    assert one(tiny_engine, ids(40)).usage.cached_tokens in (0, 39)
    tiny_engine.check()


# Async


def test_async_generation_gives_the_same(tiny_engine: Engine) -> None:
    expected = [done.token_ids for done in tiny_engine.generate([TEXT, ids(20)], GREEDY)]

    async def run() -> tuple[list[list[int]], str, str]:
        done = await tiny_engine.agenerate([TEXT, ids(20)], GREEDY)
        text = "".join([chunk.text async for chunk in tiny_engine.astream(TEXT, GREEDY)])
        return [each.token_ids for each in done], text, done[0].text

    tokens, streamed, text = asyncio.run(run())
    assert tokens == expected
    assert streamed == text


def test_cancelling_an_async_call_aborts_its_requests(tiny_engine: Engine) -> None:
    endless = SamplingParams(max_tokens=900, ignore_eos=True)

    async def run() -> None:
        task = asyncio.create_task(tiny_engine.agenerate([TEXT, TEXT], endless))
        while tiny_engine.stats().running == 0:
            await asyncio.sleep(0.001)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(run())
    deadline = time.monotonic() + 10
    while tiny_engine.stats().running and time.monotonic() < deadline:
        time.sleep(0.001)
    assert tiny_engine.stats().running == tiny_engine.stats().waiting == 0


def test_closing_an_async_stream_aborts_it(tiny_engine: Engine) -> None:
    async def run() -> None:
        stream = tiny_engine.astream(TEXT, SamplingParams(max_tokens=900, ignore_eos=True))
        async for _ in stream:
            break
        await stream.aclose()

    asyncio.run(run())
    assert tiny_engine.stats().running == 0


def test_many_threads_may_use_one_engine(tiny_engine: Engine) -> None:
    expected = {n: one(tiny_engine, ids(30, start=n)).token_ids for n in range(6)}
    found: dict[int, list[int]] = {}

    def work(n: int) -> None:
        found[n] = one(tiny_engine, ids(30, start=n)).token_ids

    threads = [threading.Thread(target=work, args=(n,)) for n in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert found == expected


def test_a_pool_too_small_for_all_preempts_and_still_answers_right(tmp_path: Path) -> None:
    path = make_tiny_model(tmp_path / "m")
    params = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
    prompts = [ids(20, start=n) for n in range(5)]
    with Engine(path, dtype="float32", num_blocks=400) as roomy:
        expected = [done.token_ids for done in roomy.generate(prompts, params)]
    with Engine(path, dtype="float32", num_blocks=8, block_size=8) as tight:
        streams = [tight.stream(prompt, params) for prompt in prompts]
        assert [stream.result().token_ids for stream in streams] == expected
        assert tight.stats().preemptions > 0
        tight.check()


def test_a_list_of_prompts_computes_what_they_share_once_in_memory_for_one_of_them(tmp_path: Path) -> None:
    path = make_tiny_model(tmp_path / "m")
    params = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
    prompts = [[*ids(24, start=part), *ids(8, start=100 + n)] for n in range(4) for part in (0, 60, 120)]
    with Engine(path, dtype="float32", num_blocks=400, block_size=8) as roomy:
        expected = [done.token_ids for done in roomy.generate(prompts, params)]
    with Engine(path, dtype="float32", num_blocks=8, block_size=8, max_running=8) as tight:
        assert [done.token_ids for done in tight.generate(prompts, params)] == expected
        stats = tight.stats()
        assert stats.computed_tokens == 3 * (24 + 4 * 8) + 12 * 29
        assert stats.preemptions == 0
        assert stats.cache.evictions > 0
        tight.check()


def test_a_machine_that_is_not_exact_is_told_so(
    tiny_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from phloem.kernels.self_test import InvarianceCheck, InvarianceReport
    from phloem.runtime import assembly as module

    with Engine(tiny_path, num_blocks=8):
        assert not caplog.records, "this machine is exact"
    check = InvarianceCheck("linear 8x8", holds=False, detail="")
    monkeypatch.setattr(module, "_self_test", lambda *_: InvarianceReport(torch.float32, 1, (check,)))
    with Engine(tiny_path, num_blocks=8):
        assert "linear 8x8" in caplog.text
    caplog.clear()
    with Engine(tiny_path, num_blocks=8, deterministic=False):
        assert not caplog.records


def test_no_tokens_to_generate_computes_the_prompt_and_scores_it(tiny_engine: Engine) -> None:
    scored = one(tiny_engine, TEXT, SamplingParams(max_tokens=0, prompt_logprobs=2))
    whole = one(tiny_engine, TEXT, SamplingParams(max_tokens=1, prompt_logprobs=2, temperature=0))
    assert (scored.token_ids, scored.text, scored.finish_reason) == ([], "", "length")
    assert scored.prompt_logprobs == whole.prompt_logprobs
    assert scored.usage.prompt_tokens == whole.usage.prompt_tokens
    again = one(tiny_engine, TEXT, SamplingParams(max_tokens=0))
    assert again.usage.cached_tokens == again.usage.prompt_tokens - 1
    [left, right] = tiny_engine.generate([7], SamplingParams(max_tokens=0, n=2))
    assert left.token_ids == right.token_ids == []


def test_each_chunk_tells_the_usage_so_far(tiny_engine: Engine) -> None:
    params = SamplingParams(max_tokens=3, temperature=0, ignore_eos=True)
    one(tiny_engine, TEXT, params)
    usages = [chunk.usage for chunk in tiny_engine.stream(TEXT, params)]
    assert [usage.completion_tokens for usage in usages] == [1, 2, 3]
    assert {usage.cached_tokens for usage in usages} == {usages[0].prompt_tokens - 1}


def test_generations_are_started_from_an_event_loop_and_read_one_by_one(tiny_engine: Engine) -> None:
    async def main() -> list[list[int]]:
        params = SamplingParams(max_tokens=4, temperature=0, ignore_eos=True, n=2)
        generations = await tiny_engine.asubmit([TEXT, ids(20)], params)
        with pytest.raises(InvalidRequest):
            await tiny_engine.asubmit(ids(20), SamplingParams(logit_bias={10**6: 1}))
        return [(await generation.result()).token_ids for generation in generations]

    first, second, third, fourth = asyncio.run(main())
    assert first == second != third == fourth


def test_an_engine_tells_that_it_was_closed(tiny_path: Path) -> None:
    engine = Engine(tiny_path, num_blocks=4)
    assert not engine.is_closed
    engine.close()
    assert engine.is_closed


def test_deadlines_of_requests_that_ended_are_forgotten_before_they_pass(tiny_engine: Engine) -> None:
    short = SamplingParams(temperature=0, max_tokens=1)
    for _ in range(300):
        one(tiny_engine, "a", short, timeout_s=1000)
    assert len(tiny_engine._core.loop._deadlines) < 100
    with pytest.raises(Cancelled):
        one(tiny_engine, TEXT, SamplingParams(max_tokens=4000, ignore_eos=True), timeout_s=0.05)
