"""Dense attention in float64: slow, and obviously right. The oracle of every other backend."""

import torch

from phloem.kernels.attention import AttentionSpec, append_step, check_fit, check_plan
from phloem.kernels.kv_store import PagedKVStore
from phloem.kernels.plan import AttentionPlan


class ReferenceBackend:
    """Attention row by row, token by token, over gathered KV. O(tokens * context) with Python per token."""

    def __init__(self, spec: AttentionSpec, store: PagedKVStore) -> None:
        check_fit(spec, store)
        self.spec = spec
        self.store = store
        self._plan = AttentionPlan.from_rows((), block_size=store.block_size)

    def plan(self, plan: AttentionPlan) -> None:
        """Take a step's metadata. See `AttentionBackend.plan`."""
        check_plan(plan, self.store)
        self._plan = plan

    def append(self, layer: int, k: torch.Tensor, v: torch.Tensor) -> None:
        """Write the step's KV. See `AttentionBackend.append`."""
        append_step(self.store, self._plan, layer, k, v)

    def attend(self, layer: int, q: torch.Tensor) -> torch.Tensor:
        """Attend in float64. See `AttentionBackend.attend`."""
        plan = self._plan
        out = torch.empty_like(q)
        kv = self.store.layer(layer)
        qo_indptr, kv_indptr = plan.qo_indptr.tolist(), plan.kv_indptr.tolist()
        for row, kv_len in enumerate(plan.kv_lens.tolist()):
            blocks = kv[plan.kv_indices[kv_indptr[row] : kv_indptr[row + 1]].long()]
            keys = blocks[:, 0].flatten(0, 1)[:kv_len].double()
            values = blocks[:, 1].flatten(0, 1)[:kv_len].double()
            for token in range(qo_indptr[row], qo_indptr[row + 1]):
                end = int(plan.positions[token]) + 1
                window = self.spec.window(layer)
                begin = 0 if window is None else max(0, end - window)
                out[token] = self._attend_one(q[token].double(), keys[begin:end], values[begin:end]).to(
                    q.dtype
                )
        return out

    def _attend_one(self, q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        """One token: q `[num_q_heads, head_dim]`, keys and values `[num_keys, num_kv_heads, head_dim]`, float64."""
        grouped = q.reshape(self.spec.num_kv_heads, self.spec.group_size, -1)
        scores = torch.einsum("kgd,nkd->kgn", grouped, keys) * self.spec.softmax_scale
        if self.spec.logits_soft_cap is not None:
            scores = self.spec.logits_soft_cap * torch.tanh(scores / self.spec.logits_soft_cap)
        return torch.einsum("kgn,nkd->kgd", torch.softmax(scores, dim=-1), values).flatten(0, 1)
