"""Log-probabilities: of continuations of a branch, of its next token, and of a prompt."""

import asyncio
from pathlib import Path

import pytest
import torch

from phloem.runtime import Branch, Completion, Engine, InvalidRequest, SamplingParams

GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)


def ids(count: int, *, start: int = 0) -> list[int]:
    return [(7 * n + start) % 250 for n in range(count)]


def alone(engine: Engine, prompt: list[int], params: SamplingParams) -> Completion:
    [done] = engine.generate(prompt, params)
    return done


def model_logprobs(path: Path, tokens: list[int]) -> torch.Tensor:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    with torch.no_grad():
        return model(torch.tensor([tokens])).logits[0].log_softmax(dim=-1)


def test_scores_agree_with_transformers(tiny_path: Path, tiny_engine: Engine) -> None:
    continuations = [[5], [5, 6, 7], ids(30, start=3), [200, 1]]
    with tiny_engine.branch(ids(21)) as root:
        scores = root.score(continuations)
        assert root.token_ids == ids(21)
    for continuation, score in zip(continuations, scores, strict=True):
        expected = model_logprobs(tiny_path, ids(21) + continuation)
        for offset, entry in enumerate(score.token_logprobs):
            assert entry.token_id == continuation[offset]
            assert abs(entry.logprob - float(expected[20 + offset, entry.token_id])) < 1e-3
        assert score.total == pytest.approx(sum(entry.logprob for entry in score.token_logprobs))
        assert score.mean == pytest.approx(score.total / len(continuation))


def test_scores_are_the_same_bits_warm_and_cold_and_leave_the_prefix_cached(tiny_engine: Engine) -> None:
    with tiny_engine.branch(ids(40)) as root:
        cold = root.score([[1, 2, 3], [4]])
        warm = root.score([[1, 2, 3], [4]])
        single = root.score([[4]])
    assert cold == warm
    assert single[0] == warm[1]
    assert alone(tiny_engine, ids(40), GREEDY).usage.cached_tokens >= 32


def test_a_score_reads_the_end_of_the_path_once_and_no_last_token(tiny_engine: Engine) -> None:
    with tiny_engine.branch(ids(40)) as root:
        root.score([[1]])
        before = tiny_engine.stats().computed_tokens
        root.score([[1, 2, 3], [4], [5, 6], [1]])
        assert tiny_engine.stats().computed_tokens - before == 1 + 2 + 0 + 1 + 0


def test_b39_scores_are_of_the_options_own_tokens_in_any_order_with_their_spaces(tiny_engine: Engine) -> None:
    options = [" no", " yes", "yes", " yes please", " "]
    with tiny_engine.branch("Is it so? Answer:") as root:
        scores = root.score(options)
        for option, score in zip(options, scores, strict=True):
            assert [entry.token_id for entry in score.token_logprobs] == list(option.encode())
        assert root.score(options[::-1]) == scores[::-1]
        assert [root.score([option])[0] for option in options] == scores, (
            "whatever else there is to choose from"
        )
        longer = scores[3].token_logprobs[: len(" yes")]
        assert longer == scores[1].token_logprobs, "a longer option begins as the shorter one does"


@pytest.mark.model
def test_b39_an_option_that_extends_another_is_scored_from_the_same_boundary(smollm2_path: Path) -> None:
    with (
        Engine(smollm2_path, num_blocks=64) as engine,
        engine.branch("The capital of France is") as root,
    ):
        prompt = root.token_ids
        options = [" Paris", "Paris", " Paris is", " Lyon"]
        scores = root.score(options)
        assert root.token_ids == prompt
        for option, score in zip(options, scores, strict=True):
            assert engine.tokenizer.decode([entry.token_id for entry in score.token_logprobs]) == option
        assert max(scores[:2] + scores[3:], key=lambda score: score.total) is scores[0]
        assert scores[2].token_logprobs[0] == scores[0].token_logprobs[0]
        assert root.score(options[::-1]) == scores[::-1]


@pytest.mark.parametrize("bad", [[], [""], [[]], "text", [[10**6]], [[1], []]])
def test_a_score_of_nothing_is_refused(tiny_engine: Engine, bad: object) -> None:
    with tiny_engine.branch(ids(20)) as root:
        with pytest.raises(InvalidRequest):
            root.score(bad)
        assert len(root.score([[1]])) == 1


def test_next_token_logprobs(tiny_path: Path, tiny_engine: Engine) -> None:
    expected = model_logprobs(tiny_path, ids(21))[20]
    with tiny_engine.branch(ids(21)) as root:
        for token_id, logprob in root.next_token_logprobs([3, 1, 2]):
            assert abs(logprob - float(expected[token_id])) < 1e-3
        top = root.next_token_logprobs(top=5)
        assert [token_id for token_id, _ in top] == expected.topk(5).indices.tolist()
        assert root.token_ids == ids(21)


def test_b32_prompt_logprobs_are_the_same_warm_and_cold_and_flush_nothing(
    tiny_path: Path, tiny_engine: Engine
) -> None:
    params = SamplingParams(temperature=0, max_tokens=3, prompt_logprobs=2, logprobs=1, ignore_eos=True)
    cold = alone(tiny_engine, ids(40), params)
    alone(tiny_engine, ids(40), GREEDY)
    warm = alone(tiny_engine, ids(40), params)
    assert warm.prompt_logprobs == cold.prompt_logprobs
    assert warm.usage.cached_tokens == 0
    assert alone(tiny_engine, ids(40), GREEDY).usage.cached_tokens == 39, "the cache is as it was"
    expected = model_logprobs(tiny_path, ids(40) + warm.token_ids)
    assert [entry.token_id for entry in warm.prompt_logprobs] == ids(40)[1:]
    for position, entry in enumerate([*warm.prompt_logprobs, *warm.logprobs]):
        assert abs(entry.logprob - float(expected[position, entry.token_id])) < 1e-3
    assert all(len(entry.top) == 2 for entry in warm.prompt_logprobs)
    assert warm.logprobs[0].top[0][0] == warm.token_ids[0]


def test_prompt_logprobs_from_a_position_let_what_is_before_it_come_from_the_cache(
    tiny_engine: Engine,
) -> None:
    whole = alone(tiny_engine, ids(40), SamplingParams(max_tokens=0, prompt_logprobs=1)).prompt_logprobs
    for start in (0, 1, 15, 16, 17, 38, 39, 40, 5000):
        for max_tokens in (0, 2):
            params = SamplingParams(max_tokens=max_tokens, prompt_logprobs=1, prompt_logprobs_from=start)
            done = alone(tiny_engine, ids(40), params)
            assert done.prompt_logprobs == whole[start:], start
            assert done.usage.cached_tokens == min(start, 39), start
    with pytest.raises(InvalidRequest, match="prompt_logprobs_from"):
        SamplingParams(prompt_logprobs_from=-1)


def test_streamed_chunks_carry_logprobs(tiny_engine: Engine) -> None:
    params = SamplingParams(temperature=0, max_tokens=4, logprobs=0, ignore_eos=True)
    chunks = list(tiny_engine.stream(ids(10), params))
    assert [entry for chunk in chunks for entry in chunk.logprobs or []] == chunks[-1].completion.logprobs


def test_a_cancelled_score_stops_all_of_its_continuations(tiny_engine: Engine) -> None:
    async def score_and_leave(root: Branch) -> None:
        task = asyncio.create_task(root.ascore([ids(400, start=n) for n in range(8)]))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    with tiny_engine.branch(ids(20)) as root:
        asyncio.run(score_and_leave(root))
        stats = tiny_engine.stats()
        assert stats.running == stats.waiting == 0


def test_a_branch_goes_on_from_what_its_score_computed(tiny_engine: Engine) -> None:
    """The winner of a choice is appended: all of it but its last token is there, also inside a block."""
    with tiny_engine.branch(ids(40)) as root:
        root.score([[1, 2, 3, 4], [5, 6, 7, 8]])
        done = root.append([5, 6, 7, 8]).generate(GREEDY)
        assert done.usage.cached_tokens == 43
    tiny_engine.clear_cache()
    [cold] = tiny_engine.generate([*ids(40), 5, 6, 7, 8], GREEDY)
    assert (cold.token_ids, cold.usage.cached_tokens) == (done.token_ids, 0)
