"""Fixtures of the frontends' tests."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from search_trees import make_engine

from phloem.runtime import Engine


@pytest.fixture
def engine(tiny_path: Path) -> Iterator[Engine]:
    """An engine for a search, checked when the test is done."""
    with make_engine(tiny_path) as made:
        yield made
        made.check()
        stats = made.stats()
        assert stats.cache.locked == stats.cache.private - stats.kept_tails == 0, "something was left behind"
        assert stats.running == stats.waiting == 0


@pytest.fixture
def backend(tiny_engine: Engine) -> Any:
    """Of SGLang's programs, for the modules that have found SGLang installed."""
    from phloem.runtime.frontend.sglang import PhloemBackend

    return PhloemBackend(tiny_engine)
