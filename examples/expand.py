"""Expand a branch: several samples of what comes next, each a branch to go on from. The same seed gives the same ones."""

from phloem.runtime import Engine, SamplingParams

with Engine("smollm2-135m") as engine, engine.branch("Once upon a time, a small robot") as root:
    for number, kid in enumerate(root.expand(4, SamplingParams(max_tokens=16, temperature=0.8, seed=7))):
        [score] = kid.score([" The end."])
        print(f'{number}: {kid.completion.text!r}  (" The end." scores {score.total:.1f} here)')
