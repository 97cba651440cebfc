"""The command `phloem bench`: its subcommands and their options. What they do is in the modules `bench_*`."""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from phloem.runtime.cli.options import (
    ApiKeyOption,
    JsonOption,
    ModelOption,
    PlainOption,
    PlotOption,
    ProfileOption,
    RoundsOption,
    UrlOption,
)

# As in `main`, nothing here imports torch.
bench_app = typer.Typer(
    help="Measure phloem on this machine. Every number comes with what it is compared to, from the same run.",
    no_args_is_help=True,
)


@bench_app.command("limits")
def bench_limits(
    model: ModelOption = "smollm2-135m", json_path: JsonOption = None, plot_path: PlotOption = None
) -> None:
    """What this machine does at best: memory reads, matrix products at a model's shapes; and the floors that follow."""
    from phloem.runtime.cli.bench_common import Outputs
    from phloem.runtime.cli.bench_limits import run_bench_limits

    run_bench_limits(model, Console(), Outputs(json_path, plot_path))


@bench_app.command("radix")
def bench_radix(
    quick: Annotated[bool, typer.Option("--quick", help="Smaller trees: seconds, not minutes.")] = False,
    json_path: JsonOption = None,
    plot_path: PlotOption = None,
) -> None:
    """The tree alone: match, insert, evict and memory, beside a memory compare and the plain alternatives."""
    from phloem.runtime.cli.bench_common import Outputs
    from phloem.runtime.cli.bench_radix import run_bench_radix

    run_bench_radix(Console(), Outputs(json_path, plot_path), quick=quick)


@bench_app.command("reuse")
def bench_reuse(
    model: ModelOption = "smollm2-135m",
    rounds: Annotated[int, typer.Option(help="Rounds; the medians are shown.", min=3)] = 7,
    json_path: JsonOption = None,
) -> None:
    """What a hit saves (a 2,048-token prompt sent twice), and what the cache costs where nothing is shared."""
    from phloem.runtime.cli.bench_reuse import run_bench_reuse

    run_bench_reuse(model, Console(), rounds=rounds, json_path=json_path)


@bench_app.command("branch")
def bench_branch(
    model: ModelOption = "smollm2-135m",
    rounds: Annotated[int, typer.Option(help="Rounds; the medians are shown.", min=3)] = 5,
    json_path: JsonOption = None,
) -> None:
    """Forks of a long branch, scores of continuations, and the scheduler's share of a decode step."""
    from phloem.runtime.cli.bench_branch import run_bench_branch

    run_bench_branch(model, Console(), rounds=rounds, json_path=json_path)


@bench_app.command("programs")
def bench_programs(model: ModelOption = "smollm2-135m", json_path: JsonOption = None) -> None:
    """What programs, chats and tree searches compute, beside their distinct tokens."""
    from phloem.runtime.cli.bench_programs import run_bench_programs

    run_bench_programs(model, Console(), json_path=json_path)


@bench_app.command("gpu")
def bench_gpu(
    model: Annotated[
        str | None,
        typer.Option(
            "--model", "-m", help="What decodes. Default: random weights in the shape of a Llama of 1B."
        ),
    ] = None,
    json_path: JsonOption = None,
) -> None:
    """Attention, decode, prefill and shared prefixes, beside the card's own rates. Exit code 2: there is no GPU."""
    from phloem.runtime.cli.bench_gpu import run_bench_gpu

    if not run_bench_gpu(model, Console(), json_path=json_path):
        raise typer.Exit(2)


@bench_app.command("replay")
def bench_replay(
    log: Annotated[Path, typer.Argument(help="A search log of tree-of-thought-llm, as JSON.")],
    prompts: Annotated[Path, typer.Argument(help="Its prompts, as JSON: name to text.")],
    model: ModelOption = "smollm2-135m",
    block_size: Annotated[int, typer.Option(help="Tokens per block.")] = 16,
    json_path: JsonOption = None,
) -> None:
    """Replay a published tree search through the scheduler alone: how many prompt tokens were there already.

    The model does not run; its answers are those of the log.
    """
    from phloem.runtime.cli.bench_replay import run_bench_replay

    run_bench_replay(log, prompts, model, Console(), block_size=block_size, json_path=json_path)


@bench_app.command("decode")
def bench_decode(
    model: ModelOption = "smollm2-135m",
    rounds: RoundsOption = 5,
    json_path: JsonOption = None,
    plot_path: PlotOption = None,
    profile_path: ProfileOption = None,
) -> None:
    """Decode steps, first tokens and prefills beside the machine's limits; deterministic mode on and off."""
    from phloem.runtime.cli.bench_common import Outputs
    from phloem.runtime.cli.bench_decode import run_bench_decode

    run_bench_decode(model, Console(), Outputs(json_path, plot_path, profile_path), rounds=rounds)


@bench_app.command("grid")
def bench_grid(
    model: ModelOption = "smollm2-135m",
    samples: Annotated[
        int, typer.Option(help="Per cell; the default takes the better part of an hour.", min=1)
    ] = 20,
    prefix: Annotated[
        list[int] | None,
        typer.Option(help="Shared tokens; can be repeated. Default: 128, 512, 2048.", min=16),
    ] = None,
    output: Annotated[
        list[int] | None, typer.Option(help="Generated tokens; can be repeated. Default: 1, 32, 256.", min=1)
    ] = None,
    json_path: JsonOption = None,
    plot_path: PlotOption = None,
    profile_path: ProfileOption = None,
) -> None:
    """The cache experiment: prefix x output x cache on and off x others that evict; and three prompts that must not hit.

    Exit code 1: one of them hit.
    """
    from phloem.runtime.cli.bench_common import Outputs
    from phloem.runtime.cli.bench_grid import run_bench_grid
    from phloem.runtime.cli.grid_measures import GridSizes

    sizes = GridSizes(prefix or (128, 512, 2048), output or (1, 32, 256), samples=samples)
    if not run_bench_grid(model, Console(), Outputs(json_path, plot_path, profile_path), sizes=sizes):
        raise typer.Exit(1)


_WORKLOADS = {
    "chat": "Growing conversations, several at once: output tokens per second, and what was cached beside what an exact tree would.",
    "fewshot": "Many questions behind the same examples, measured like `chat`.",
    "tree": "Trees of thoughts on the Game of 24, measured like `chat`.",
    "bestof": "Many samples of one prompt, measured like `chat`.",
}


def _add_workload(name: str, help_text: str) -> None:
    @bench_app.command(name, help=help_text)
    def command(
        model: ModelOption = "smollm2-135m",
        rounds: RoundsOption = 5,
        url: UrlOption = None,
        json_path: JsonOption = None,
        plot_path: PlotOption = None,
        profile_path: ProfileOption = None,
    ) -> None:
        from phloem.runtime.cli.bench_common import Outputs
        from phloem.runtime.cli.bench_workloads import WORKLOADS, Servers, run_bench_workloads

        outputs = Outputs(json_path, plot_path, profile_path)
        servers = Servers(url or ())
        run_bench_workloads([WORKLOADS[name]], model, Console(), outputs, rounds=rounds, servers=servers)


for _name, _help in _WORKLOADS.items():
    _add_workload(_name, _help)


class WorkloadName(str, Enum):
    """A workload, on the command line."""

    CHAT = "chat"
    FEWSHOT = "fewshot"
    TREE = "tree"
    BESTOF = "bestof"


@bench_app.command("serve")
def bench_serve(
    url: UrlOption = None,
    workload: Annotated[
        list[WorkloadName] | None, typer.Option(help="What to run; can be repeated. Default: all.")
    ] = None,
    model: ModelOption = "smollm2-135m",
    api_key: ApiKeyOption = None,
    plain: PlainOption = False,
    rounds: RoundsOption = 5,
    json_path: JsonOption = None,
    plot_path: PlotOption = None,
) -> None:
    """The same workloads on any servers of OpenAI's protocol, phloem's or others', over streams and in turns.

    MODEL is what they serve: its tokenizer makes the prompts, its shape the limits.
    """
    from phloem.runtime.cli.bench_common import Outputs
    from phloem.runtime.cli.bench_workloads import WORKLOADS, Servers, run_bench_workloads

    names = [each.value for each in workload or WorkloadName]
    run_bench_workloads(
        [WORKLOADS[name] for name in names],
        model,
        Console(),
        Outputs(json_path, plot_path),
        rounds=rounds,
        servers=Servers(url or (), api_key, plain),
        in_process=False,
    )


@bench_app.command("report")
def bench_report(
    model: ModelOption = "smollm2-135m",
    rounds: RoundsOption = 5,
    url: UrlOption = None,
    api_key: ApiKeyOption = None,
    into: Annotated[Path | None, typer.Option(help="Replace the report in this Markdown file.")] = None,
    json_path: JsonOption = None,
    plot_path: PlotOption = None,
) -> None:
    """Limits, decode steps, all workloads (also on servers, in turns) and the tree, as Markdown."""
    from phloem.runtime.cli.bench_common import Outputs
    from phloem.runtime.cli.bench_report import report_sizes, run_bench_report
    from phloem.runtime.cli.bench_workloads import Servers

    run_bench_report(
        model,
        Console(),
        Outputs(json_path, plot_path),
        sizes=report_sizes(rounds),
        servers=Servers(url or (), api_key),
        into=into,
    )


@bench_app.command("http")
def bench_http(
    model: ModelOption = "smollm2-135m", rounds: RoundsOption = 5, json_path: JsonOption = None
) -> None:
    """What the server adds to a request and takes from decoding, beside the engine without it; and how fast it says no."""
    from phloem.runtime.cli.bench_http import run_bench_http

    run_bench_http(model, Console(), rounds=rounds, json_path=json_path)
