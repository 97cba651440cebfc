"""`phloem chat`: a session, interactively."""

from __future__ import annotations

from rich.console import Console
from rich.markup import escape
from rich.prompt import Prompt

from phloem.runtime import Engine, PhloemError, SamplingParams
from phloem.runtime.frontend.session import Session, Turn

HELP = (
    "Write, and press Enter. [bold]/undo[/] takes back the last turn, [bold]/new[/] begins again, [bold]/stats[/] shows the "
    "cache, [bold]/quit[/] (or Ctrl-D) ends."
)


def run_chat(model: str, params: SamplingParams, console: Console, *, system: str | None = None) -> None:
    """Read turns from the terminal (or a pipe) until it ends."""
    with console.status(f"Loading {escape(model)}"):
        engine = Engine(model)
    with engine, engine.session(system=system, params=params, overflow="drop_oldest") as session:
        console.print(HELP)
        while (text := _read(console)) is not None:
            if text == "/new":
                session.rewind(0)
            elif text == "/undo" and session.turns:
                session.rewind(-1)
            elif text == "/stats":
                console.print(engine.stats().cache)
            elif text.startswith("/"):
                console.print(HELP)
            elif text:
                _turn(session, text, console)


def _read(console: Console) -> str | None:
    """Return the next line without its white space; None at the end."""
    try:
        text = Prompt.ask("[bold green]you[/]", console=console).strip()
    except (EOFError, KeyboardInterrupt):
        console.print()
        return None
    return None if text in ("/quit", "/exit") else text


def _turn(session: Session, text: str, console: Console) -> None:
    """Stream one answer, and say what it cost. Ctrl-C cuts the answer short and keeps what there is."""
    num_dropped = session.turns[-1].num_dropped if session.turns else 0
    try:
        turn = _stream(session, text, console)
    except PhloemError as error:
        console.print(
            f"[bold red]error:[/] {escape(str(error))}\nThe turn was dropped; /new begins again.",
            highlight=False,
        )
        return
    usage, completion = turn.usage, turn.completions[-1]
    if turn.num_dropped > num_dropped:
        console.print(
            f"[dim]The context is full: {turn.num_dropped - num_dropped} turns were left out, and {turn.rewritten_tokens} tokens "
            "of the others computed again.[/]",
            highlight=False,
        )
    console.print(
        f"[dim]{usage.prompt_tokens} tokens of prompt, {usage.cached_tokens} from the cache; first token after "
        f"{completion.first_token_s * 1e3:.0f} ms, {usage.completion_tokens} in {completion.total_s:.1f} s[/]",
        highlight=False,
    )


def _stream(session: Session, text: str, console: Console) -> Turn:
    stream = session.say(text, stream=True)
    console.print("[bold cyan]model[/] ", end="")
    while True:
        try:
            for piece in stream:
                console.print(piece, end="", markup=False, highlight=False, soft_wrap=True)
            console.print()
            return stream.turn
        except KeyboardInterrupt:
            stream.abort()
