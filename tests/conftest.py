"""Fixtures that several folders use."""

import os

# Before torch is imported: beside another busy process, spinning OpenMP threads make a step many times slower.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings
from tiny_model import make_tiny_model

# A test never fails because the machine is busy.
settings.register_profile("phloem", deadline=None)
settings.load_profile("phloem")


@pytest.fixture(scope="session")
def tiny_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random Llama with a byte tokenizer, on disk."""
    return make_tiny_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="session")
def gpu_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random Llama with heads that FlashInfer has code for."""
    return make_tiny_model(
        tmp_path_factory.mktemp("models") / "gpu", hidden=192, num_q_heads=6, num_kv_heads=2, head_dim=64
    )


@pytest.fixture
def tiny_engine(tiny_path: Path) -> Iterator["object"]:
    """An engine on it, checked when the test is done."""
    from phloem.runtime import Engine

    with Engine(tiny_path, dtype="float32", num_blocks=64) as engine:
        yield engine
        engine.check()
        stats = engine.stats()
        assert stats.cache.locked == stats.cache.private - stats.kept_tails == 0, "something was left behind"


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    """The real model, fetched and converted on first use (then from the user's cache directory)."""
    from phloem.runtime.models.resolve import resolve_model

    return resolve_model("smollm2-135m").path
