"""The command `phloem`: its subcommands and their options. What they do is in the modules beside this one."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape

# Nothing here imports torch: `phloem --help` answers at once, and each command imports what it needs.
app = typer.Typer(
    name="phloem",
    help="A radix-tree prefix cache engine for language models.\n\nStart with `phloem demo`, then `phloem chat`.",
    no_args_is_help=True,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
)
bench_app = typer.Typer(
    help="Measure phloem on this machine. Every number comes with what it is compared to, from the same run.",
    no_args_is_help=True,
)
app.add_typer(bench_app, name="bench")

ModelOption = Annotated[
    str,
    typer.Option(
        "--model", "-m", help="A model directory, a `.gguf` file, a hub id, or the built-in `smollm2-135m`."
    ),
]


def _in_a_folder(path: Path | None) -> Path | None:
    # Before the measuring, which takes minutes.
    if path is not None and not path.absolute().parent.is_dir():
        raise typer.BadParameter(f"there is no folder {path.absolute().parent}")
    return path


JsonOption = Annotated[
    Path | None,
    typer.Option(
        "--json", help="Write the results to this file as JSON too.", dir_okay=False, callback=_in_a_folder
    ),
]
MaxTokensOption = Annotated[int, typer.Option(help="Longest answer, in tokens.", min=1)]


@app.command()
def demo(model: ModelOption = "smollm2-135m") -> None:
    """Chat and sixteen questions on a real model, with the prefix cache on and off, side by side.

    The first run fetches the model (98 MB) and converts it once.
    """
    from phloem.runtime.cli.demo import run_demo

    run_demo(model, Console())


@app.command()
def chat(
    model: ModelOption = "smollm2-135m",
    system: Annotated[str | None, typer.Option(help="A system message to begin with.")] = None,
    temperature: Annotated[
        float, typer.Option(help="0 is greedy: always the likeliest token.", min=0.0)
    ] = 0.0,
    max_tokens: MaxTokensOption = 512,
    seed: Annotated[int | None, typer.Option(help="Repeat the same draws. Default: random.")] = None,
) -> None:
    """Talk to a model. Each turn computes only its new words; the line below each answer says how many."""
    from phloem.runtime import SamplingParams
    from phloem.runtime.cli.chat import run_chat

    params = SamplingParams(temperature=temperature, max_tokens=max_tokens, seed=seed)
    run_chat(model, params, Console(), system=system)


@app.command()
def doctor(
    model: Annotated[
        str | None,
        typer.Argument(help="Whose engine to describe; fetched if it is not here. Default: a common shape."),
    ] = None,
    json_path: JsonOption = None,
) -> None:
    """Tell what this machine has, what an engine would use of it, and why not a GPU. Exit code 1: none can run."""
    from phloem.runtime.cli.doctor import run_doctor

    if not run_doctor(model, Console(), json_path=json_path):
        raise typer.Exit(1)


@app.command()
def serve(
    model: Annotated[
        str, typer.Argument(help="A model directory, a `.gguf` file, a hub id, or the built-in.")
    ] = ("smollm2-135m"),
    host: Annotated[str, typer.Option(help="The address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="0: one that is free.", min=0, max=65535)] = 8000,
    api_key: Annotated[
        list[str] | None,
        typer.Option(
            help="Who may use it; can be repeated. Needed for other machines.", envvar="PHLOEM_API_KEY"
        ),
    ] = None,
    admin_key: Annotated[
        str | None, typer.Option(help="Opens metrics and the cache's controls.", envvar="PHLOEM_ADMIN_KEY")
    ] = None,
    allow_anonymous: Annotated[
        bool, typer.Option("--allow-anonymous", help="Serve other machines without a key.")
    ] = False,
    served_name: Annotated[
        list[str] | None, typer.Option(help="What requests call the model; can be repeated. Default: MODEL.")
    ] = None,
    setting: Annotated[
        list[str] | None,
        typer.Option(
            "--set", help="Any other setting as NAME=VALUE, of the engine (`num_blocks`) or the server."
        ),
    ] = None,
) -> None:
    """Serve a model over HTTP to OpenAI's clients, on this machine only unless told otherwise."""
    from phloem.runtime.cli.serve import run_serve

    asked = {"host": host, "port": port, "admin_key": admin_key, "allow_anonymous": allow_anonymous}
    run_serve(
        model,
        {**asked, "api_keys": tuple(api_key or ()), "served_names": tuple(served_name or ())},
        setting or [],
        Console(stderr=True),
    )


@bench_app.command("radix")
def bench_radix(
    quick: Annotated[bool, typer.Option("--quick", help="Smaller trees: seconds, not minutes.")] = False,
    json_path: JsonOption = None,
) -> None:
    """The tree alone: match, insert, evict and memory, beside a memory compare and the plain alternatives."""
    from phloem.runtime.cli.bench_radix import run_bench_radix

    run_bench_radix(Console(), quick=quick, json_path=json_path)


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


def main() -> None:
    """Run the command; errors of the family print one line instead of a traceback."""
    # Before torch is imported: beside another busy process, spinning OpenMP threads make a step many times slower.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    try:
        app()
    except KeyboardInterrupt:
        sys.exit(130)
    except Exception as error:
        if not _is_our_own(error):
            raise
        Console(stderr=True).print(
            f"[bold red]error:[/] {escape(str(error))}", highlight=False, soft_wrap=True
        )
        sys.exit(1)


def _is_our_own(error: Exception) -> bool:
    # Imported late: the runtime brings torch, which `--help` does without.
    from phloem.runtime.errors import PhloemError

    return isinstance(error, PhloemError)


if __name__ == "__main__":
    main()
