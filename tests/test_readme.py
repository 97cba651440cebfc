"""The README's programs run."""

import re
from pathlib import Path

import pytest

README = Path(__file__).resolve().parents[1] / "README.md"
ALL_BLOCKS = re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)
# The server's clients are run by its own tests (tests/runtime/server, tests/conformance).
BLOCKS = [block for block in ALL_BLOCKS if "http://127.0.0.1" not in block]


@pytest.mark.model
@pytest.mark.slow
@pytest.mark.usefixtures("smollm2_path")
def test_the_programs_of_the_readme_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)  # one of them writes a file
    # In one namespace, since later ones use what earlier ones imported.
    names: dict[str, object] = {}
    for block in BLOCKS:
        exec(compile(block, str(README), "exec"), names)
    output = capsys.readouterr().out
    assert "Rome. Usage(prompt_tokens=19, cached_tokens=18, completion_tokens=2)" in output
    assert " Paris" in output
