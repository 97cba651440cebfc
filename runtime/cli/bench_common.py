"""What several benchmarks do alike: prompts without a hit, verdicts, and results as JSON."""

from __future__ import annotations

import json
import random
from pathlib import Path

from phloem.runtime.engine import Engine


def random_ids(engine: Engine, draw: random.Random, length: int) -> list[int]:
    """Return a prompt that nobody has sent before, in all likelihood."""
    return [draw.randrange(engine.tokenizer.vocab_size) for _ in range(length)]


def verdict(aim: str, *, met: bool | None) -> str:
    """Return an aim for a cell of a table, with a mark that says whether it was reached."""
    return f"{aim} {'[green]ok' if met else '[red]missed'}"


def write_json(path: Path | None, results: object) -> None:
    """Write results to a file, when one was asked for."""
    if path is not None:
        path.write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")
