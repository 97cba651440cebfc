"""What every attention backend does, and how to make one.

A step is: `plan(plan)` once, then for each layer `append(layer, k, v)` (the step's own KV goes to its slots) and
`attend(layer, q)` (each token attends to its path up to and including itself).

The contract, beyond the numbers: a token's output depends on its query, its path's KV and nothing else. Not on the
other rows of the plan, on how a prompt was cut into steps, on the place of the blocks, or on threads; bit for bit.
Masked slots are never read into a result: they may hold NaN.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch

from phloem.kernels.kv_store import PagedKVStore
from phloem.kernels.plan import AttentionPlan, PlanError

if TYPE_CHECKING:
    from phloem.kernels.flashinfer_options import FlashInferOptions


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """The shape of a model's attention. Token at position t attends to keys j <= t, with t - j < window if any."""

    num_q_heads: int
    """Query heads; a multiple of num_kv_heads. Query head h reads KV head h // (num_q_heads // num_kv_heads)."""
    num_kv_heads: int
    head_dim: int
    num_layers: int
    scale: float | None = None
    """Factor of the scores; None means 1 / sqrt(head_dim)."""
    logits_soft_cap: float | None = None
    """Scores become cap * tanh(score / cap), after scaling; None leaves them."""
    windows: tuple[int | None, ...] | None = None
    """One sliding window per layer, in tokens, None for a full layer; None where all layers are full."""

    def __post_init__(self) -> None:
        """Refuse shapes that no backend can run.

        Raises:
            ValueError: naming the field.
        """
        for name in ("num_q_heads", "num_kv_heads", "head_dim", "num_layers"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be 1 or more")
        if self.num_q_heads % self.num_kv_heads:
            raise ValueError(
                f"num_q_heads {self.num_q_heads} is no multiple of num_kv_heads {self.num_kv_heads}"
            )
        if self.logits_soft_cap is not None and not self.logits_soft_cap > 0:
            raise ValueError(f"logits_soft_cap is {self.logits_soft_cap}; use None for no cap")
        if self.windows is not None:
            if len(self.windows) != self.num_layers:
                raise ValueError(f"windows has {len(self.windows)} entries for {self.num_layers} layers")
            if any(window is not None and window < 1 for window in self.windows):
                raise ValueError(f"windows {self.windows} must be 1 or more, or None")

    @property
    def group_size(self) -> int:
        """Query heads per KV head."""
        return self.num_q_heads // self.num_kv_heads

    @property
    def softmax_scale(self) -> float:
        """Factor of the scores."""
        return self.head_dim**-0.5 if self.scale is None else self.scale

    def window(self, layer: int) -> int | None:
        """The layer's sliding window in tokens, None if it is full."""
        return None if self.windows is None else self.windows[layer]


class AttentionBackend(Protocol):
    """One attention implementation over one store. One owner; not thread-safe."""

    def plan(self, plan: AttentionPlan) -> None:
        """Take a step's metadata, for all layers until the next call.

        Raises:
            PlanError: a plan that breaks a rule or does not fit the store.
        """

    def append(self, layer: int, k: torch.Tensor, v: torch.Tensor) -> None:
        """Write the step's keys and values `[num_tokens, num_kv_heads, head_dim]` to their slots, and to their mirrors."""

    def attend(self, layer: int, q: torch.Tensor) -> torch.Tensor:
        """Attend with queries `[num_tokens, num_q_heads, head_dim]`; the output has the same shape and dtype."""


def check_fit(spec: AttentionSpec, store: PagedKVStore) -> None:
    """Refuse a store that was made for another shape.

    Raises:
        ValueError: naming both numbers.
    """
    for name in ("num_layers", "num_kv_heads", "head_dim"):
        if getattr(spec, name) != getattr(store, name):
            raise ValueError(f"the spec has {name} {getattr(spec, name)}, the store {getattr(store, name)}")


def check_plan(plan: AttentionPlan, store: PagedKVStore) -> None:
    """Prove the plan against the store that it will run on.

    Raises:
        PlanError: a rule is broken.
    """
    if plan.block_size != store.block_size:
        raise PlanError(f"the plan has blocks of {plan.block_size} tokens, the store of {store.block_size}")
    plan.check(store.num_blocks)


def append_step(
    store: PagedKVStore, plan: AttentionPlan, layer: int, k: torch.Tensor, v: torch.Tensor
) -> None:
    """Write a step's keys and values into a store in CPU memory. See `AttentionBackend.append`."""
    store.append(layer, k, v, plan.slot_mapping)
    if plan.num_mirrors:
        store.append(layer, k[plan.mirror_tokens], v[plan.mirror_tokens], plan.mirror_slots)


def make_backend(
    name: str,
    spec: AttentionSpec,
    store: PagedKVStore,
    *,
    num_threads: int | None = None,
    flashinfer: "FlashInferOptions | None" = None,
) -> AttentionBackend:
    """Make a backend by name.

    Args:
        name: "cpu" (compiled, or torch where no compiler is), "flashinfer" (NVIDIA GPUs) or "reference".
        spec: The model's attention.
        store: The KV that it reads and writes.
        num_threads: Threads of the cpu backend; None follows torch.get_num_threads().
        flashinfer: Options of the flashinfer backend; None for the defaults.

    Raises:
        ValueError: an unknown name, or a spec that does not fit the store.
        FlashInferUnavailable: FlashInfer can't run here, or not for this model.
    """
    from phloem.kernels.cpu import make_cpu_backend
    from phloem.kernels.flashinfer import FlashInferBackend
    from phloem.kernels.reference import ReferenceBackend

    makers: dict[str, Callable[[], AttentionBackend]] = {
        "cpu": lambda: make_cpu_backend(spec, store, num_threads=num_threads),
        "flashinfer": lambda: FlashInferBackend(spec, store, options=flashinfer),
        "reference": lambda: ReferenceBackend(spec, store),
    }
    if name not in makers:
        raise ValueError(f"unknown attention backend {name!r}; use one of {', '.join(sorted(makers))}")
    return makers[name]()
