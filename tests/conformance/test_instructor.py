"""instructor on the server: pydantic models from answers, as JSON and as calls of a tool, whole and in parts."""

from collections.abc import Iterator
from typing import Any, Literal

import pytest
from live_server import LiveServer
from openai import OpenAI
from pydantic import BaseModel

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

QUESTION = [{"role": "user", "content": "Where is the Louvre?"}]


class Place(BaseModel):
    """Where something is."""

    city: Literal["Paris", "Rome"]
    is_capital: bool


@pytest.fixture(scope="module")
def instructor() -> Any:
    return pytest.importorskip("instructor", reason="needs instructor (requirements-clients.txt)")


@pytest.fixture(params=["JSON_SCHEMA", "TOOLS", "TOOLS_STRICT"])
def client(request: pytest.FixtureRequest, server: LiveServer, instructor: Any) -> Iterator[Any]:
    with OpenAI(base_url=f"{server.url}/v1", api_key="any", max_retries=0, timeout=30) as client:
        yield instructor.from_openai(client, mode=instructor.Mode[request.param])


def test_an_answer_is_an_object(client: Any) -> None:
    place, whole = client.chat.completions.create_with_completion(
        model="tiny", messages=QUESTION, response_model=Place, max_retries=0
    )
    assert place.city in ("Paris", "Rome")
    assert type(place.is_capital) is bool
    assert whole.usage.completion_tokens > 0


def test_an_object_comes_in_parts(client: Any, instructor: Any) -> None:
    question = {
        "model": "tiny",
        "messages": QUESTION,
        "response_model": Place,
        "max_retries": 0,
        "temperature": 0,
    }
    parts = list(client.chat.completions.create_partial(**question))
    assert parts[-1].model_dump() == client.chat.completions.create(**question).model_dump()
    if client.mode is instructor.Mode.JSON_SCHEMA:  # calls of tools come as a whole
        assert len(parts) > 1
