"""Facts out of text, as pydantic objects: the schema constrains what is generated, so each answer parses."""

from typing import Literal

from pydantic import BaseModel, Field

from phloem.runtime import Engine
from phloem.runtime.frontend.program import program


class Person(BaseModel):
    """What a letter tells about someone."""

    name: str = Field(pattern=r"^[A-Z][a-z]+( [A-Z][a-z]+)?$")
    age: int = Field(ge=0, le=120)
    job: Literal["baker", "doctor", "farmer", "teacher"]


LETTERS = [
    "My neighbour Anna Berg turned 34 last week. She teaches at the school down the road.",
    "Old Tom Hill is 71 and still drives his tractor over the fields every morning.",
    "When I broke my arm, Mary Stone looked after me in her practice. She is only 29!",
    "The best bread in town is from Paul, who is 45 and gets up at three each morning.",
]


@program
def extract(s, letter):
    s.system("You read letters and write down the facts about the person in them as JSON.")
    s.user(f"{LETTERS[0]}\n\nWho is it?")
    s.assistant('{"name": "Anna Berg", "age": 34, "job": "teacher"}')
    s.user(f"{letter}\n\nWho is it?")
    with s.assistant():
        s.gen("person", json=Person, max_tokens=48, temperature=0)


with Engine("smollm2-135m") as engine:
    for letter, run in zip(LETTERS, extract.map(engine, LETTERS), strict=True):
        person = run["person"]
        assert isinstance(person, Person)
        print(
            f"{letter}\n  {person!r}\n  {run.usage.cached_tokens} of {run.usage.prompt_tokens} prompt tokens cached"
        )
