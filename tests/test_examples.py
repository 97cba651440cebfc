"""Each example runs, and prints what it says it prints."""

import runpy
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"


@pytest.mark.model
@pytest.mark.parametrize(
    ("name", "shown"),
    [
        ("fork", ["owls", "bees", "whales", "cached"]),
        ("score", ["' Paris'", "log-probability"]),
        ("expand", ["0:", "3:", "The end."]),
        ("constrained", ['{"city": "', "forced by the schema"]),
        pytest.param(
            "game_of_24",
            ["1 1 11 11: ", "flowchart TD", "prompt tokens came from the cache"],
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "best_of_n",
            ["votes: {", "best:", "self-consistency: ", "prompt tokens came from the cache"],
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "react_agent",
            ["Thought: I have to multiply", "Observation: 391", "prompt tokens computed"],
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "chat_branches",
            ["main: ", "fork of turn 1: ", "loaded: ", "prompt tokens reused"],
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "treequest_search", ["20 states", "prompt tokens came from the cache"], marks=pytest.mark.slow
        ),
        ("fewshot_select", ["of 10 right", "of them from the cache", "[0] select answer"]),
        ("fork_join", ["For the shops, it means that", "All in all,", "[0.2] gen view"]),
        ("sglang_program", ["owl", "Flies: ", "prompt tokens came from the cache"]),
        ("extract", ["Person(name='Anna Berg', age=34, job='teacher')", "prompt tokens cached"]),
    ],
)
def test_an_example_runs(
    name: str, shown: list[str], smollm2_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if name == "treequest_search":
        pytest.importorskip("treequest", reason="treequest is not installed; it needs Python 3.11")
    if name == "sglang_program":
        pytest.importorskip("sglang", reason="needs SGLang's frontend (requirements-sglang.txt)")
    runpy.run_path(str(EXAMPLES / f"{name}.py"))
    output = capsys.readouterr().out
    for text in shown:
        assert text in output
