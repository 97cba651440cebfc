import math

import pytest

from phloem.runtime import EngineConfig, InvalidRequest, SamplingParams


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_tokens", -1), ("max_tokens", 1.5), ("max_tokens", True),
        ("min_tokens", -1), ("min_tokens", math.nan),
        ("temperature", -0.1), ("temperature", math.nan), ("temperature", math.inf), ("temperature", "hot"),
        ("top_k", 0), ("top_k", -1), ("top_k", 2.0),
        ("top_p", 0.0), ("top_p", 1.1), ("top_p", math.nan), ("top_p", -1),
        ("min_p", -0.1), ("min_p", 1.01), ("min_p", math.nan),
        ("seed", -1), ("seed", 2**63), ("seed", 1.0),
        ("stop", ""), ("stop", ("a", "")), ("stop", 5), ("stop", ["x"] * 65), ("stop", ["x" * 4096, "y"]),
        ("stop_token_ids", [-1]), ("stop_token_ids", "12"), ("stop_token_ids", [1.0]), ("stop_token_ids", 7),
        ("ignore_eos", 1), ("ignore_eos", None),
    ],
)  # fmt: skip
def test_a_bad_value_is_refused_and_the_message_names_the_field(field: str, value: object) -> None:
    with pytest.raises(InvalidRequest, match=field):
        SamplingParams(**{field: value})


def test_it_is_a_value_error_too() -> None:
    with pytest.raises(ValueError, match="temperature"):
        SamplingParams(temperature=-1)


def test_min_tokens_beyond_max_tokens_is_refused() -> None:
    with pytest.raises(InvalidRequest, match=r"min_tokens \(5\).*max_tokens \(4\)"):
        SamplingParams(min_tokens=5, max_tokens=4)


def test_good_values_are_kept() -> None:
    params = SamplingParams(temperature=0, stop="x", stop_token_ids=[3], top_k=1, top_p=1, seed=2**63 - 1)
    assert params.is_greedy
    assert params.stop == ("x",)
    assert params.stop_token_ids == (3,)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("block_size", 0), ("block_size", 3), ("block_size", 128), ("block_size", -16),
        ("num_blocks", 0), ("num_blocks", True), ("max_running", 0), ("max_step_tokens", -4), ("kv_memory_bytes", 0),
        ("max_model_len", 0), ("num_threads", 0), ("dtype", "int8"), ("backend", "cuda"),
        ("kv_dtype", "int8"), ("device", "gpu"), ("device", "cuda:x"), ("deterministic", 1), ("cuda_graphs", None),
    ],
)  # fmt: skip
def test_a_bad_setting_is_refused_and_the_message_names_it(field: str, value: object) -> None:
    with pytest.raises(InvalidRequest, match=field):
        EngineConfig(**{field: value})


def test_an_unknown_setting_is_refused_and_the_known_ones_are_listed() -> None:
    with pytest.raises(InvalidRequest, match=r"'blocksize'.*block_size"):
        EngineConfig().replace(blocksize=8)
