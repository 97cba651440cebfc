"""A program of SGLang's frontend language on an engine in this process: forks, a choice, and what they reused.

SGLang's frontend is installed with: pip install "phloem[sglang]" and pip install --no-deps sglang==0.5.5.post3
"""

import sglang as sgl

from phloem.runtime import Engine
from phloem.runtime.frontend.sglang import PhloemBackend


@sgl.function
def describe(s, animal):
    s += sgl.system("You answer in one short sentence.")
    s += sgl.user(f"Let us talk about the {animal}.")
    sides = s.fork(2)
    for side, question in zip(sides, ["What does it eat?", "Where does it live?"], strict=False):
        side += sgl.user(question)
        side += sgl.assistant(sgl.gen("answer", max_tokens=24, temperature=0))
    sides.join()
    s += sgl.user("Can it fly?")
    s += sgl.assistant(sgl.select("flies", ["Yes", "No"]))
    return [side.get_meta_info("answer") for side in sides] + [s.get_meta_info("flies")]


with Engine("smollm2-135m") as engine:
    sgl.set_default_backend(PhloemBackend(engine))
    for state in describe.run_batch([{"animal": "owl"}, {"animal": "whale"}]):
        for answer in state["answer"]:
            print(answer)
        print("Flies:", state["flies"])
        usages = state.ret_value
        cached, prompt = (sum(usage[name] for usage in usages) for name in ("cached_tokens", "prompt_tokens"))
        print(f"{cached} of {prompt} prompt tokens came from the cache")
