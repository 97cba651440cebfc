"""Score continuations: how likely each is after the same prompt, in one batch over its cached KV."""

from phloem.runtime import Engine

with Engine("smollm2-135m") as engine, engine.branch("The capital of France is") as root:
    options = [" Paris", " London", " a kind of cheese"]
    for option, score in zip(options, root.score(options), strict=True):
        print(f"{option!r:>20}: log-probability {score.total:7.2f}, per token {score.mean:6.2f}")
