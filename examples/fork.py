"""Fork a branch: the children share all its KV, and each computes only its own words."""

from phloem.runtime import Engine, SamplingParams

with Engine("smollm2-135m") as engine, engine.branch("My three favourite animals are cats, dogs and") as root:
    for kid, word in zip(root.fork(3), (" owls", " bees", " whales"), strict=True):
        done = kid.append(word).generate(SamplingParams(max_tokens=12, temperature=0))
        print(
            f"{word}:{done.text!r}  ({done.usage.cached_tokens} of {done.usage.prompt_tokens} prompt tokens cached)"
        )
