"""`phloem doctor`, as a person would run it, on whatever machine this is."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from phloem.kernels.flashinfer_library import why_unavailable
from phloem.runtime import EngineConfig
from phloem.runtime.cli.doctor_facts import cpu_facts, engine_facts, exactness_facts, wait_policy_fact
from phloem.runtime.cli.main import app
from phloem.runtime.cli.random_model import llama_1b, write_random_model
from phloem.runtime.models.config import read_model_config
from phloem.runtime.models.loading import load_model
from phloem.runtime.placement import place


def examine(path: Path, *arguments: str, exit_code: int = 0) -> dict[str, Any]:
    result = CliRunner().invoke(app, ["doctor", *arguments, "--json", str(path)])
    assert result.exit_code == exit_code, result.output
    found: dict[str, Any] = json.loads(path.read_text())
    assert all(fact["name"] in result.output for fact in found["facts"])
    return found


def values(found: dict[str, Any], section: str) -> dict[str, str]:
    return {fact["name"]: fact["value"] for fact in found["facts"] if fact["section"].startswith(section)}


def test_it_tells_what_there_is_and_what_an_engine_would_use(tiny_path: Path, tmp_path: Path) -> None:
    found = examine(tmp_path / "facts.json", str(tiny_path))
    assert found["can_run"]
    assert values(found, "Software")["torch"] == torch.__version__
    reason = why_unavailable()
    assert values(found, "GPU")["can be used"] == ("yes" if reason is None else f"no: {reason}")
    assert values(found, "Exactness").keys() == {"bfloat16", "float32"}
    assert all("linear layers: " in value for value in values(found, "Exactness").values())
    engine = values(found, f"Engine: {tiny_path}")
    placement = place(EngineConfig(), read_model_config(tiny_path))
    assert engine["attention"] == placement.backend
    assert str(placement.why_no_gpu) in engine["runs on"]


def test_without_a_model_it_speaks_of_a_common_one(tmp_path: Path) -> None:
    engine = values(examine(tmp_path / "facts.json"), "Engine: for example")
    dtype_bytes = 4 if engine["computes in"].startswith("float32") else 2
    assert float(engine["weights"].split()[0]) == pytest.approx(1.2359 * dtype_bytes / 1.0737, abs=0.06)


def test_a_model_that_is_not_there_is_said_at_the_end_with_exit_code_1(tmp_path: Path) -> None:
    found = examine(tmp_path / "facts.json", str(tmp_path / "nothing"), exit_code=1)
    assert not found["can_run"]
    assert "there is no model" in values(found, "Engine")["error"]
    assert values(found, "Threads")


def test_no_compiler_is_told_with_what_follows(tmp_path: Path) -> None:
    environ = {"CXX": "no-such-compiler", "PHLOEM_CACHE": str(tmp_path)}
    [fact] = [fact for fact in cpu_facts(environ) if fact.advice is not None]
    assert "no-such-compiler" in fact.value
    assert "slower" in str(fact.advice)
    assert all(fact.advice is None for fact in exactness_facts(environ)), "torch's version is exact too"


def test_weights_that_leave_no_room_for_kv_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    import psutil

    from phloem.runtime import InvalidRequest

    memory = psutil.virtual_memory()._replace(available=2 << 30)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: memory)
    placement = place(EngineConfig(device="cpu", dtype="float32"), llama_1b())
    with pytest.raises(InvalidRequest, match="KV"):
        engine_facts("large", llama_1b(), placement)


@pytest.mark.parametrize(("policy", "is_advised"), [(None, True), ("ACTIVE", True), ("Passive", False)])
def test_spinning_threads_are_advised_against(policy: str | None, is_advised: bool) -> None:
    assert (wait_policy_fact(policy).advice is not None) == is_advised


@pytest.mark.parametrize(("given", "used"), [(None, "PASSIVE"), ("active", "ACTIVE")])
def test_the_command_lets_threads_sleep_unless_told_otherwise(given: str | None, used: str) -> None:
    """What OpenMP itself says when torch loads it."""
    environ = {name: value for name, value in os.environ.items() if name != "OMP_WAIT_POLICY"}
    environ |= {"OMP_DISPLAY_ENV": "true"} | ({} if given is None else {"OMP_WAIT_POLICY": given})
    code = (
        "import sys; sys.argv = ['phloem', 'demo', '--model', '/nowhere']; "
        "from phloem.runtime.cli.main import main; main()"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], env=environ, cwd=Path(__file__).parents[2],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    if "OMP_WAIT_POLICY" not in done.stderr:
        pytest.skip("this torch's OpenMP does not tell its settings")
    assert f"OMP_WAIT_POLICY = '{used}'" in done.stderr


def test_a_random_model_loads_like_any_other(tmp_path: Path) -> None:
    shape = {
        "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 500,
    }  # fmt: skip
    from phloem.runtime.cli.random_model import LLAMA_1B

    loaded = load_model(write_random_model(tmp_path, {**LLAMA_1B, **shape}))
    assert loaded.config.vocab_size == 500
    text = "naïve \n"
    assert loaded.tokenizer.decode(loaded.tokenizer.encode(text)) == text
