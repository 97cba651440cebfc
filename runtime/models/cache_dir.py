"""Where downloaded and converted models are kept."""

from __future__ import annotations

import os
from pathlib import Path


def cache_dir() -> Path:
    """Return ``$PHLOEM_CACHE``, else ``$XDG_CACHE_HOME/phloem``, else ``~/.cache/phloem``. It may not exist yet."""
    if own := os.environ.get("PHLOEM_CACHE"):
        return Path(own).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "phloem"
