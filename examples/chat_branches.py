"""A chat with branches: two ways on from one conversation, a turn taken back, and all of it saved. What was said is not computed again."""

from pathlib import Path
from tempfile import TemporaryDirectory

from phloem.runtime import Engine, SamplingParams
from phloem.runtime.frontend.session import Session, Turn

PARAMS = SamplingParams(temperature=0, max_tokens=40)


def show(who: str, turn: Turn) -> None:
    print(f"{who}: {turn.messages[0].content}\n  -> {turn.text}")
    print(f"  ({turn.usage.cached_tokens} of {turn.usage.prompt_tokens} prompt tokens reused)")


with (
    Engine("smollm2-135m") as engine,
    engine.session(params=PARAMS) as session,
    TemporaryDirectory() as folder,
):
    show("main", session.say("What is the capital of France?"))
    show("main", session.say("Which river flows through it?"))
    with session.fork() as other, session.fork(turn=1) as earlier:
        show("fork", other.say("What is that river's length?"))
        show("fork of turn 1", earlier.say("Name a museum there."))
    session.rewind(-1)
    show("main, rewound", session.say("Which river flows through it? Answer in one word."))
    session.save(Path(folder) / "chat.json")
    with Session.load(engine, Path(folder) / "chat.json", params=PARAMS) as loaded:
        show("loaded", loaded.say("Thank you!"))
