"""llm-comply's cases for OpenAI's chats and responses and Anthropic's messages, all but images, reasoning and compaction."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import llm_comply
import pytest
from live_server import LiveServer
from llm_comply.config import ComplianceConfig
from llm_comply.http import close_client
from llm_comply.runner import TestRunner as Runner
from llm_comply.schema import SpecLoader
from llm_comply.tests import get_tests

from phloem.runtime.engine_core import EngineCore

SPECS = {
    "open-responses": "openresponses.json",
    "openai-chat": "openai_chat.json",
    "anthropic": "anthropic.json",
}
LEFT_OUT = ("image", "reasoning", "thinking", "compact")
CASES = [
    pytest.param(name, case, id=case.id)
    for name in SPECS
    for case in get_tests(name)
    if not any(word in case.id for word in LEFT_OUT)
]


@pytest.fixture(scope="module")
def specs() -> Iterator[dict[str, SpecLoader]]:
    folder = Path(llm_comply.__file__).parent / "specs"
    yield {name: SpecLoader(str(folder / file)) for name, file in SPECS.items()}
    close_client()


# It resolves references as jsonschema no longer wants it.
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize(("name", "case"), CASES)
def test_a_case_passes(
    server: LiveServer, specs: dict[str, SpecLoader], monkeypatch: pytest.MonkeyPatch, name: str, case: Any
) -> None:
    # The cases want answers that come to an end, which a random model gives with most seeds only.
    monkeypatch.setattr(EngineCore, "seed_of", lambda core, params: 3)
    config = ComplianceConfig(base_url=f"{server.url}/v1", api_key="any-key", model="tiny", timeout=30)
    result = Runner(config, [case], specs[name]).run_one(case)
    assert (result.status.value, result.errors, result.warnings) == ("passed", [], [])


def test_most_cases_are_run() -> None:
    assert len(CASES) >= 23
