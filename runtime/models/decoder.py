"""The Llama family (Llama, Mistral, Qwen2, Qwen3, SmolLM2) as one lean decoder on ``phloem.kernels``.

It knows tokens, positions and an attention backend; not requests, blocks or the tree. Tokens of many paths stand
one below the other in one batch, and no operation here mixes rows: only `AttentionBackend.attend` looks at other
tokens, and only at those of the same path. So a token's numbers don't depend on its company, bit for bit, as long
as the kernels keep their promise (`deterministic`).
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
import torch.nn.functional as F

from phloem.kernels.attention import AttentionBackend, AttentionSpec
from phloem.kernels.cpu import make_cpu_linear, make_cpu_ops
from phloem.kernels.cpu_decoder import CompiledDecoder, LayerWeights
from phloem.kernels.cpu_linear import LinearKernel
from phloem.kernels.fused_ops import FusedOps, torch_ops
from phloem.kernels.gated_linear import GatedLinear
from phloem.kernels.linear import PackedLinear, RowLadder
from phloem.kernels.rope import RotaryEmbedding
from phloem.runtime.models.config import ModelConfig
from phloem.runtime.models.weights import Checkpoint


@dataclass(frozen=True, slots=True)
class _Layer:
    attention_norm: torch.Tensor
    qkv: PackedLinear
    q_norm: torch.Tensor | None
    k_norm: torch.Tensor | None
    output: PackedLinear
    mlp_norm: torch.Tensor
    gate_up: GatedLinear
    down: PackedLinear

    def compiled(self) -> LayerWeights | None:
        """The layer as the compiled decoder takes it; None where a part of it is not compiled."""
        qkv, output, gate_up, down = (
            each.compiled for each in (self.qkv, self.output, self.gate_up, self.down)
        )
        if qkv is None or output is None or gate_up is None or down is None:
            return None
        return LayerWeights(
            attention_norm=self.attention_norm,
            qkv=qkv,
            q_norm=self.q_norm,
            k_norm=self.k_norm,
            output=output,
            mlp_norm=self.mlp_norm,
            gate_up=gate_up,
            down=down,
        )


class Decoder:
    """A decoder-only transformer. Immutable after construction; one caller at a time."""

    config: ModelConfig
    dtype: torch.dtype
    """Of the weights and of the hidden states."""
    device: torch.device

    def __init__(
        self,
        config: ModelConfig,
        checkpoint: Checkpoint,
        *,
        dtype: torch.dtype,
        deterministic: bool = True,
        int8: bool = False,
        max_position: int | None = None,
        device: torch.device | str = "cpu",
        ops: FusedOps | None = None,
    ) -> None:
        """Read and repack the weights, layer by layer, so that they are in memory once.

        Args:
            config: The model's shape.
            checkpoint: Its weights.
            dtype: What to compute in: torch.float32 or torch.bfloat16; on a GPU also torch.float16.
            deterministic: Keep the bits of a token independent of the batch around it.
            int8: Keep the weights of linear layers as int8, with a scale per output.
            max_position: Longest path that will be run; None means the config's. It fixes the table of
                `dynamic` rope scaling.
            device: Where the weights live.
            ops: The operations between matrix products; None takes compiled ones on a CPU, some of them fused into
                the products, elsewhere torch's.

        Raises:
            ValueError: int8, where linear layers are not compiled.
        """
        self.config = config
        self.dtype = dtype
        self.device = torch.device(device)
        self._ops = ops or (make_cpu_ops() if self.device.type == "cpu" else torch_ops())
        kernel = make_cpu_linear(int8=int8) if ops is None and self.device.type == "cpu" else None
        if int8 and kernel is None:
            raise ValueError("int8 weights need the compiled linear layers: a CPU, and a C++ compiler on it")
        builder = _Builder(checkpoint, dtype, self.device, deterministic, self._ops, kernel)
        self._embedding = builder.read("model.embed_tokens.weight")
        self._layers = [builder.layer(index, config) for index in range(config.num_layers)]
        self._norm = builder.read("model.norm.weight")
        # tied: the repacked head can't be indexed by row, so the embedding keeps a copy of its own
        head = "model.embed_tokens" if config.tie_word_embeddings else "lm_head"
        self._head = builder.linear([head], has_bias=False)
        rope = RotaryEmbedding(
            config.head_dim,
            max_position=max_position or config.max_position,
            theta=config.rope_theta,
            scaling=config.rope_scaling,
        )
        self._rotate = self._ops.make_rotate(rope, self.device)
        self._compiled = None if kernel is None else self._compile(kernel, rope)

    def forward(
        self, token_ids: torch.Tensor, positions: torch.Tensor, attention: AttentionBackend
    ) -> torch.Tensor:
        """Compute one step, and write its KV through the backend.

        Args:
            token_ids: int64 `[num_tokens]`, the tokens of all rows of the plan.
            positions: int64 `[num_tokens]`, each token's place in its path.
            attention: A backend that has been given this step's plan.

        Returns:
            `[num_tokens, hidden_size]` in the model's dtype, after the last norm.
        """
        hidden = F.embedding(token_ids, self._embedding)
        if self._compiled is not None and self._compiled.takes(attention):
            return self._compiled.run(hidden, positions, attention)
        eps, add_norm = self.config.rms_norm_eps, self._ops.add_norm
        next_norms = [*(layer.attention_norm for layer in self._layers[1:]), self._norm]
        normed = self._ops.rms_norm(hidden, self._layers[0].attention_norm, eps)
        for index, (layer, next_norm) in enumerate(zip(self._layers, next_norms, strict=True)):
            attended = self._attend(index, layer, normed, positions, attention)
            hidden, normed = add_norm(hidden, attended, layer.mlp_norm, eps)
            hidden, normed = add_norm(hidden, self._mlp(layer, normed), next_norm, eps)
        return normed

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the logits of hidden states `[num_rows, hidden_size]`: float32 `[num_rows, vocab_size]`."""
        return self._head.in_float32(hidden)

    def _compile(self, kernel: LinearKernel, rope: RotaryEmbedding) -> CompiledDecoder | None:
        """Put the layers together for one call, if all of them are compiled."""
        compiled = [layer.compiled() for layer in self._layers]
        layers = [layer for layer in compiled if layer is not None]
        if len(layers) < len(compiled):
            return None
        spec = AttentionSpec(
            num_q_heads=self.config.num_q_heads,
            num_kv_heads=self.config.num_kv_heads,
            head_dim=self.config.head_dim,
            num_layers=self.config.num_layers,
        )
        return CompiledDecoder(kernel.library, spec, layers, self._norm, rope, eps=self.config.rms_norm_eps)

    def _attend(
        self,
        index: int,
        layer: _Layer,
        normed: torch.Tensor,
        positions: torch.Tensor,
        attention: AttentionBackend,
    ) -> torch.Tensor:
        config, rms_norm = self.config, self._ops.rms_norm
        qkv = layer.qkv(normed)
        heads = qkv.view(qkv.shape[0], -1, config.head_dim)
        first_k, first_v = config.num_q_heads, config.num_q_heads + config.num_kv_heads
        q, k, v = heads[:, :first_k], heads[:, first_k:first_v], heads[:, first_v:]
        if layer.q_norm is not None and layer.k_norm is not None:
            q = rms_norm(q, layer.q_norm, config.rms_norm_eps)
            k = rms_norm(k, layer.k_norm, config.rms_norm_eps)
        q, k = self._rotate(q, k, positions)
        attention.append(index, k, v)
        return layer.output(attention.attend(index, q).flatten(1))

    def _mlp(self, layer: _Layer, normed: torch.Tensor) -> torch.Tensor:
        return layer.down(layer.gate_up(normed))


@dataclass(slots=True)
class _Builder:
    """Makes layers out of a checkpoint; all of a model's linear layers share one ladder."""

    checkpoint: Checkpoint
    dtype: torch.dtype
    device: torch.device
    deterministic: bool
    ops: FusedOps
    kernel: LinearKernel | None
    ladder: RowLadder = field(default_factory=RowLadder)

    def layer(self, index: int, config: ModelConfig) -> _Layer:
        prefix = f"model.layers.{index}."
        attention, mlp = f"{prefix}self_attn.", f"{prefix}mlp."
        has_norm = config.qk_norm
        return _Layer(
            attention_norm=self.read(f"{prefix}input_layernorm.weight"),
            qkv=self.linear(
                [f"{attention}q_proj", f"{attention}k_proj", f"{attention}v_proj"], has_bias=config.qkv_bias
            ),
            q_norm=self.read(f"{attention}q_norm.weight") if has_norm else None,
            k_norm=self.read(f"{attention}k_norm.weight") if has_norm else None,
            output=self.linear([f"{attention}o_proj"], has_bias=config.o_bias),
            mlp_norm=self.read(f"{prefix}post_attention_layernorm.weight"),
            gate_up=self.gated_linear(f"{mlp}gate_proj", f"{mlp}up_proj", has_bias=config.mlp_bias),
            down=self.linear([f"{mlp}down_proj"], has_bias=config.mlp_bias),
        )

    def linear(self, names: list[str], *, has_bias: bool) -> PackedLinear:
        weight, bias = self.stacked(names, has_bias=has_bias)
        return PackedLinear(
            weight, bias, ladder=self.ladder, deterministic=self.deterministic, kernel=self.kernel
        )

    def gated_linear(self, gate: str, up: str, *, has_bias: bool) -> GatedLinear:
        weight, bias = self.stacked([gate, up], has_bias=has_bias)
        return GatedLinear(
            weight,
            bias,
            silu_and_mul=self.ops.silu_and_mul,
            ladder=self.ladder,
            deterministic=self.deterministic,
            kernel=self.kernel,
        )

    def stacked(self, names: list[str], *, has_bias: bool) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Weight and bias of several linear layers that read the same input, stacked by output."""
        weight = torch.cat([self.read(f"{name}.weight") for name in names])
        return weight, torch.cat([self.read(f"{name}.bias") for name in names]) if has_bias else None

    def read(self, name: str) -> torch.Tensor:
        return self.checkpoint.tensor(name, self.dtype).to(self.device)
