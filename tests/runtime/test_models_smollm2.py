"""The real model: SmolLM2-135M-Instruct gives the answers of transformers, and the same bits in any company."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from path_runner import PathRunner
from real_model import real_model_path

from phloem.runtime.models.loading import LoadedModel, load_model

pytestmark = pytest.mark.model

PROMPTS = Path(__file__).parents[2].parent / "shared" / "data" / "mmlu_cot" / "prompts.json"
NUM_TOKENS = 64

FRANCE = [{"role": "user", "content": "What is the capital of France?"}]


@pytest.fixture(scope="module")
def float32() -> LoadedModel:
    return load_model(real_model_path(), dtype=torch.float32)


@pytest.fixture(scope="module")
def bfloat16() -> LoadedModel:
    return load_model(real_model_path(), dtype=torch.bfloat16)


@pytest.fixture(params=["float32", "bfloat16"])
def loaded(request: pytest.FixtureRequest) -> LoadedModel:
    model: LoadedModel = request.getfixturevalue(request.param)
    return model


@pytest.fixture(scope="module")
def transformers_model() -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(real_model_path(), dtype=torch.float32)


@pytest.fixture(scope="module")
def prompts() -> list[str]:
    if not PROMPTS.exists():
        pytest.skip(f"{PROMPTS} is not here")
    return [*json.loads(PROMPTS.read_text(encoding="utf-8")).values()]


def test_it_knows_the_capital_of_france(loaded: LoadedModel) -> None:
    answer = PathRunner(loaded).greedy(0, loaded.tokenizer.encode_chat(FRANCE), 8)
    assert loaded.tokenizer.decode(answer) == "The capital of France is Paris."
    assert answer[-1] in loaded.tokenizer.eos_token_ids


def test_logits_are_those_of_transformers(float32: LoadedModel, transformers_model: Any) -> None:
    token_ids = float32.tokenizer.encode("Photosynthesis turns light into sugar. 12 + 30 = 42.\n\n" * 4)
    logits = PathRunner(float32).run(0, token_ids, chunk_sizes=[30, 1])
    with torch.inference_mode():
        reference = transformers_model(torch.tensor([token_ids])).logits[0]
    assert (logits - reference).abs().max() < 1e-3


def greedy_of_transformers(model: Any, token_ids: list[int]) -> list[int]:
    inputs = torch.tensor([token_ids])
    output = model.generate(
        inputs,
        attention_mask=torch.ones_like(inputs),
        max_new_tokens=NUM_TOKENS,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
    )
    ids: list[int] = output[0, len(token_ids) :].tolist()
    return ids


def greedy_of_ours(
    loaded: LoadedModel, prompts: list[str], *, max_prompt: int
) -> list[tuple[list[int], list[int]]]:
    """Prompt ids and the greedy continuation of each prompt."""
    token_ids = {path: loaded.tokenizer.encode(prompt)[-max_prompt:] for path, prompt in enumerate(prompts)}
    outputs = PathRunner(loaded, num_blocks=64 * len(prompts)).greedy_batch(token_ids, NUM_TOKENS)
    return [(token_ids[path], outputs[path]) for path in token_ids]


def test_greedy_tokens_are_those_of_transformers(
    float32: LoadedModel, transformers_model: Any, prompts: list[str]
) -> None:
    # one forward pass over prompt and answer: each answer token must be the likeliest after all before it
    for prompt, output in greedy_of_ours(float32, prompts[:3], max_prompt=100):
        with torch.inference_mode():
            logits = transformers_model(torch.tensor([prompt + output])).logits[0]
        assert logits[len(prompt) - 1 : -1].argmax(-1).tolist() == output


@pytest.mark.slow
def test_greedy_tokens_of_20_prompts_are_those_of_transformers(
    float32: LoadedModel, transformers_model: Any, prompts: list[str]
) -> None:
    for prompt, output in greedy_of_ours(float32, prompts[:20], max_prompt=900):
        assert greedy_of_transformers(transformers_model, prompt) == output


def test_b31_chunks_decodes_and_company_change_no_bit(loaded: LoadedModel) -> None:
    tokenizer = loaded.tokenizer
    token_ids = tokenizer.encode("The prefix cache keeps what was computed once, and reads it again. " * 5)[
        :66
    ]
    runner = PathRunner(loaded)
    at_once = runner.run(0, token_ids)
    assert torch.equal(runner.run(1, token_ids, chunk_sizes=[7, 16, 33, 1, 1]), at_once)
    other = tokenizer.encode("Something else entirely, of another length.")
    first = runner.step({2: other, 3: token_ids[:40]})[3]
    second = runner.step({3: token_ids[40:], 2: other[:1]})[3]
    assert torch.equal(torch.cat([first, second]), at_once)
