"""`phloem chat`: the engine, interactively."""

from __future__ import annotations

from rich.console import Console
from rich.markup import escape
from rich.prompt import Prompt

from phloem.runtime import Completion, Engine, PhloemError, SamplingParams

HELP = "Write, and press Enter. [bold]/new[/] begins again, [bold]/stats[/] shows the cache, [bold]/quit[/] (or Ctrl-D) ends."


def run_chat(model: str, params: SamplingParams, console: Console, *, system: str | None = None) -> None:
    """Read turns from the terminal (or a pipe) until it ends."""
    with console.status(f"Loading {escape(model)}"):
        engine = Engine(model)
    with engine:
        console.print(HELP)
        beginning = [{"role": "system", "content": system}] if system else []
        messages = list(beginning)
        while (text := _read(console)) is not None:
            if text == "/new":
                messages = list(beginning)
            elif text == "/stats":
                console.print(engine.stats().cache)
            elif text.startswith("/"):
                console.print(HELP)
            elif text:
                messages = _turn(engine, messages, text, params, console)


def _read(console: Console) -> str | None:
    """Return the next line without its white space; None at the end."""
    try:
        text = Prompt.ask("[bold green]you[/]", console=console).strip()
    except (EOFError, KeyboardInterrupt):
        console.print()
        return None
    return None if text in ("/quit", "/exit") else text


def _turn(
    engine: Engine, messages: list[dict[str, str]], text: str, params: SamplingParams, console: Console
) -> list[dict[str, str]]:
    """Stream one answer; return the conversation after it. Ctrl-C cuts the answer short and keeps what there is."""
    asked = [*messages, {"role": "user", "content": text}]
    try:
        completion = _stream(engine, asked, params, console)
    except PhloemError as error:
        console.print(
            f"[bold red]error:[/] {error}\nThe turn was dropped; /new begins again.", highlight=False
        )
        return messages
    usage = completion.usage
    console.print(
        f"[dim]{usage.prompt_tokens} tokens of prompt, {usage.cached_tokens} from the cache; first token after "
        f"{completion.first_token_s * 1e3:.0f} ms, {usage.completion_tokens} in {completion.total_s:.1f} s[/]",
        highlight=False,
    )
    return [*asked, {"role": "assistant", "content": completion.text}]


def _stream(
    engine: Engine, messages: list[dict[str, str]], params: SamplingParams, console: Console
) -> Completion:
    generation = engine.stream(messages, params)
    console.print("[bold cyan]model[/] ", end="")
    chunks = iter(generation)
    while True:
        try:
            chunk = next(chunks)
        except KeyboardInterrupt:
            generation.abort()
            chunks = iter(generation)
            continue
        console.print(chunk.text, end="", markup=False, highlight=False, soft_wrap=True)
        if chunk.completion is not None:
            console.print()
            return chunk.completion
