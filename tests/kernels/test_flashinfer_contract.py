"""The installed FlashInfer package, on a machine without a GPU: our calls fit its signatures, our numbers its references."""

import inspect
from typing import Any

import pytest
import torch
from attention_paths import Paths, at_once, error
from flashinfer_emulator import EmulatedDecode, EmulatedPrefill, Emulation
from flashinfer_steps import SMALL, WINDOWED, family, family_steps, make, with_graphs

from phloem.kernels.activation import silu_and_mul
from phloem.kernels.flashinfer_library import why_no_package
from phloem.kernels.flashinfer_options import FlashInferOptions
from phloem.kernels.fused_ops import flashinfer_ops
from phloem.kernels.norm import rms_norm
from phloem.kernels.plan import AttentionPlan, PlanRow
from phloem.kernels.rope import RotaryEmbedding

pytestmark = pytest.mark.skipif(why_no_package() is not None, reason=str(why_no_package()))

ROUNDING = 4e-3
"""The references return bfloat16."""


def signature_of(name: str) -> inspect.Signature:
    """The signature in the installed package, without `self`."""
    import flashinfer

    owner, _, method = name.partition(".")
    found = getattr(flashinfer, owner)
    if not inspect.isclass(found):
        return inspect.signature(found)
    # decode's `plan` takes anything and hands it to `_plan_impl`
    if method == "plan" and hasattr(found, "_plan_impl"):
        method = "_plan_impl"
    signature = inspect.signature(getattr(found, method or "__init__"))
    return signature.replace(parameters=list(signature.parameters.values())[1:])


def test_every_call_of_every_mode_fits_the_installed_signatures() -> None:
    names: dict[str, set[str]] = {}

    def bind(name: str, kwargs: dict[str, Any]) -> None:
        signature_of(name).bind(**kwargs)
        names.setdefault(name, set()).update(kwargs)

    emulation = Emulation(see=bind)
    for dtype, kv_dtype in ((torch.bfloat16, None), (torch.float16, torch.float8_e4m3fn)):
        for spec in (SMALL, WINDOWED):
            paths = family(spec, dtype=dtype)
            paths.kv_dtype = kv_dtype
            for split_tokens in (None, 64):
                for is_exact in (True, False):
                    options = FlashInferOptions(
                        q_dtype=dtype,
                        deterministic=is_exact,
                        split_tokens=split_tokens,
                        workspace_bytes=8 << 20,
                    )
                    paths.run(make(paths, emulation, options), family_steps(paths))
                    graphs = with_graphs(paths, emulation, 4, options)
                    paths.run(graphs, [*at_once(paths.lengths[:1]), [(0, 1, 1)]])
    ops = flashinfer_ops(emulation.library())
    ops.rms_norm(torch.ones(2, 64).half(), torch.ones(64).half(), 1e-5)
    ops.silu_and_mul(torch.ones(2, 64).half())
    rotate = ops.make_rotate(RotaryEmbedding(64, max_position=4), torch.device("cpu"))
    rotate(torch.ones(2, 3, 64).half(), torch.ones(2, 1, 64).half(), torch.tensor([0, 3]))
    prefill, decode = EmulatedPrefill.name, EmulatedDecode.name
    methods = ("", ".plan", ".run", ".reset_workspace_buffer")
    assert set(names) == {
        *(prefill + method for method in methods),
        *(decode + method for method in methods),
        "merge_state_in_place",
        "rmsnorm",
        "silu_and_mul",
        "apply_rope_with_cos_sin_cache",
    }
    # the names that only some modes use were used
    assert "fixed_split_size" in names[f"{prefill}.plan"]
    assert "disable_split_kv" in names[f"{prefill}.plan"]
    assert "use_cuda_graph" in names[decode]
    assert "k_scale" in names[f"{decode}.run"]


@pytest.mark.parametrize("emulated", [EmulatedPrefill, EmulatedDecode])
def test_the_emulator_takes_no_argument_that_flashinfer_has_not(emulated: type) -> None:
    for method in ("__init__", "plan", "run", "reset_workspace_buffer"):
        if hasattr(emulated, method):
            own = set(inspect.signature(getattr(emulated, method)).parameters) - {"self", "emulation"}
            name = emulated.name + ("" if method == "__init__" else f".{method}")  # type: ignore[attr-defined]
            assert own <= set(signature_of(name).parameters)


def test_q_data_type_must_be_named_since_its_default_is_float16() -> None:
    assert signature_of(f"{EmulatedPrefill.name}.plan").parameters["q_data_type"].default == "float16"
    assert signature_of(f"{EmulatedDecode.name}.plan").parameters["q_data_type"].default == "float16"


def trace(module: str, name: str) -> Any:
    """FlashInfer's own reference of an operation, in torch."""
    import importlib

    return getattr(importlib.import_module(f"flashinfer.trace.templates.{module}"), name).reference


@pytest.mark.parametrize(("block_size", "lengths"), [(1, [1, 7, 30]), (16, [16, 48])])
@pytest.mark.parametrize("kernel", ["native", "torch", "reference"])
def test_paged_prefill_equals_flashinfers_reference(kernel: str, block_size: int, lengths: list[int]) -> None:
    """Full last pages: the reference does not read their lengths."""
    paths = Paths(SMALL, lengths, block_size, torch.bfloat16)
    backend = paths.backend(kernel)
    outs = paths.run(backend, at_once(lengths))
    plan = AttentionPlan.from_rows(
        [PlanRow(table, 0, length) for table, length in zip(paths.tables, lengths, strict=True)],
        block_size=block_size,
    )
    kv = backend.store.layer(0)  # type: ignore[attr-defined]
    wanted, _ = trace("attention", "gqa_paged_prefill_trace")(
        torch.cat(paths.q), kv[:, 0], kv[:, 1], plan.qo_indptr, plan.kv_indptr, plan.kv_indices, 64**-0.5
    )
    assert error([torch.cat([out[0] for out in outs])], [wanted]) < ROUNDING


@pytest.mark.parametrize("kernel", ["native", "torch", "reference"])
def test_paged_decode_equals_flashinfers_reference(kernel: str) -> None:
    lengths = [1, 7, 300]
    paths = Paths(SMALL, lengths, 1, torch.bfloat16)
    backend = paths.backend(kernel)
    steps = [
        [(path, 0, n - 1) for path, n in enumerate(lengths)],
        [(path, n - 1, 1) for path, n in enumerate(lengths)],
    ]
    outs = paths.run(backend, steps)
    kv = backend.store.layer(0)  # type: ignore[attr-defined]
    kv_indptr = torch.tensor([0, 1, 8, 308], dtype=torch.int32)
    wanted, _ = trace("attention", "gqa_paged_decode_trace")(
        torch.stack([q[-1] for q in paths.q]),
        kv[:, 0],
        kv[:, 1],
        kv_indptr,
        torch.tensor([block for table in paths.tables for block in table]),
        64**-0.5,
    )
    assert error([torch.stack([out[0, -1] for out in outs])], [wanted]) < ROUNDING


def test_the_emulators_states_and_merge_are_flashinfers() -> None:
    """The log-sum-exp is base 2, and two parts of a row's KV merge to the whole, by both definitions."""
    paths, emulation = Paths(SMALL, [50], 1, torch.bfloat16), Emulation()
    outs = paths.run(paths.backend("native"), at_once([50]))
    q, k, v = paths.q[0][-1:], paths.kv[0][:, 0, 0], paths.kv[0][:, 1, 0]
    reference = trace("attention", "gqa_paged_decode_trace")

    def state(begin: int, end: int) -> tuple[torch.Tensor, torch.Tensor]:
        pages = torch.arange(begin, end)
        out: tuple[torch.Tensor, torch.Tensor] = reference(
            q, k.unsqueeze(1), v.unsqueeze(1), torch.tensor([0, end - begin]), pages, 64**-0.5
        )
        return out

    (out, lse), (other, other_lse), (whole, whole_lse) = state(0, 20), state(20, 50), state(0, 50)
    theirs, their_lse = trace("cascade", "merge_state_in_place_trace")(out, lse, other, other_lse)
    emulation.merge_state_in_place(out, lse, other, other_lse)
    torch.testing.assert_close(lse, their_lse)
    torch.testing.assert_close(lse, whole_lse)
    assert error([out], [theirs]) < ROUNDING
    assert error([out], [whole]) < ROUNDING
    assert error([out], [outs[0][0, -1:]]) < ROUNDING


def test_the_emulated_wrapper_returns_flashinfers_log_sum_exp() -> None:
    paths, seen = Paths(SMALL, [30], 1, torch.bfloat16), Emulation()
    backend = make(paths, seen)
    paths.run(backend, at_once([30]))
    lane = backend._lanes[None]
    kv = backend.store.layer(0)
    out = torch.empty_like(paths.q[0])
    _, lse = lane._prefill.run(q=paths.q[0], paged_kv_cache=kv, out=out, return_lse=True, enable_pdl=None)
    wanted, wanted_lse = trace("attention", "gqa_paged_prefill_trace")(
        paths.q[0], kv[:, 0], kv[:, 1], torch.tensor([0, 30]), torch.tensor([0, 30]),
        torch.tensor(paths.tables[0]), 64**-0.5,
    )  # fmt: skip
    torch.testing.assert_close(lse, wanted_lse)
    assert error([out], [wanted]) < ROUNDING


def test_rms_norm_equals_flashinfers_reference() -> None:
    generator = torch.Generator().manual_seed(0)
    for dtype in (torch.float32, torch.bfloat16):
        x = torch.randn((5, 576), generator=generator).to(dtype)
        weight = torch.randn(576, generator=generator).to(dtype)
        wanted = trace("norm", "rmsnorm_trace")(x, weight)
        assert error([rms_norm(x, weight, 1e-6)], [wanted]) < ROUNDING


@pytest.mark.parametrize("partial_rotary_factor", [1.0, 0.5])
def test_rope_equals_flashinfers_reference(partial_rotary_factor: float) -> None:
    generator = torch.Generator().manual_seed(0)
    rope = RotaryEmbedding(64, max_position=100, partial_rotary_factor=partial_rotary_factor)
    q, k = torch.randn((7, 9, 64), generator=generator), torch.randn((7, 3, 64), generator=generator)
    positions = torch.tensor([0, 1, 5, 5, 17, 98, 99])
    wanted = trace("rope", "apply_rope_with_cos_sin_cache_trace")(
        positions, q.flatten(1), k.flatten(1), 64, rope.cos_sin()
    )
    for ours, theirs in zip(rope(q, k, positions), wanted, strict=True):
        torch.testing.assert_close(ours.flatten(1), theirs)


def test_silu_and_mul_equals_flashinfers_reference() -> None:
    gate_up = torch.randn((5, 300), generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(silu_and_mul(gate_up), trace("activation", "silu_and_mul_trace")(gate_up))
