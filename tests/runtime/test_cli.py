"""The command, as a person would run it."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from phloem.runtime.cli.main import app, main


def run(*arguments: str, feed: str | None = None) -> str:
    result = CliRunner().invoke(app, list(arguments), input=feed)
    assert result.exit_code == 0, result.output
    return result.output


def test_help_teaches_and_does_not_load_torch() -> None:
    code = (
        "import sys; from typer.testing import CliRunner; from phloem.runtime.cli.main import app; "
        "print(CliRunner().invoke(app, ['--help']).output); print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    for word in ("demo", "chat", "bench", "Start with"):
        assert word in done.stdout
    assert done.stdout.split()[-1] == "False"


def test_without_a_command_it_shows_the_help() -> None:
    assert "Usage" in CliRunner().invoke(app, []).output


def test_the_demo_shows_what_was_cached_and_that_the_answers_are_the_same(tiny_path: Path) -> None:
    output = run("demo", "--model", str(tiny_path))
    assert "19 of 19 answers are the same" in output
    assert re.search(r"question 16 +│ +[\d,]+ │ +2,\d{3} │", output), (
        "the shared prefix of some 2,500 bytes was cached"
    )
    assert "off / on" in output


@pytest.mark.slow
@pytest.mark.model
def test_the_demo_on_the_real_model_names_paris(smollm2_path: Path) -> None:
    output = run("demo")
    assert "Paris" in output
    assert "19 of 19 answers are the same" in output


def test_chat_keeps_the_conversation_and_says_what_was_cached(tiny_path: Path) -> None:
    output = run(
        "chat",
        "--model",
        str(tiny_path),
        "--max-tokens",
        "20",
        feed="hello there\nand again\n/stats\n/new\nfresh\n/quit\n",
    )
    cached = [int(number) for number in re.findall(r"(\d+) from the cache", output)]
    assert len(cached) == 3
    assert cached[1] > cached[0] == 0
    assert "hit_tokens" in output


def test_chat_takes_back_a_turn(tiny_path: Path) -> None:
    output = run(
        "chat", "--model", str(tiny_path), "--max-tokens", "20", feed="/undo\nhello\n/undo\nhello\n/quit\n"
    )
    first, again = (
        [int(number) for number in line]
        for line in re.findall(r"(\d+) tokens of prompt, (\d+) from the cache", output)
    )
    assert again[0] == first[0]
    assert again[1] == again[0] - 1


def test_chat_says_what_leaves_a_full_context(tiny_path: Path) -> None:
    feed = "".join(f"{letter * 1500}\n" for letter in "abcd")
    output = run("chat", "--model", str(tiny_path), "--max-tokens", "5", feed=feed)
    assert "The context is full: 2 turns were left out" in output
    assert output.count("from the cache") == 4


def test_chat_ends_with_its_input_and_survives_a_turn_that_is_too_long(tiny_path: Path) -> None:
    output = run("chat", "--model", str(tiny_path), "--max-tokens", "5", feed=f"{'x' * 5000}\nshort\n")
    assert "the context is 4096" in output
    assert output.count("from the cache") == 1


@pytest.mark.slow
def test_bench_programs_counts_what_is_computed_and_writes_json(tiny_path: Path, tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    output = run("bench", "programs", "--model", str(tiny_path), "--json", str(path))
    assert "256 inputs behind 1,000 shared tokens" in output
    found = json.loads(path.read_text())
    assert found["map_distinct"] > 1000 + 256 * 60
    assert found["map_computed"] <= 1.02 * found["map_distinct"]
    assert max(found["greedy_excess"], found["sampled_excess"]) <= 16
    assert found["tree_computed"] <= 1.05 * found["tree_distinct"]
    assert found["tree_cold"] >= 5 * found["tree_computed"]
    assert len(found["operations"]) == 10
    assert output.count("Python time of") == 10


def test_bench_reuse_measures_and_writes_json(tiny_path: Path, tmp_path: Path) -> None:
    path = tmp_path / "reuse.json"
    output = run("bench", "reuse", "--model", str(tiny_path), "--rounds", "3", "--json", str(path))
    assert "0.1 at most" in output
    found = json.loads(path.read_text())
    assert found["cached_tokens"] == found["prompt_tokens"] - 1 == 2047
    assert 0 < found["second_to_first"] < 1


def test_an_error_is_one_line_and_exit_code_1(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(sys, "argv", ["phloem", "demo", "--model", str(tmp_path / "nothing")])
    with pytest.raises(SystemExit) as exit_:
        main()
    assert exit_.value.code == 1
    error = capsys.readouterr().err
    assert error.startswith("error:")
    assert "nothing" in error
    assert "Traceback" not in error
