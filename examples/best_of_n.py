"""Many answers to a question of GSM8K: the one that most agree on, and the one that the model itself finds right.

The few-shot prompt is computed once, for all samples of both questions.
"""

import json
import re
from pathlib import Path

from phloem.runtime import Engine, SamplingParams
from phloem.runtime.frontend.search import (
    Sample,
    ScoreValue,
    SearchTree,
    best_of_n,
    self_consistency,
)

DATA = Path(__file__).parent / "data" / "gsm8k"
EXAMPLES = (DATA / "fewshot.txt").read_text(encoding="utf-8")
PROBLEMS = json.loads((DATA / "problems.json").read_text(encoding="utf-8"))
STEP = Sample(8, SamplingParams(max_tokens=96, temperature=0.4, stop="\n\n"))
RIGHT = ScoreValue(
    {" yes": 1.0, " no": 0.0}, suffix="\n\n### Instruction:\nIs that right?\n\n### Response:\nThe answer is:"
)


def prompt(problem: dict[str, str]) -> str:
    return f"{EXAMPLES}\n\n### Instruction:\n{problem['problem']}\n\n### Response:\nLet's think step by step."


def answer(text: str) -> str | None:
    found = re.findall(r"answer is:? *\$?([\d,]*\d)", text)
    return found[-1].replace(",", "") if found else None


def report(name: str, tree: SearchTree) -> None:
    usage = tree.usage
    print(f"{name}: {usage.cached_tokens:,} of {usage.prompt_tokens:,} prompt tokens came from the cache\n")


with Engine("smollm2-135m") as engine:
    problem = PROBLEMS[10]
    with SearchTree(engine, prompt(problem), seed=1) as tree:
        agreed = self_consistency(tree, STEP, answer)
        print(f"{problem['problem']}\nvotes: {agreed.votes}, right: {problem['answer']}")
        report("self-consistency", tree)
    problem = PROBLEMS[0]
    with SearchTree(engine, prompt(problem), seed=1) as tree:
        [best, *_] = best_of_n(tree, STEP, RIGHT)
        print(f"{problem['problem']}\nbest:{best.path_text.strip()}\nvalue: {best.value:.3f}, right: {problem['answer']}")  # fmt: skip
        report("best of n", tree)
