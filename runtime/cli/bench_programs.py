"""`phloem bench programs`: what programs, chats and searches compute beside the distinct tokens of what they asked for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.progress import Progress
from rich.table import Table

from phloem.runtime import Engine, SamplingParams
from phloem.runtime.cli.bench_common import verdict, write_json
from phloem.runtime.cli.bench_operations import OperationTime, measure_operations
from phloem.runtime.cli.workloads.tally import num_distinct
from phloem.runtime.frontend.program import Run, State, program
from phloem.runtime.frontend.search import Node, Sample, SearchTree, breadth_first

NUM_INPUTS, SHARED_LEN = 256, 1000
NUM_TURNS, TURN_LEN = 8, 32
DEPTH, BRANCH, KEEP, STEP_LEN = 4, 4, 3, 24
NUM_ROUNDS = 24
MOST_OVERHEAD_S = 200e-6


@dataclass(frozen=True, slots=True)
class ProgramsResult:
    """Counts are of tokens."""

    map_computed: int
    """By a program mapped over inputs that share a prefix."""

    map_distinct: int
    """On the paths of its runs, each once."""

    greedy_excess: int
    """Most that a turn of a chat computed beyond its new text and the template's."""

    sampled_excess: int
    tree_computed: int
    """By a tree of thoughts."""

    tree_distinct: int
    tree_cold: int
    """By the same with the cache off."""

    operations: list[OperationTime]


def run_bench_programs(model: str, console: Console, *, json_path: Path | None) -> None:
    """Measure and print."""
    with console.status(f"Loading {escape(model)}"):
        engine, cold = Engine(model), Engine(model, prefix_cache=False)
    with engine, cold, Progress(console=console, transient=True) as progress:
        task = progress.add_task("Measuring", total=5)
        result = _measure(engine, cold, lambda: progress.advance(task))
    console.print(_table(result))
    write_json(json_path, asdict(result))


def _measure(engine: Engine, cold: Engine, advance: Callable[[], None]) -> ProgramsResult:
    map_computed, map_distinct = _map(engine)
    advance()
    greedy, sampled = (_chat(engine, temperature) for temperature in (0.0, 1.0))
    advance()
    tree_computed, tree = _tree(engine)
    advance()
    tree_cold, _ = _tree(cold)
    advance()
    operations = measure_operations(engine, rounds=NUM_ROUNDS)
    advance()
    paths = [node.path_token_ids for node in tree.nodes()]
    return ProgramsResult(
        map_computed,
        map_distinct,
        greedy,
        sampled,
        tree_computed,
        num_distinct(paths),
        tree_cold,
        operations,
    )


@program
def _follow(s: State, shared: str, number: int) -> None:
    s += shared
    s += f"\n\nQ: What follows {number} and {number * 7 % 1000}, when the steps between numbers stay the same?\nA:"
    s.gen("answer", max_tokens=4, temperature=0)


def _shared_text(engine: Engine, thing: str) -> str:
    words = " ".join(f"{thing} {number} costs {number * 37 % 1001}." for number in range(200))
    return engine.tokenizer.decode(engine.tokenizer.encode(words)[:SHARED_LEN])


def _map(engine: Engine) -> tuple[int, int]:
    before = engine.stats().computed_tokens
    shared = _shared_text(engine, "Item")
    runs: list[Run] = _follow.map(engine, [(shared, number) for number in range(NUM_INPUTS)], progress=False)
    return engine.stats().computed_tokens - before, num_distinct(run.token_ids for run in runs)


def _chat(engine: Engine, temperature: float) -> int:
    """Return the largest excess of a turn over its new tokens."""
    params = SamplingParams(temperature=temperature, seed=1, max_tokens=TURN_LEN)
    excesses, known = [], 0
    with engine.session(system=f"You answer at {temperature}.", params=params) as session:
        for number in range(NUM_TURNS):
            usage = (
                session.say(f"Tell me something new about the number {number * 13 + 7}.")
                .completions[-1]
                .usage
            )
            excesses.append(usage.computed_tokens - (usage.prompt_tokens - known))
            known = usage.prompt_tokens + usage.completion_tokens
    return max(excesses[1:])


def _tree(engine: Engine) -> tuple[int, SearchTree]:
    before = engine.stats().computed_tokens
    step = Sample(BRANCH, SamplingParams(max_tokens=STEP_LEN, temperature=1.0, logprobs=0))
    with SearchTree(
        engine, _shared_text(engine, "Book")[: SHARED_LEN * 2] + "\n\nQ: What is the best buy?\nA:", seed=24
    ) as tree:
        breadth_first(tree, step, _likely, keep=KEEP, depth=DEPTH)
    return engine.stats().computed_tokens - before, tree


def _likely(node: Node) -> float:
    return node.mean_logprob


def _table(result: ProgramsResult) -> Table:
    table = Table(title="Programs, chats and searches", title_justify="left")
    table.add_column("what")
    table.add_column("measured", justify="right", no_wrap=True)
    table.add_column("aim", justify="right", no_wrap=True)

    def row(what: str, measured: str, aim: str, *, met: bool) -> None:
        table.add_row(what, measured, verdict(aim, met=met))

    ratio = result.map_computed / result.map_distinct
    row(
        f"{NUM_INPUTS} inputs behind {SHARED_LEN:,} shared tokens: computed / distinct ({result.map_distinct:,})",
        f"{ratio:.3f}", "1.02", met=ratio <= 1.02,
    )  # fmt: skip
    for kind, excess in (("greedy", result.greedy_excess), ("sampled", result.sampled_excess)):
        row(
            f"{kind} chat of {NUM_TURNS} turns: most that one computed beyond its new tokens",
            str(excess),
            "16",
            met=excess <= 16,
        )
    ratio = result.tree_computed / result.tree_distinct
    row(
        f"tree of thoughts, depth {DEPTH}, branch {BRANCH}, keep {KEEP}: computed / distinct ({result.tree_distinct:,})",
        f"{ratio:.3f}", "1.05", met=ratio <= 1.05,
    )  # fmt: skip
    ratio = result.tree_cold / result.tree_computed
    row("the same with the cache off", f"{ratio:.1f}x", "5x", met=ratio >= 5)
    for each in result.operations:
        beyond = f", beyond {each.base_name}" if each.base_name else ""
        row(
            f"Python time of {each.name}{beyond} ({each.base_s * 1e6:.0f} µs)",
            f"{each.overhead_s * 1e6:.0f} µs",
            f"{MOST_OVERHEAD_S * 1e6:.0f} µs",
            met=each.overhead_s <= MOST_OVERHEAD_S,
        )
    return table
