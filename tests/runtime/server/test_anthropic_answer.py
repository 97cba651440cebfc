"""What of a model's answer Anthropic's clients are given, where no model that is random would write it."""

from typing import Any

import pytest

from phloem.runtime import Completion, SamplingParams, Usage
from phloem.runtime.server.anthropic_answer import MessageAnswer
from phloem.runtime.server.chat_prompt import ChatPrompt

CALL = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'


class Notebook:
    """Takes note of what is remembered."""

    def __init__(self) -> None:
        self.notes: list[Any] = []

    def remember(self, prompt: Any, done: Any, params: Any, *, content: str, calls: Any) -> None:
        self.notes.append((content, len(calls)))


@pytest.mark.parametrize("takes_one_call", [False, True])
def test_calls_that_are_not_forced_are_given_up_to_the_first(takes_one_call: bool) -> None:
    notebook: Any = Notebook()
    answer = MessageAnswer(
        "tiny", ChatPrompt([1], b""), SamplingParams(), notebook, ("f",), takes_one_call, diagnostics=None
    )
    for num_written in (0, 1, 2):
        text = "\n".join(["So be it.", *[CALL] * num_written])
        done = Completion("1", text, [1, 2], "stop", Usage(1, 0, 2), 0.0, 0.0)
        message = answer.whole(done, [])
        num_given = min(num_written, 1) if takes_one_call else num_written
        assert [block["type"] for block in message["content"]] == ["text"] + ["tool_use"] * num_given
        assert message["stop_reason"] == ("tool_use" if num_given else "end_turn")
        assert len({block.get("id") for block in message["content"]}) == 1 + num_given
    # An answer of which a part was kept back will not come back as it was drawn.
    kept = [("So be it.", 0), ("So be it.", 1), ("So be it.", 2)]
    assert notebook.notes == (kept[:2] if takes_one_call else kept)


def test_an_answer_that_the_server_ended_may_be_gone_on_from() -> None:
    notebook: Any = Notebook()
    answer = MessageAnswer(
        "tiny", ChatPrompt([1], b""), SamplingParams(), notebook, (), False, diagnostics=None
    )
    done = Completion("1", "half", [1], "abort", Usage(1, 0, 1), 0.0, 0.0)
    assert answer.whole(done, [])["stop_reason"] == "pause_turn"
