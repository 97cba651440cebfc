"""`phloem bench chat`, `fewshot`, `tree`, `bestof` on the engine and `phloem bench serve` on servers: tokens per second and what was cached."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.progress import Progress
from rich.table import Table

from phloem.runtime.cli.bench_common import Outputs, limits_with_progress
from phloem.runtime.cli.bench_limits import limits_table
from phloem.runtime.cli.machine_limits import Limit, LimitSizes, floor_model
from phloem.runtime.cli.plots import Bars
from phloem.runtime.cli.profiles import chrome_trace
from phloem.runtime.cli.workloads.best_of import BestOf
from phloem.runtime.cli.workloads.chat import Chat
from phloem.runtime.cli.workloads.client import EngineClient
from phloem.runtime.cli.workloads.fewshot import FewShot
from phloem.runtime.cli.workloads.measure import Bench, Target, WorkloadResult
from phloem.runtime.cli.workloads.tree import TreeOfThoughts
from phloem.runtime.cli.workloads.words import Words
from phloem.runtime.cli.workloads.workload import Workload
from phloem.runtime.config import EngineConfig
from phloem.runtime.engine import Engine
from phloem.runtime.errors import InvalidRequest
from phloem.runtime.models.config import read_model_config
from phloem.runtime.models.resolve import resolve_model
from phloem.runtime.tokenizer import Tokenizer

WORKLOADS: Mapping[str, Workload] = {
    "chat": Chat(),
    "fewshot": FewShot(),
    "tree": TreeOfThoughts(),
    "bestof": BestOf(),
}
"""In the sizes that other engines were measured at."""

ENGINE = "phloem"
"""The engine in this process."""


@dataclass(frozen=True, slots=True)
class Servers:
    """Which servers take part, and how they are spoken to."""

    urls: Sequence[str] = ()
    """Each as `http://host:port`; see `find_server`."""

    api_key: str | None = None
    plain: bool = False
    """Text and OpenAI's own fields only."""


@dataclass(frozen=True, slots=True)
class WorkloadsResult:
    """What was measured, and the machine's limits in the same run."""

    limits: list[Limit]
    results: list[WorkloadResult]

    def to_dict(self) -> dict[str, Any]:
        """Return it as plain data."""
        return {
            "limits": [asdict(limit) for limit in self.limits],
            "results": [each.to_dict() for each in self.results],
        }


def run_bench_workloads(
    workloads: Sequence[Workload],
    model: str,
    console: Console,
    outputs: Outputs,
    *,
    rounds: int,
    servers: Servers | None = None,
    in_process: bool = True,
    limit_sizes: LimitSizes | None = None,
) -> None:
    """Measure and print.

    Args:
        workloads: What to run, one after the other.
        model: What the engine runs; of servers, the shape and the tokenizer of what they serve.
        console: Where to print.
        outputs: Where to write.
        rounds: That count, after one that warms up.
        servers: Who takes part besides, in turns.
        in_process: Whether an engine in this process takes part.
        limit_sizes: How the machine is measured.

    Raises:
        InvalidRequest: A server can't be used, or nobody takes part.
        ModelError: The model can't be loaded.
    """
    result = measure_workloads(
        workloads,
        model,
        console,
        rounds=rounds,
        servers=servers or Servers(),
        in_process=in_process,
        limit_sizes=limit_sizes or LimitSizes(),
        outputs=outputs,
    )
    console.print(limits_table(result.limits))
    for table in tables_of(result.results):
        console.print(table)
    outputs.write("Workloads", result.to_dict(), charts_of(result.results))


def measure_workloads(
    workloads: Sequence[Workload],
    model: str,
    console: Console,
    *,
    rounds: int,
    servers: Servers,
    in_process: bool,
    limit_sizes: LimitSizes,
    outputs: Outputs,
) -> WorkloadsResult:
    """Do as `run_bench_workloads`, but return what was measured. Only a profile is written."""
    directory = resolve_model(model).path
    config = read_model_config(directory)
    tokenizer = Tokenizer.from_directory(directory, eos_token_ids=config.eos_token_ids)
    targets = _servers(servers, tokenizer)
    if not (targets or in_process):
        raise InvalidRequest("no server was named: pass --url http://host:port", field="url")
    limits = limits_with_progress(config, limit_sizes, console)
    bench = Bench(Words(tokenizer), floor_model(config, EngineConfig(), limits))
    with ExitStack() as stack:
        if in_process:
            with console.status(f"Loading {escape(model)}"):
                engine = stack.enter_context(Engine(model))
            targets.insert(0, Target(ENGINE, lambda: nullcontext(EngineClient(engine))))
        progress = stack.enter_context(Progress(console=console, transient=True))
        task = progress.add_task("Measuring", total=len(workloads) * len(targets) * (rounds + 1))
        results = [
            result
            for workload in workloads
            for result in bench.measure(
                workload, targets, rounds=rounds, advance=lambda: progress.advance(task)
            )
        ]
        if outputs.profile_path is not None:
            with chrome_trace(outputs.profile_path):
                bench.round(workloads[0], targets[0], rounds + 1)
    return WorkloadsResult(limits, results)


def tables_of(results: Sequence[WorkloadResult]) -> list[Table]:
    """Return a table for each workload, a row for each target."""
    tables: dict[str, Table] = {}
    for result in results:
        table = tables.get(result.title)
        if table is None:
            table = tables[result.title] = _empty_table(result)
        table.add_row(*cells_of(result))
    return list(tables.values())


def cells_of(result: WorkloadResult) -> list[str]:
    """Return a row, of `HEADINGS`."""
    rates = result.tokens_per_s
    cached, gap = result.cached_share, result.gap_s
    return [
        escape(result.target),
        f"{result.median_tokens_per_s:,.0f}",
        f"{min(rates):,.0f} - {max(rates):,.0f}",
        "not told" if cached is None else f"{cached:.1%}",
        f"{result.exact_share:.1%}",
        f"{result.first_token_s * 1e3:,.0f} ms",
        "" if gap is None else f"{gap * 1e3:,.1f} ms",
        f"{result.limit_share:.0%}",
    ]


HEADINGS = (
    "on",
    "output tokens/s",
    "from - to",
    "prompt cached",
    "exact tree",
    "first token",
    "next token",
    "of the limit",
)


def charts_of(results: Sequence[WorkloadResult]) -> list[Bars]:
    """Return tokens per second and cached shares of all workloads as charts."""
    titles = list(dict.fromkeys(result.title for result in results))
    names = [title.partition(":")[0] for title in titles]
    by_place = {(result.target, result.title): result for result in results}
    targets = list(dict.fromkeys(result.target for result in results))
    rates = {target: [by_place[target, title].median_tokens_per_s for title in titles] for target in targets}
    shares: dict[str, list[float | None]] = {
        target: [by_place[target, title].cached_share for title in titles] for target in targets
    }
    shares["an exact tree"] = [by_place[targets[0], title].exact_share for title in titles]
    return [
        Bars("Output", "tokens per second", names, rates),
        Bars("Prompt tokens found cached", "share", names, shares),
    ]


def _servers(servers: Servers, tokenizer: Tokenizer) -> list[Target]:
    if not servers.urls:
        return []
    try:
        from phloem.runtime.cli.workloads.http_client import find_server
    except ModuleNotFoundError as error:
        raise InvalidRequest(
            f"servers need {error.name}: pip install 'phloem[bench]'", field="url"
        ) from error
    found = [
        find_server(url, tokenizer, api_key=servers.api_key, plain=servers.plain) for url in servers.urls
    ]
    names = [server.name for server in found]
    if len(set(names)) < len(names):
        raise InvalidRequest(f"two servers have one name among {', '.join(names)}", field="url")
    return [Target(server.name, server.open) for server in found]


def _empty_table(result: WorkloadResult) -> Table:
    count = len(result.rounds)
    table = Table(title=f"{result.title}; medians of {count} rounds", title_justify="left")
    for heading in HEADINGS:
        table.add_column(heading, justify="left" if heading == "on" else "right")
    return table
