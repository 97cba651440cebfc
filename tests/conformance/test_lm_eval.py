"""lm-eval's `local-completions` on the server: the log-likelihoods of transformers, and the engine's generations."""

import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from live_server import LiveServer, live_server

from phloem.runtime import Engine, SamplingParams

pytestmark = [pytest.mark.slow, pytest.mark.model, pytest.mark.filterwarnings("ignore")]

PROBLEMS = Path(__file__).parents[2] / "examples" / "data" / "gsm8k" / "problems.json"
NUM_ITEMS = 50


@pytest.fixture(scope="module")
def server(smollm2_path: Path) -> Iterator[LiveServer]:
    with (
        Engine(smollm2_path, num_blocks=512, dtype="float32") as engine,
        live_server(engine, served_names=("smollm2",)) as server,
    ):
        yield server
        server.wait_until_idle()


@pytest.fixture(scope="module")
def items() -> list[tuple[str, str]]:
    """Contexts and what may follow: one that the model is sure of, right answers, and those to other problems."""
    problems = json.loads(PROBLEMS.read_text(encoding="utf-8"))
    pairs = [("1, 2, 3, 4, 5,", " 6, 7,")]
    for shift in range(4):
        for index, each in enumerate(problems):
            answer = problems[(index + shift) % len(problems)]["answer"]
            pairs.append((f"Question: {each['problem']}\nAnswer: The answer is", f" {answer}."))
    return pairs[:NUM_ITEMS]


@pytest.fixture
def make_client(server: LiveServer, smollm2_path: Path) -> Any:
    models = pytest.importorskip(
        "lm_eval.models.openai_completions", reason="needs lm-eval (the extra `clients`)"
    )
    return partial(
        models.LocalCompletionsAPI,
        base_url=f"{server.url}/v1/completions",
        model="smollm2",
        tokenizer=str(smollm2_path),
        tokenizer_backend="huggingface",
    )


def requests(kind: str, arguments: list[Any]) -> list[Any]:
    from lm_eval.api.instance import Instance

    return [Instance(kind, {}, each, index) for index, each in enumerate(arguments)]


def test_the_log_likelihoods_are_those_of_transformers(
    make_client: Any, smollm2_path: Path, items: list[tuple[str, str]]
) -> None:
    from transformers import AutoModelForCausalLM

    assert len(items) == NUM_ITEMS
    client = make_client(batch_size=8)
    found = client.loglikelihood(requests("loglikelihood", items), disable_tqdm=True)
    model = AutoModelForCausalLM.from_pretrained(smollm2_path, dtype=torch.float32)
    for (context, continuation), (total, is_greedy) in zip(items, found, strict=True):
        before = client.tok_encode(context)
        ids = client.tok_encode(context + continuation)
        assert ids[: len(before)] == before
        with torch.inference_mode():
            logprobs = model(torch.tensor([ids])).logits[0].log_softmax(dim=-1)
        expected = sum(
            float(logprobs[position - 1, ids[position]]) for position in range(len(before), len(ids))
        )
        assert total == pytest.approx(expected, abs=1e-2)
        likeliest = logprobs[len(before) - 1 : -1].argmax(dim=-1).tolist()
        assert is_greedy == (likeliest == ids[len(before) :])
    assert any(is_greedy for _, is_greedy in found), "or the flag shows nothing"


def test_many_requests_at_once_and_text_give_the_same(make_client: Any, items: list[tuple[str, str]]) -> None:
    some = requests("loglikelihood", items[:6])
    one = make_client().loglikelihood(some, disable_tqdm=True)
    for options in ({"num_concurrent": 6}, {"tokenized_requests": False}):
        again = make_client(**options).loglikelihood(some, disable_tqdm=True)
        assert again == one, options


def test_generations_are_the_engines(
    server: LiveServer, make_client: Any, items: list[tuple[str, str]]
) -> None:
    contexts = [context for context, _ in items[:3]]
    options = {"until": ["\n"], "max_gen_toks": 12, "do_sample": False}
    client = make_client()
    found = client.generate_until(
        requests("generate_until", [(context, options) for context in contexts]), disable_tqdm=True
    )
    done = server.engine.generate(contexts, SamplingParams(max_tokens=12, temperature=0, stop="\n"))
    assert found == [each.text for each in done]
