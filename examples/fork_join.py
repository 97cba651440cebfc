"""Parallel reasoning: a question is forked into views that are written side by side, then joined for the conclusion."""

from phloem.runtime import Engine
from phloem.runtime.frontend.program import program

VIEWS = ("the people who walk", "the people who drive", "the shops")


@program
def consider(s, question):
    s.system("You are a thoughtful town planner. Answer in plain words.")
    s.user(f"{question} First look at it for one group, then conclude.")
    with s.assistant():
        with s.fork([f"For {view}, it means that" for view in VIEWS]) as views:
            views.gen("view", max_tokens=40, stop=[".", "\n"], temperature=0)
            for view, thought in zip(VIEWS, views["view"], strict=True):
                s += f"For {view}, it means that{thought}.\n"
        s += "All in all,"
        s.gen("conclusion", max_tokens=40, stop=[".", "\n"], temperature=0)


with Engine("smollm2-135m") as engine:
    run = consider.run(engine, "Should the main street be closed to cars?")
    print(run.text)
    print(run.trace)
