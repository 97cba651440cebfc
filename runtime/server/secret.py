"""The server's secret, kept between runs, so that each key has the same namespaces after a restart.

A namespace is an HMAC of its key under the secret. What names one outside of the process, such as a saved branch, an event about a block
or a router's table, is of use after a restart, or with a second server, only under the same secret; nobody can compute it without.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
from pathlib import Path

from phloem.runtime.errors import InvalidRequest

NAME = "server-secret"

logger = logging.getLogger(__name__)


def state_dir() -> Path:
    """Return `$XDG_STATE_HOME/phloem`, else `~/.local/state/phloem`. It may not exist yet."""
    base = os.environ.get("XDG_STATE_HOME")
    return (Path(base) if base else Path.home() / ".local" / "state") / "phloem"


def load_secret(path: Path | None = None) -> bytes:
    """Return the secret in a file, which is made if it is not there, for its owner alone.

    Args:
        path: The file. None: the user's own, `server-secret` in `state_dir()`; where that can't be kept, the secret is a new one.

    Raises:
        InvalidRequest: The file can't be read or made, belongs to somebody else, or others may read it.
    """
    if path is not None:
        return _kept(path)
    try:
        own = state_dir() / NAME
        own.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        _make_once(own)
    except (OSError, RuntimeError):
        # No home, or one that can't be written to, as in many containers.
        logger.warning("the server's secret can't be kept: each start has namespaces of its own")
        return _new()
    return _kept(own)


def _kept(path: Path) -> bytes:
    try:
        _make_once(path)
        with path.open("rb") as file:
            status = os.fstat(file.fileno())
            secret = file.read().strip()
    except OSError as error:
        raise InvalidRequest(
            f"the secret can't be kept in {path} ({error.strerror}): name another file", field="secret"
        ) from error
    # Root's is good too: that is how secrets come into containers.
    if os.name == "posix" and (status.st_uid not in (0, os.geteuid()) or status.st_mode & 0o027):
        raise InvalidRequest(
            f"others may read or change the secret in {path}: make it yours alone (chmod 600), or name another file",
            field="secret",
        )
    return secret


def _make_once(path: Path) -> None:
    """Make the file if it is not there; of several processes that do so, one wins, and none reads half a secret."""
    if path.exists():
        return
    draft = path.with_name(f"{path.name}.{secrets.token_hex(8)}")
    try:
        with open(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            file.write(_new() + b"\n")
        with contextlib.suppress(FileExistsError):
            os.link(draft, path)
    finally:
        draft.unlink(missing_ok=True)


def _new() -> bytes:
    return secrets.token_hex(32).encode()
