"""The command `phloem`: its subcommands and their options. What they do is in the modules beside this one.

The benchmarks' are in `bench_commands`.
"""

from __future__ import annotations

import os
import sys
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape

from phloem.runtime.cli.bench_commands import bench_app
from phloem.runtime.cli.options import JsonOption, ModelOption

# Nothing here imports torch: `phloem --help` answers at once, and each command imports what it needs.
app = typer.Typer(
    name="phloem",
    help="A radix-tree prefix cache engine for language models.\n\nStart with `phloem demo`, then `phloem chat`.",
    no_args_is_help=True,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
)
app.add_typer(bench_app, name="bench")

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
