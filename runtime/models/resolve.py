"""From what a user types to a model directory: `resolve_model`.

Imports no torch: ``phloem`` can tell at once that a name is wrong.
"""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from phloem.runtime.errors import ModelError, ModelNotFound
from phloem.runtime.models.builtin import BUILTIN_MODELS, fetch_builtin
from phloem.runtime.models.cache_dir import cache_dir
from phloem.runtime.models.files import weight_files
from phloem.runtime.models.gguf import convert_to_cache

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_HUB_FILES = ("*.json", "*.safetensors", "*.jinja")
_HUB_TIMEOUT_S = 5.0


@dataclass(frozen=True, slots=True)
class ResolvedModel:
    """Where a model is."""

    name: str
    """What was asked for."""

    path: Path
    """Its directory in the Hugging Face format."""

    source: Literal["directory", "gguf", "builtin", "hub"]
    """How it was found."""


def resolve_model(name_or_path: str | Path) -> ResolvedModel:
    """Find a model, and download or convert it if that was not done before.

    In this order: a local directory, a local ``.gguf`` file, a built-in alias, a hub id (``owner/name``).

    Args:
        name_or_path: What the user gave.

    Raises:
        ModelNotFound: None of these; the message lists what exists, and near matches.
        ModelCorrupted: A ``.gguf`` file or a download is damaged.
        ModelUnsupported: A ``.gguf`` file has no code here.
        ModelError: The cache can't be written.
    """
    name = str(name_or_path)
    path = Path(name).expanduser()
    if name and path.is_dir():
        return ResolvedModel(name, path, "directory")
    if name and path.is_file():
        if path.suffix != ".gguf":
            raise ModelNotFound(
                f"{path} is a file, but not a .gguf file; pass a model directory or a .gguf file"
            )
        return ResolvedModel(name, convert_to_cache(path, cache_dir()), "gguf")
    if name.lower() in BUILTIN_MODELS:
        return ResolvedModel(name, fetch_builtin(BUILTIN_MODELS[name.lower()], cache_dir()), "builtin")
    if _HUB_ID.fullmatch(name) and not name.endswith(".gguf"):
        return ResolvedModel(name, _from_hub(name), "hub")
    raise ModelNotFound(_not_found(name, path))


def _from_hub(repo_id: str) -> Path:
    try:
        from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError
    except ImportError as error:
        raise ModelNotFound(
            f"{repo_id!r} looks like a hub id, but huggingface_hub is not installed; `pip install huggingface_hub`, or "
            "pass a local directory"
        ) from error
    by_hand = "or download it elsewhere and pass its directory"
    try:
        return _downloaded_before(repo_id) or _download(repo_id)
    except GatedRepoError as error:
        raise ModelNotFound(
            f"hub model {repo_id!r} is gated; accept its terms on the hub and run `hf auth login`, {by_hand}"
        ) from error
    except RepositoryNotFoundError as error:
        raise ModelNotFound(
            f"the hub has no model {repo_id!r} (or it is private); check the spelling. {_known()}"
        ) from error
    except Exception as error:  # connection errors come from several HTTP libraries
        raise ModelNotFound(
            f"{repo_id!r} is no local directory, and the hub can't be reached ({_first_line(error)}); check the "
            f"connection, {by_hand}. {_known()}"
        ) from error


def _downloaded_before(repo_id: str) -> Path | None:
    """The newest snapshot in huggingface_hub's own cache, if it is whole; it is not asked whether there is a newer one."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        path = Path(snapshot_download(repo_id, local_files_only=True))
        weight_files(path)
    except (LocalEntryNotFoundError, ModelError):
        return None
    whole = all((path / name).is_file() for name in ("config.json", "tokenizer.json"))
    return path if whole else None


def _download(repo_id: str) -> Path:
    from huggingface_hub import HfApi, snapshot_download

    # snapshot_download asks the same first, but waits and retries for minutes where a network swallows packets
    revision = HfApi().model_info(repo_id, timeout=_HUB_TIMEOUT_S).sha
    return Path(snapshot_download(repo_id, revision=revision, allow_patterns=list(_HUB_FILES)))


def _not_found(name: str, path: Path) -> str:
    candidates = [*BUILTIN_MODELS]
    if path.parent.is_dir():
        siblings = (each for each in path.parent.iterdir() if _is_model(each))
        candidates += [str(each) for each in siblings]
    near = difflib.get_close_matches(name, candidates, n=3, cutoff=0.6)
    guess = f" Did you mean {' or '.join(repr(each) for each in near)}?" if near else ""
    return f"there is no model {name!r}.{guess} {_known()}"


def _is_model(path: Path) -> bool:
    return path.suffix == ".gguf" or (path / "config.json").is_file()


def _known() -> str:
    return (
        f"Built in: {', '.join(BUILTIN_MODELS)}. Else pass a directory with config.json and *.safetensors, a .gguf file, "
        "or a hub id such as HuggingFaceTB/SmolLM2-135M-Instruct"
    )


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
