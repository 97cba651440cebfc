"""`phloem doctor`: what this machine has, what an engine would use of it, and why not more."""

from __future__ import annotations

import os
from dataclasses import asdict
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from phloem.runtime.cli.bench_common import write_json
from phloem.runtime.cli.doctor_facts import (
    Fact,
    cpu_facts,
    engine_facts,
    exactness_facts,
    file_facts,
    gpu_facts,
    software_facts,
    thread_facts,
)
from phloem.runtime.cli.random_model import llama_1b
from phloem.runtime.config import EngineConfig
from phloem.runtime.errors import PhloemError
from phloem.runtime.models.config import read_model_config
from phloem.runtime.models.resolve import resolve_model
from phloem.runtime.placement import place


def run_doctor(model: str | None, console: Console, *, json_path: Path | None) -> bool:
    """Look at everything and print it.

    Args:
        model: Whose engine to describe, fetched first if it is not here; None for a model of a common shape.
        console: Where to print.
        json_path: Where to write the facts too.

    Returns:
        Whether an engine can run.
    """
    with console.status("Looking"):
        facts = [
            *software_facts(),
            *gpu_facts(),
            *cpu_facts(os.environ),
            *thread_facts(os.environ),
            *exactness_facts(os.environ),
            *file_facts(os.environ),
        ]
    engine = _engine(model)
    can_run = engine[0].name != "error"
    facts += engine
    _print(facts, console)
    write_json(json_path, {"can_run": can_run, "facts": [asdict(fact) for fact in facts]})
    return can_run


def _engine(model: str | None) -> list[Fact]:
    """What an engine would use; a fact named "error" alone where it can't run."""
    name = model or "for example, a Llama of 1B"
    try:
        config = llama_1b() if model is None else read_model_config(resolve_model(model).path)
        return engine_facts(name, config, place(EngineConfig(), config))
    except PhloemError as error:
        return [Fact(f"Engine: {name}", "error", str(error), "an engine can't run with this model here")]


def _print(facts: list[Fact], console: Console) -> None:
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    section = None
    for fact in facts:
        if fact.section != section:
            section = fact.section
            table.add_row(f"[bold]{escape(section)}[/]")
        table.add_row(f"  {escape(fact.name)}", escape(fact.value))
        if fact.advice is not None:
            table.add_row("", f"[yellow]{escape(fact.advice)}[/]")
    console.print(table)
