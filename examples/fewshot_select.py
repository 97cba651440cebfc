"""Few-shot questions with four answers each: the examples are computed once, and each answer costs only its own tokens."""

from phloem.runtime import Engine
from phloem.runtime.frontend.program import program

EXAMPLES = """The following are multiple choice questions about the world.

Question: Which planet is closest to the Sun?
Answer: Mercury

Question: What do bees make?
Answer: honey

Question: How many legs does a spider have?
Answer: eight

Question: Which gas do plants take from the air?
Answer: carbon dioxide

"""
QUESTIONS = [
    ("What is the capital of France?", ["Madrid", "Paris", "Rome", "Vienna"]),
    ("Which animal says meow?", ["a dog", "a cow", "a cat", "a duck"]),
    ("What is frozen water called?", ["ice", "steam", "sand", "salt"]),
    ("Which of these is a fruit?", ["a carrot", "an apple", "a potato", "an onion"]),
    ("How many days does a week have?", ["five", "six", "seven", "eight"]),
    ("Where do fish live?", ["in trees", "in the sky", "in deserts", "in water"]),
    ("Which metal is attracted by magnets?", ["iron", "gold", "copper", "silver"]),
    ("What does a thermometer measure?", ["weight", "temperature", "length", "time"]),
    ("Which season is the coldest?", ["summer", "spring", "winter", "autumn"]),
    ("Who wrote Romeo and Juliet?", ["Charles Dickens", "William Shakespeare", "Jane Austen", "Mark Twain"]),
]
RIGHT = [
    "Paris",
    "a cat",
    "ice",
    "an apple",
    "seven",
    "in water",
    "iron",
    "temperature",
    "winter",
    "William Shakespeare",
]


@program
def answer(s, question, options):
    s += EXAMPLES
    s += f"Question: {question}\nAnswer:"
    return s.select("answer", [f" {option}" for option in options], by="mean").scores


with Engine("smollm2-135m") as engine:
    runs = answer.map(engine, QUESTIONS, concurrency=8)
    for (question, _), right, run in zip(QUESTIONS, RIGHT, runs, strict=True):
        print(f"{question:40}{run['answer']:22}{'' if run['answer'].strip() == right else 'wrong: ' + right}")
    found = sum(run["answer"].strip() == right for run, right in zip(runs, RIGHT, strict=True))
    asked = sum(run.usage.prompt_tokens for run in runs)
    cached = sum(run.usage.cached_tokens for run in runs)
    print(
        f"{found} of {len(runs)} right; {asked} prompt tokens for {4 * len(runs)} options, {cached} of them from the cache"
    )
    print(runs[-1].trace)
