"""`phloem serve`: from the command's options to the settings of an engine and of a server."""

from __future__ import annotations

import dataclasses
import json
import logging
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape

from phloem.runtime import Engine, EngineConfig, InvalidRequest

SANDBOX_TIMEOUT_S = 5.0
"""Grammars and conversations come from whoever reaches the server, so what is done with them ends."""


def run_serve(model: str, options: Mapping[str, Any], assignments: Sequence[str], console: Console) -> None:
    """Serve until a signal.

    Args:
        model: Name or path.
        options: Settings of the server; without `served_names`, the model is served under its own.
        assignments: Further settings, of the engine or the server, as `name=value`; and `secret_file`, where the server's secret is
            kept, by default `$PHLOEM_SECRET_FILE` or the user's own place.
        console: For the line that says where it serves.

    Raises:
        InvalidRequest: A setting is wrong, the address can't be used, or what a server needs is not installed.
        ModelError: The model can't be loaded.
    """
    try:
        from phloem.runtime.server.secret import load_secret
        from phloem.runtime.server.serve import serve
        from phloem.runtime.server.settings import MIN_SECRET_BYTES, ServerSettings
    except ModuleNotFoundError as error:
        raise InvalidRequest(
            f"the server needs {error.name}: pip install 'phloem[server]'", field="serve"
        ) from error
    names = [field.name for field in dataclasses.fields(ServerSettings)]
    given = dict(_assignment(each) for each in assignments)
    secret_file = given.pop("secret_file", os.environ.get("PHLOEM_SECRET_FILE"))
    of_server = {name: given.pop(name) for name in names if name in given}
    config = EngineConfig(sandbox_timeout_s=SANDBOX_TIMEOUT_S).replace(**given)
    chosen = {**options, **of_server}
    chosen["served_names"] = options["served_names"] or (served_name(model),)
    # Checked before a secret is made, of which a wrong setting has no need.
    settings = ServerSettings(**{"secret": bytes(MIN_SECRET_BYTES), **chosen})
    settings = settings.replace(secret=load_secret(None if secret_file is None else Path(str(secret_file))))

    # Our own lines, and of other libraries what is wrong.
    logging.basicConfig(format="%(asctime)s %(message)s")
    logging.getLogger("phloem").setLevel(logging.INFO)

    def announce(url: str) -> None:
        console.print(f"Serving {escape(settings.served_names[0])} at {url}", highlight=False, soft_wrap=True)

    serve(lambda: Engine(model, config), settings, announce=announce)


def served_name(model: str) -> str:
    """Return what to call a model: its name, of a path the last part, which tells nothing of the machine."""
    return Path(model).name if Path(model).exists() else model


def _assignment(text: str) -> tuple[str, Any]:
    """Split `name=value`; a value that is JSON is taken as that, such as a number or `true`, any other as text."""
    name, equals, value = text.partition("=")
    if not equals:
        raise InvalidRequest(f"--set takes NAME=VALUE, not {text!r}", field="set")
    try:
        return name.strip(), json.loads(value)
    except ValueError:
        return name.strip(), value
