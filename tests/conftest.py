"""Fixtures that several folders use."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from tiny_model import make_tiny_model


@pytest.fixture(scope="session")
def tiny_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random Llama with a byte tokenizer, on disk."""
    return make_tiny_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture
def tiny_engine(tiny_path: Path) -> Iterator["object"]:
    """An engine on it, checked when the test is done."""
    from phloem.runtime import Engine

    with Engine(tiny_path, dtype="float32", num_blocks=64) as engine:
        yield engine
        engine.check()
        stats = engine.stats().cache
        assert stats.locked == stats.private == 0, "something was left behind"
