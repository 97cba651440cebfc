"""All layers of a decoder in one compiled call: `cpu_decoder.cpp`.

It gives the bits that the operations give one by one, and spares a step the calls between them. Knows weights, tokens and the
CPU backend's plan; no requests.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeGuard

import torch

from phloem.kernels.attention import AttentionBackend, AttentionSpec
from phloem.kernels.cpu_linear import CompiledLinear
from phloem.kernels.cpu_native import AttentionStruct, NativeBackend
from phloem.kernels.cpu_ops import PositionCheck, RotaryStruct
from phloem.kernels.rope import RotaryEmbedding


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One layer."""

    attention_norm: torch.Tensor
    qkv: CompiledLinear
    q_norm: torch.Tensor | None
    """`[head_dim]`, of each query head before its rotation; None without."""
    k_norm: torch.Tensor | None
    output: CompiledLinear
    mlp_norm: torch.Tensor
    gate_up: CompiledLinear
    """With its SwiGLU."""
    down: CompiledLinear


class _Layer(ctypes.Structure):
    """`PhloemLayer` of cpu_kernels.h: the same fields in the same order."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("attention_norm", "q_norm", "k_norm", "mlp_norm")),
        *((name, ctypes.c_void_p) for name in ("qkv", "output", "gate_up", "down")),
    )


class _Decoder(ctypes.Structure):
    """`PhloemDecoder` of cpu_kernels.h."""

    _fields_ = (
        ("layers", ctypes.POINTER(_Layer)),
        ("last_norm", ctypes.c_void_p),
        ("rotary", RotaryStruct),
        *((name, ctypes.c_int32) for name in ("num_layers", "hidden_size", "num_q_heads", "num_kv_heads")),
        *((name, ctypes.c_int32) for name in ("head_dim", "is_bf16")),
        ("eps", ctypes.c_float),
    )


class _Step(ctypes.Structure):
    """`PhloemStep` of cpu_kernels.h."""

    _fields_ = (
        *(
            (name, ctypes.c_void_p)
            for name in ("hidden", "normed", "qkv", "attended", "gated", "delta", "kv")
        ),
        ("layer_bytes", ctypes.c_int64),
        *(
            (name, ctypes.c_void_p)
            for name in ("positions", "slots", "mirror_tokens", "mirror_slots", "windows")
        ),
        ("attention", ctypes.POINTER(AttentionStruct)),
        *((name, ctypes.c_int64) for name in ("num_tokens", "num_mirrors")),
        ("num_threads", ctypes.c_int32),
    )


class CompiledDecoder:
    """The layers of a decoder. Owner of the memory between them; one call at a time."""

    def __init__(
        self,
        library: ctypes.CDLL,
        spec: AttentionSpec,
        layers: Sequence[LayerWeights],
        last_norm: torch.Tensor,
        rope: RotaryEmbedding,
        *,
        eps: float,
    ) -> None:
        """Bind the layers.

        Args:
            library: What `native_build.load_library` gives.
            spec: The model's attention; scale, cap and windows are the backend's business.
            layers: All weights of one type, float32 or bfloat16, in CPU memory.
            last_norm: `[hidden_size]`, the norm after the last layer; of the same type.
            rope: Rotates queries and keys.
            eps: Of all norms.
        """
        self._run = library.phloem_decode
        self._run.argtypes, self._run.restype = (ctypes.c_void_p, ctypes.c_void_p), None
        self._dtype, self._spec = last_norm.dtype, spec
        self._check_positions = PositionCheck(library, rope.max_position)
        # what the structures point to
        self._kept = (tuple(layers), last_norm, rope)
        self._widths = {
            "qkv": (spec.num_q_heads + 2 * spec.num_kv_heads) * spec.head_dim,
            "attended": spec.num_q_heads * spec.head_dim,
            "gated": layers[0].gate_up.struct.out_features,
            "delta": last_norm.shape[0],
        }
        self._buffers = {name: torch.empty(0, dtype=self._dtype) for name in self._widths}
        self._struct = _Decoder(
            layers=(_Layer * len(layers))(*map(_layer, layers)),
            last_norm=last_norm.data_ptr(),
            rotary=RotaryStruct.of(rope),
            num_layers=len(layers),
            hidden_size=last_norm.shape[0],
            num_q_heads=spec.num_q_heads,
            num_kv_heads=spec.num_kv_heads,
            head_dim=spec.head_dim,
            is_bf16=self._dtype == torch.bfloat16,
            eps=eps,
        )

    def takes(self, attention: AttentionBackend) -> TypeGuard[NativeBackend]:
        """Whether steps with this backend can run here: the compiled one, for this model, with KV of the weights' type."""
        if not isinstance(attention, NativeBackend) or attention.store.dtype != self._dtype:
            return False
        names = ("num_layers", "num_q_heads", "num_kv_heads", "head_dim")
        return all(getattr(attention.spec, name) == getattr(self._spec, name) for name in names)

    def run(self, hidden: torch.Tensor, positions: torch.Tensor, attention: NativeBackend) -> torch.Tensor:
        """Compute a step, and write its KV.

        Args:
            hidden: `[num_tokens, hidden_size]`, embeddings; worthless afterwards.
            positions: int64 `[num_tokens]`.
            attention: A backend that `takes` holds for, with this step's plan.

        Returns:
            `[num_tokens, hidden_size]`, after the last norm.

        Raises:
            IndexError: a position beyond the rotary tables.
            ValueError: another number of tokens than the plan's.
        """
        num_tokens, plan = hidden.shape[0], attention.current_plan
        if plan.num_tokens != num_tokens:
            raise ValueError(f"hidden has {num_tokens} rows; the plan has {plan.num_tokens} tokens")
        hidden, positions = hidden.contiguous(), positions.contiguous()
        self._check_positions(positions)
        normed, data = torch.empty_like(hidden), attention.store.data
        step = _Step(
            hidden=hidden.data_ptr(),
            normed=normed.data_ptr(),
            **{name: self._buffer(name, num_tokens).data_ptr() for name in self._widths},
            kv=data.data_ptr(),
            layer_bytes=data.stride(0) * data.itemsize,
            positions=positions.data_ptr(),
            slots=plan.slot_mapping.data_ptr(),
            mirror_tokens=plan.mirror_tokens.data_ptr(),
            mirror_slots=plan.mirror_slots.data_ptr(),
            windows=attention.windows.data_ptr(),
            attention=ctypes.pointer(attention.struct),
            num_tokens=num_tokens,
            num_mirrors=plan.num_mirrors,
            num_threads=attention.struct.num_threads,
        )
        self._run(ctypes.addressof(self._struct), ctypes.addressof(step))
        return normed

    def _buffer(self, name: str, num_tokens: int) -> torch.Tensor:
        size = num_tokens * self._widths[name]
        if self._buffers[name].numel() < size:
            self._buffers[name] = torch.empty(size, dtype=self._dtype)
        return self._buffers[name]


def _layer(weights: LayerWeights) -> _Layer:
    return _Layer(
        attention_norm=weights.attention_norm.data_ptr(),
        q_norm=None if weights.q_norm is None else weights.q_norm.data_ptr(),
        k_norm=None if weights.k_norm is None else weights.k_norm.data_ptr(),
        mlp_norm=weights.mlp_norm.data_ptr(),
        **{
            name: ctypes.addressof(getattr(weights, name).struct)
            for name in ("qkv", "output", "gate_up", "down")
        },
    )
