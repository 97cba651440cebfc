"""A tiny model whose tokenizer joins some bytes, so that text in pieces has other tokens than as a whole."""

from __future__ import annotations

import json
from pathlib import Path

from tiny_model import make_tiny_model

SLASHES, SCHEME, TP = 253, 254, 255  # in place of bytes that no UTF-8 has


def make_merging_model(directory: Path) -> Path:
    """Write the model; it joins "//", "://" and "tp"."""
    path = make_tiny_model(directory)
    tokenizer = json.loads((path / "tokenizer.json").read_text(encoding="utf-8"))
    vocabulary = {token: each for token, each in tokenizer["model"]["vocab"].items() if each < SLASHES}
    tokenizer["model"]["vocab"] = {**vocabulary, "//": SLASHES, "://": SCHEME, "tp": TP}
    tokenizer["model"]["merges"] = [["/", "/"], [":", "//"], ["t", "p"]]
    (path / "tokenizer.json").write_text(json.dumps(tokenizer), encoding="utf-8")
    return path
