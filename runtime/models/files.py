"""Which files hold a model's weights. Imports no torch."""

from __future__ import annotations

import json
from pathlib import Path

from phloem.runtime.errors import ModelCorrupted, ModelUnsupported

_WAY_OUT = "download this file again"


def weight_files(directory: Path) -> list[Path]:
    """Return the safetensors files of a model directory, in order of their names.

    Raises:
        ModelCorrupted: There are none, or the index names one that is missing.
        ModelUnsupported: There are weights in another format only.
    """
    single, index = directory / "model.safetensors", directory / "model.safetensors.index.json"
    if index.exists():
        paths = sorted(directory / name for name in set(_read_weight_map(index).values()))
        for path in paths:
            if not path.is_file():
                raise ModelCorrupted(f"{path} is missing, though {index.name} names it; {_WAY_OUT}")
        return paths
    if single.is_file():
        return [single]
    others = sorted(path.name for kind in ("*.bin", "*.pt", "*.pth") for path in directory.glob(kind))
    if others:
        raise ModelUnsupported(
            f"{directory} has {others[0]} but no .safetensors; convert the weights to safetensors"
        )
    raise ModelCorrupted(f"{directory} has no model.safetensors; download the model again")


def _read_weight_map(index: Path) -> dict[str, str]:
    try:
        weight_map: object = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ModelCorrupted(f"{index} can't be read ({error!r}); {_WAY_OUT}") from error
    if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
        raise ModelCorrupted(f"{index} has a weight_map that is no table of file names; {_WAY_OUT}")
    return weight_map
