"""langchain-openai on the server: answers, streams, batches, tools, structured output, completions."""

import asyncio
from typing import Any, Literal

import pytest
from live_server import LiveServer
from pydantic import BaseModel

from phloem.runtime import SamplingParams

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

QUESTION = "Where is the Louvre?"


class Place(BaseModel):
    """Where something is."""

    city: Literal["Paris", "Rome"]
    is_capital: bool


@pytest.fixture(scope="module")
def langchain() -> Any:
    return pytest.importorskip("langchain_openai", reason="needs langchain-openai (the extra `clients`)")


def options(server: LiveServer, **more: Any) -> dict[str, Any]:
    return {
        "base_url": f"{server.url}/v1", "api_key": "any", "model": "tiny", "temperature": 0, "max_retries": 0, "timeout": 30, **more
    }  # fmt: skip


@pytest.fixture
def chat(server: LiveServer, langchain: Any) -> Any:
    return langchain.ChatOpenAI(**options(server, max_tokens=12))


def test_answers_streams_and_batches(server: LiveServer, chat: Any) -> None:
    [done] = server.engine.generate(
        [[{"role": "user", "content": QUESTION}]], SamplingParams(max_tokens=12, temperature=0)
    )
    answer = chat.invoke(QUESTION)
    assert answer.content == done.text
    assert answer.usage_metadata["output_tokens"] == done.usage.completion_tokens
    assert "".join(part.content for part in chat.stream(QUESTION)) == done.text
    assert [each.content for each in chat.batch([QUESTION] * 2)] == [done.text] * 2
    assert asyncio.run(chat.ainvoke(QUESTION)).content == done.text


@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
def test_an_answer_is_an_object(server: LiveServer, langchain: Any, method: str) -> None:
    chat = langchain.ChatOpenAI(**options(server))
    place = chat.with_structured_output(Place, method=method).invoke(QUESTION)
    assert place.city in ("Paris", "Rome")
    assert type(place.is_capital) is bool


def test_a_tool_is_called_and_its_result_answered(server: LiveServer, langchain: Any) -> None:
    from langchain_core.messages import HumanMessage, ToolMessage
    from langchain_core.tools import tool

    @tool
    def look_up(city: Literal["Paris", "Rome"]) -> str:
        """Look a city up."""
        return f"{city} has a museum"

    chat = langchain.ChatOpenAI(**options(server, max_tokens=200))
    question = HumanMessage(QUESTION)
    # Strict: otherwise the random model may go on with arguments of its own.
    call = chat.bind_tools([look_up], tool_choice="any", strict=True).invoke([question])
    [made] = call.tool_calls
    assert made["name"] == "look_up"
    result = look_up.invoke(made)
    assert isinstance(result, ToolMessage)
    assert chat.bind_tools([look_up]).invoke([question, call, result]).content is not None


def test_completions(server: LiveServer, langchain: Any) -> None:
    llm = langchain.OpenAI(**options(server, max_tokens=8))
    [done] = server.engine.generate(QUESTION, SamplingParams(max_tokens=8, temperature=0))
    assert llm.invoke(QUESTION) == done.text
    assert "".join(llm.stream(QUESTION)) == done.text
