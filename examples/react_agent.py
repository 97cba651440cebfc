"""A ReAct agent (Yao et al., 2022) with two Python tools: it thinks, calls one, sees the result, and answers.

Each step goes on from the cached conversation: the tools' descriptions are computed once, for all questions.
"""

from phloem.runtime import Engine, Grammar, SamplingParams
from phloem.runtime.frontend.session import Toolbox

WEATHER = {"Paris": "rain, 12 degrees", "Rome": "sun, 25 degrees"}


def multiply(a: int, b: int) -> int:
    """Multiply two whole numbers.

    Args:
        a: The first number.
        b: The second number.
    """
    return a * b


def weather(city: str) -> str:
    """Tell today's weather in a city.

    Args:
        city: The city's name.
    """
    return WEATHER.get(city, "unknown")


THOUGHTS = ["I have to multiply two numbers.", "I have to look up the weather."]
THINK = SamplingParams(temperature=0, grammar=Grammar.choice(THOUGHTS))
ACT = SamplingParams(temperature=0, max_tokens=60)

tools = Toolbox([multiply, weather], max_rounds=1)
with (
    Engine("smollm2-135m") as engine,
    engine.session(system="You answer with the help of tools.", tools=tools, params=ACT) as base,
):
    for question in (
        "What is 17 times 23?",
        "What is the weather in Rome?",
        "What is 31 times 12?",
        "How is the weather in Paris?",
    ):
        with base.fork() as agent:
            thought = agent.say(question, params=THINK, tool_choice="none")
            # A model of this size calls a tool when it must; a larger one decides by itself (tool_choice="auto").
            turn = agent.say(f"Call the tool, then answer: {question}", tool_choice="required")
        print(f"Question: {question}\nThought: {thought.text}")
        for result in turn.tool_results:
            print(f"Action: {result.call.name}({dict(result.call.arguments)})\nObservation: {result.content}")
        print(f"Answer: {turn.text}")
        computed = thought.usage.computed_tokens + turn.usage.computed_tokens
        print(
            f"({computed} prompt tokens computed, {thought.usage.cached_tokens + turn.usage.cached_tokens} reused)\n"
        )
