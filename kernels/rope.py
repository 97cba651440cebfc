"""Rotary position embedding (Su et al., 2021) in the rotate-half convention, with the usual context extensions.

Values follow transformers' ROPE_INIT_FUNCTIONS. The tables of cosines and sines are float32, made once for all
positions; a token's rotation depends on its position only. That matters for `dynamic` (NTK) scaling, which elsewhere
depends on the length of the sequence so far: cached keys would have been rotated by another table than the new ones. Here
its table is chosen once, for `max_position`, the longest path that the engine allows.
"""

import math
from copy import copy
from dataclasses import dataclass
from typing import Literal, get_args

import torch

RopeKind = Literal["default", "linear", "dynamic", "yarn", "llama3"]


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """How the frequencies are stretched beyond the trained context. Fields that a kind does not read are ignored."""

    kind: RopeKind = "default"
    factor: float = 1.0
    """Length of the new context over the old one."""
    original_max_position: int | None = None
    """The trained context; `dynamic`, `yarn` and `llama3` need it."""
    low_freq_factor: float = 1.0
    """llama3: wavelengths above original_max_position / low_freq_factor are stretched in full."""
    high_freq_factor: float = 4.0
    """llama3: wavelengths below original_max_position / high_freq_factor are left alone."""
    beta_fast: float = 32.0
    """yarn: dimensions with more rotations than this are left alone."""
    beta_slow: float = 1.0
    """yarn: dimensions with fewer rotations than this are stretched in full."""
    attention_factor: float | None = None
    """yarn: factor of cosines and sines; None derives it from `factor` and the two mscales."""
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True
    """yarn: round the corrected range to whole dimensions."""

    def __post_init__(self) -> None:
        """Refuse what no formula covers.

        Raises:
            ValueError: an unknown kind, a factor that is not positive, or a missing original_max_position.
        """
        if self.kind not in get_args(RopeKind):
            raise ValueError(
                f"unknown rope scaling {self.kind!r}; use one of {', '.join(get_args(RopeKind))}"
            )
        if not self.factor > 0:
            raise ValueError(f"rope factor is {self.factor}; it must be positive")
        if self.kind in ("dynamic", "yarn", "llama3") and not self.original_max_position:
            raise ValueError(
                f"rope scaling {self.kind!r} needs original_max_position, the trained context length"
            )


class RotaryEmbedding:
    """Rotates queries and keys by their positions. Immutable; one object serves all layers."""

    __slots__ = ("_cos", "_signed_sin", "head_dim", "max_position", "rotary_dim")

    def __init__(
        self,
        head_dim: int,
        *,
        max_position: int,
        theta: float = 10000.0,
        scaling: RopeScaling | None = None,
        partial_rotary_factor: float = 1.0,
    ) -> None:
        """Make the tables: two of `[max_position, rotary_dim]` float32.

        Args:
            head_dim: Values per head.
            max_position: Positions 0 to max_position - 1 can be rotated.
            theta: Base of the wavelengths.
            scaling: Context extension; None for none.
            partial_rotary_factor: Share of the head's first dimensions that rotate; the others pass unchanged.

        Raises:
            ValueError: a rotary size that is odd or does not fit, or no position.
        """
        rotary_dim = int(head_dim * partial_rotary_factor)
        if rotary_dim < 2 or rotary_dim % 2 or rotary_dim > head_dim:
            raise ValueError(
                f"rotary size {rotary_dim} (head_dim {head_dim} * {partial_rotary_factor}) must be even, 2 to {head_dim}"
            )
        if max_position < 1:
            raise ValueError(f"max_position is {max_position}; it must be 1 or more")
        scaling = scaling or RopeScaling()
        self.head_dim, self.max_position, self.rotary_dim = head_dim, max_position, rotary_dim
        frequencies = inverse_frequencies(rotary_dim, theta=theta, scaling=scaling, max_position=max_position)
        angles = torch.outer(torch.arange(max_position, dtype=torch.float32), frequencies)
        factor = attention_factor(scaling)
        cos, sin = angles.cos() * factor, angles.sin() * factor
        # with the sign in the table, rotate-half is one swap of halves: x * cos + swap(x) * signed_sin
        self._cos = torch.cat((cos, cos), dim=-1)
        self._signed_sin = torch.cat((-sin, sin), dim=-1)

    def __call__(
        self, q: torch.Tensor, k: torch.Tensor, positions: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Rotate in float32 and round to the input's dtype.

        Args:
            q: `[num_tokens, num_q_heads, head_dim]`.
            k: `[num_tokens, num_kv_heads, head_dim]`.
            positions: Integer `[num_tokens]`.

        Returns:
            The rotated q and k, new tensors.

        Raises:
            IndexError: a position beyond max_position.
        """
        cos = self._cos[positions].unsqueeze(1)
        signed_sin = self._signed_sin[positions].unsqueeze(1)
        return self._rotate(q, cos, signed_sin), self._rotate(k, cos, signed_sin)

    def to(self, device: torch.device) -> "RotaryEmbedding":
        """A twin whose tables are on a device, for tensors there."""
        twin = copy(self)
        twin._cos, twin._signed_sin = self._cos.to(device), self._signed_sin.to(device)
        return twin

    def tables(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosines, and sines with the sign of rotate-half: float32 `[max_position, rotary_dim]` each. Not copies."""
        return self._cos, self._signed_sin

    def cos_sin(self) -> torch.Tensor:
        """The table as FlashInfer reads it: float32 `[max_position, rotary_dim]`, cosines before sines. A copy."""
        half = self.rotary_dim // 2
        return torch.cat((self._cos[:, :half], self._signed_sin[:, half:]), dim=-1)

    def _rotate(self, x: torch.Tensor, cos: torch.Tensor, signed_sin: torch.Tensor) -> torch.Tensor:
        # products and sums stay separate operations: a fused one could round differently at the end of a range
        rotary = x[..., : self.rotary_dim].float()
        low, high = rotary.chunk(2, dim=-1)
        swapped = torch.cat((high, low), dim=-1).mul_(signed_sin)
        rotated = (rotary * cos).add_(swapped).to(x.dtype)
        if self.rotary_dim == self.head_dim:
            return rotated
        return torch.cat((rotated, x[..., self.rotary_dim :]), dim=-1)


def inverse_frequencies(
    rotary_dim: int, *, theta: float, scaling: RopeScaling, max_position: int
) -> torch.Tensor:
    """Angle per position of each pair of dimensions: float32 `[rotary_dim // 2]`."""
    if scaling.kind == "dynamic":
        theta *= _dynamic_stretch(rotary_dim, scaling, max_position)
    exponents = torch.arange(0, rotary_dim, 2, dtype=torch.float32) / rotary_dim
    wide = theta**exponents
    if scaling.kind == "linear":
        return 1.0 / wide / scaling.factor
    if scaling.kind == "llama3":
        return _llama3_frequencies(1.0 / wide, scaling)
    if scaling.kind == "yarn":
        return _yarn_frequencies(wide, theta, scaling)
    return 1.0 / wide


def attention_factor(scaling: RopeScaling) -> float:
    """Factor of cosines and sines: 1 but for yarn (Peng et al., 2023, equation 22)."""
    if scaling.kind != "yarn":
        return 1.0
    if scaling.attention_factor is not None:
        return scaling.attention_factor
    if scaling.mscale and scaling.mscale_all_dim:
        return _yarn_mscale(scaling.factor, scaling.mscale) / _yarn_mscale(
            scaling.factor, scaling.mscale_all_dim
        )
    return _yarn_mscale(scaling.factor, 1.0)


def _dynamic_stretch(rotary_dim: int, scaling: RopeScaling, max_position: int) -> float:
    trained = scaling.original_max_position
    assert trained is not None
    length = max(max_position, trained)
    stretch: float = (scaling.factor * length / trained - (scaling.factor - 1)) ** (
        rotary_dim / (rotary_dim - 2)
    )
    return stretch


def _llama3_frequencies(frequencies: torch.Tensor, scaling: RopeScaling) -> torch.Tensor:
    trained = scaling.original_max_position
    assert trained is not None
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    wavelengths = 2 * math.pi / frequencies
    stretched = torch.where(wavelengths > trained / low, frequencies / scaling.factor, frequencies)
    smooth = (trained / wavelengths - low) / (high - low)
    blended = (1 - smooth) * stretched / scaling.factor + smooth * stretched
    is_medium = (wavelengths >= trained / high) & (wavelengths <= trained / low)
    return torch.where(is_medium, blended, stretched)


def _yarn_frequencies(wide: torch.Tensor, theta: float, scaling: RopeScaling) -> torch.Tensor:
    trained = scaling.original_max_position
    assert trained is not None
    num_pairs = wide.shape[0]

    def dimension(num_rotations: float) -> float:
        return 2 * num_pairs * math.log(trained / (num_rotations * 2 * math.pi)) / (2 * math.log(theta))

    low, high = dimension(scaling.beta_fast), dimension(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, 2 * num_pairs - 1)
    if low == high:
        high += 0.001
    ramp = torch.clamp((torch.arange(num_pairs, dtype=torch.float32) - low) / (high - low), 0, 1)
    keep = 1 - ramp
    return 1.0 / (scaling.factor * wide) * (1 - keep) + 1.0 / wide * keep


def _yarn_mscale(factor: float, mscale: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0
