"""TreeQuest drives the search, phloem holds its states: each state is a branch, and what grows from it shares its KV.

Needs `pip install treequest`. Its algorithms say which states to go on from (`ask_batch`) and learn what came of it (`tell`).
"""

import treequest

from phloem.runtime import Branch, Engine, SamplingParams

PROMPT = "The storm came in the night, and the lighthouse keeper"
ROUNDS, WIDTH = 5, 4


def worth(branch: Branch) -> float:
    """From 0 to 1: how sure the model was of its words, and fewer points for saying them again."""
    words = branch.text.split()
    sure = sum(entry.logprob for entry in branch.completion.logprobs) / len(branch.completion.token_ids)
    return max(0.0, 1.0 + sure / 4) * len(set(words)) / len(words)


def main() -> None:
    algorithm = treequest.ABMCTSA()
    state = algorithm.init_tree()
    with (
        Engine("smollm2-135m") as engine,
        engine.branch(PROMPT) as root,
        engine.expansion() as expansion,
    ):
        for number in range(ROUNDS):
            state, trials = algorithm.ask_batch(state, WIDTH, ["words"])
            families = {}
            for index, trial in enumerate(trials):
                params = SamplingParams(
                    max_tokens=20, logprobs=0, ignore_eos=True, seed=number * WIDTH + index
                )
                families[expansion.add(trial.parent_state or root, 1, params)] = trial
            for born in expansion:
                trial = families[born.family]
                state = algorithm.tell(state, trial.trial_id, (born.branch, worth(born.branch)))
        found = algorithm.get_state_score_pairs(state)
        usages = [branch.completion.usage for branch, _ in found]
        [(best, value)] = treequest.top_k(state, algorithm, k=1)
        print(f"{value:.2f}: {best.text[len(PROMPT) :]!r}")
        print(
            f"{len(found)} states; {sum(usage.cached_tokens for usage in usages):,} of "
            f"{sum(usage.prompt_tokens for usage in usages):,} prompt tokens came from the cache"
        )
        for branch, _ in found:
            branch.release()


main()
