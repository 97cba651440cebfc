"""Where an engine computes, and what is said when it can't be where it was asked to."""

from pathlib import Path
from typing import Any

import pytest
import torch

from phloem.runtime import EngineConfig, InvalidRequest
from phloem.runtime import placement as module
from phloem.runtime.models.config import ModelConfig, read_model_config
from phloem.runtime.placement import Placement, place


@pytest.fixture(scope="module")
def model(gpu_model: Path) -> ModelConfig:
    return read_model_config(gpu_model)


def placed(model: ModelConfig, **options: Any) -> Placement:
    return place(EngineConfig(**options), model)


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "why_unavailable", lambda: "there is no GPU")


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "why_unavailable", lambda: None)


@pytest.mark.usefixtures("no_gpu")
def test_without_a_gpu_it_is_the_cpu_and_says_why(model: ModelConfig) -> None:
    found = placed(model)
    assert (found.device.type, found.backend, found.deterministic) == ("cpu", "cpu", True)
    assert found.why_no_gpu == "there is no GPU"
    assert (found.max_running, found.max_step_tokens, found.uses_graphs) == (64, 512, False)


@pytest.mark.usefixtures("gpu")
def test_with_a_gpu_it_is_the_gpu_and_larger_steps(model: ModelConfig) -> None:
    found = placed(model)
    assert (found.device.type, found.backend, found.deterministic) == ("cuda", "flashinfer", False)
    assert (found.dtype, found.kv_dtype, found.uses_graphs) == (torch.bfloat16, torch.bfloat16, True)
    assert (found.max_running, found.max_step_tokens, found.why_no_gpu) == (256, 8192, None)


@pytest.mark.usefixtures("gpu")
def test_what_was_asked_for_is_taken(model: ModelConfig) -> None:
    found = placed(
        model, device="cuda:1", dtype="float16", kv_dtype="fp8_e4m3", deterministic=True, cuda_graphs=False, max_running=5
    )  # fmt: skip
    assert (found.device, found.dtype) == (torch.device("cuda:1"), torch.float16)
    assert (found.kv_dtype, found.deterministic) == (torch.float8_e4m3fn, True)
    assert (found.uses_graphs, found.max_running) == (False, 5)
    assert placed(model, device="cpu").backend == "cpu"
    assert placed(model, backend="reference").device.type == "cpu"


@pytest.mark.usefixtures("no_gpu")
@pytest.mark.parametrize("options", [{"device": "cuda"}, {"backend": "flashinfer"}])
def test_a_gpu_that_is_not_there_is_refused_with_the_reason(
    model: ModelConfig, options: dict[str, Any]
) -> None:
    with pytest.raises(InvalidRequest, match=r"can't be had: there is no GPU; `phloem doctor` tells more"):
        placed(model, **options)


@pytest.mark.usefixtures("gpu")
def test_a_model_without_gpu_code_goes_to_the_cpu(model: ModelConfig) -> None:
    found = placed(model, dtype="float32")
    assert found.device.type == "cpu"
    assert "float16 or bfloat16" in str(found.why_no_gpu)
    with pytest.raises(InvalidRequest, match="blocks of 16"):
        placed(model, device="cuda", kv_dtype="fp8_e4m3", block_size=32)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"device": "cuda", "backend": "cpu"}, "don't go together"),
        ({"device": "cpu", "backend": "flashinfer"}, "don't go together"),
        ({"device": "cpu", "dtype": "float16"}, "float16 is for GPUs"),
        ({"device": "cpu", "dtype": "float32", "kv_dtype": "fp8_e4m3"}, "KV has the model's dtype"),
    ],
)
def test_what_does_not_go_together_is_refused(
    model: ModelConfig, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(InvalidRequest, match=message):
        placed(model, **options)


def test_this_machine_has_a_place(tiny_path: Path) -> None:
    assert placed(read_model_config(tiny_path)).device.type in ("cpu", "cuda")
