"""A model's fingerprint: what keeps the KV of two models apart in the namespace."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from phloem.runtime.errors import ModelCorrupted
from phloem.runtime.models.files import weight_files

_SAMPLE_BYTES = 4096
"""Read from the beginning of each tensor: fine-tunes of one model have equal headers and differ in values."""


def fingerprint(directory: Path) -> str:
    """Return 32 hexadecimal digits for the model in a directory.

    A SHA-256 over config.json and, for each safetensors file, its size, its header, and the first 4 KiB of each
    tensor. It does not depend on paths or times, so a copied model has the same one. Reads about one MiB for 272
    tensors.

    Raises:
        ModelCorrupted: A file is missing or its header can't be read.
    """
    digest = hashlib.sha256()
    for path in [directory / "config.json", *weight_files(directory)]:
        try:
            content = path.read_bytes() if path.suffix == ".json" else _weights_sample(path)
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ModelCorrupted(f"{path} can't be read ({error!r}); download this file again") from error
        digest.update(hashlib.sha256(content).digest())
    return digest.hexdigest()[:32]


def _weights_sample(path: Path) -> bytes:
    """Size, header, and the beginning of each tensor, in the safetensors format's own order of bytes."""
    with path.open("rb") as file:
        header = file.read(int.from_bytes(file.read(8), "little"))
        tensors = [value for name, value in json.loads(header).items() if name != "__metadata__"]
        parts = [path.stat().st_size.to_bytes(8, "little"), header]
        for begin, end in sorted(tensor["data_offsets"] for tensor in tensors):
            file.seek(8 + len(header) + begin)
            parts.append(file.read(min(end - begin, _SAMPLE_BYTES)))
    return b"".join(parts)
