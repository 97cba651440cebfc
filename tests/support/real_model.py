"""The real model for tests marked `model`, downloaded once; without a network such a test is skipped."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest

from phloem.runtime.errors import ModelNotFound
from phloem.runtime.models.resolve import resolve_model


@cache
def real_model_path() -> Path:
    """Return the directory of SmolLM2-135M-Instruct. The first call on a machine takes some 20 s."""
    try:
        return resolve_model("smollm2-135m").path
    except ModelNotFound as error:
        pytest.skip(f"the model can't be downloaded here: {error}")
