"""Game of 24 by a tree of thoughts, with the published prompts: the model proposes steps and judges what is left.

The model is small and its sums are often wrong, so Python does them: a proposed step counts when its two numbers are there.
"""

import json
import re
from fractions import Fraction
from pathlib import Path

from phloem.runtime import Engine, SamplingParams
from phloem.runtime.frontend.search import Node, Propose, ScoreValue, SearchTree, breadth_first

DATA = Path(__file__).parent / "data" / "tot"
PROMPTS = json.loads((DATA / "prompts.json").read_text(encoding="utf-8"))
PUZZLE = json.loads((DATA / "puzzles.json").read_text(encoding="utf-8"))[1]
ASKING = SamplingParams(max_tokens=48, temperature=1.0, n=6, stop="Input:")
STEP = re.compile(r"(-?\d+(?:/\d+)?) *([-+*/]) *(-?\d+(?:/\d+)?) *=")
SUMS = {
    "+": lambda a, b: a + b,
    "-": lambda a, b: a - b,
    "*": lambda a, b: a * b,
    "/": lambda a, b: a / b if b else None,
}


def numbers_left(node: Node) -> str:
    return re.findall(r"left: ([^)]*)\)", node.path_text)[-1] if node.depth else PUZZLE


def thought(first: str, sign: str, second: str, left: str) -> str | None:
    """The step as a line of text, or None when it can't be taken."""
    numbers = [Fraction(number) for number in left.split()]
    for operand in (Fraction(first), Fraction(second)):
        if operand not in numbers:
            return None
        numbers.remove(operand)
    result = SUMS[sign](Fraction(first), Fraction(second))
    if result is None:
        return None
    rest = " ".join(str(number) for number in sorted([*numbers, result]))
    return f"{first} {sign} {second} = {result} (left: {rest})\n"


def main() -> None:
    with Engine("smollm2-135m") as engine, SearchTree(engine, f"Input: {PUZZLE}\nSteps:\n", seed=24) as tree:

        def propose(nodes: list[Node]) -> list[list[str]]:
            prompts = [PROMPTS["propose_prompt"].format(input=numbers_left(node)) for node in nodes]
            found = []
            for node, answers in zip(nodes, tree.ask(prompts, ASKING), strict=True):
                steps = [step for answer in answers for step in STEP.findall(answer.text)]
                lines = [thought(first, sign, second, numbers_left(node)) for first, sign, second in steps]
                found.append(list(dict.fromkeys(line for line in lines if line)))
            return found

        step = Propose(propose, is_done=lambda node: numbers_left(node) == "24")
        judge = ScoreValue(
            {"sure": 20.0, "likely": 1.0, "impossible": 0.001},
            prompt=lambda node: PROMPTS["value_prompt"].format(input=numbers_left(node)),
        )
        found = breadth_first(tree, step, judge, keep=3, depth=3)
        solved = [node for node in found if node.is_done]
        print(f"{PUZZLE}: {'solved' if solved else 'not solved'}, {tree.ledger.nodes} nodes")
        print((solved or found or [tree.root])[0].path_text)
        print(tree.to_mermaid(max_nodes=12))
        usage = tree.usage
        print(
            f"{usage.cached_tokens:,} of {usage.prompt_tokens:,} prompt tokens came from the cache, "
            f"{engine.stats().computed_tokens:,} tokens were computed in all"
        )


main()
