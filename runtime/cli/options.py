"""Options that several commands have. Nothing here imports torch."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

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
PlotOption = Annotated[
    Path | None,
    typer.Option(
        "--plot",
        help="Draw the results into this `.png` or `.html` file (needs the extra `bench`).",
        dir_okay=False,
        callback=_in_a_folder,
    ),
]
ProfileOption = Annotated[
    Path | None,
    typer.Option(
        "--profile",
        help="Write a Chrome trace of one more round, which does not count, to this file.",
        dir_okay=False,
        callback=_in_a_folder,
    ),
]
RoundsOption = Annotated[int, typer.Option(help="Rounds; the medians are shown.", min=1)]
UrlOption = Annotated[
    list[str] | None,
    typer.Option(
        "--url",
        help="A server of OpenAI's protocol that takes part, in turns: `http://host:port`; can be repeated. `NAME=` in front names it, "
        "`#MODEL` behind says which of its models.",
    ),
]
ApiKeyOption = Annotated[
    str | None, typer.Option("--api-key", help="For servers that want one.", envvar="OPENAI_API_KEY")
]
PlainOption = Annotated[
    bool, typer.Option("--plain", help="Send servers text and OpenAI's own fields only: no token ids.")
]
