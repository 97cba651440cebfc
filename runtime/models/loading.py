"""From a model directory to everything that an engine needs of the model: `load_model`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from phloem.kernels.cpu import make_cpu_linear
from phloem.kernels.fused_ops import FusedOps
from phloem.runtime.errors import ModelNotFound
from phloem.runtime.models.config import ModelConfig, read_model_config
from phloem.runtime.models.decoder import Decoder
from phloem.runtime.models.fingerprint import fingerprint
from phloem.runtime.models.weights import open_checkpoint
from phloem.runtime.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model in memory."""

    decoder: Decoder
    config: ModelConfig
    tokenizer: Tokenizer
    fingerprint: str
    """Tells models apart that may give different KV; see `phloem.runtime.models.fingerprint`."""

    dtype: torch.dtype
    """What the decoder computes in, and what its KV is best stored in."""


def load_model(
    path: str | Path,
    *,
    dtype: torch.dtype | None = None,
    deterministic: bool = True,
    int8: bool = False,
    max_position: int | None = None,
    device: torch.device | str = "cpu",
    ops: FusedOps | None = None,
) -> LoadedModel:
    """Load a model directory in the Hugging Face format.

    Args:
        path: The directory; `phloem.runtime.models.resolve.resolve_model` gives one for any name.
        dtype: What to compute in; None picks what this CPU does well, see `preferred_dtype`.
        deterministic: See `Decoder`.
        int8: See `Decoder`.
        max_position: See `Decoder`.
        device: See `Decoder`.
        ops: See `Decoder`.

    Raises:
        ModelNotFound: There is no such directory.
        ModelCorrupted: Files are missing, damaged, or don't fit to each other.
        ModelUnsupported: The architecture or a feature of the model has no code here.
    """
    directory = Path(path)
    if not directory.is_dir():
        raise ModelNotFound(f"{directory} is not a directory; use resolve_model() for names and .gguf files")
    config = read_model_config(directory)
    tokenizer = Tokenizer.from_directory(directory, eos_token_ids=config.eos_token_ids)
    chosen = preferred_dtype() if dtype is None else dtype
    with open_checkpoint(directory, config) as checkpoint:
        decoder = Decoder(
            config,
            checkpoint,
            dtype=chosen,
            deterministic=deterministic,
            int8=int8,
            max_position=max_position,
            device=device,
            ops=ops,
        )
    return LoadedModel(
        decoder=decoder,
        config=config,
        tokenizer=tokenizer,
        fingerprint=fingerprint(directory) + ("+int8" if int8 else ""),
        dtype=chosen,
    )


def preferred_dtype() -> torch.dtype:
    """bfloat16 where linear layers are compiled, or where the CPU multiplies it natively (AMX or AVX512-BF16); else float32.

    Half the bytes make decode steps twice as fast. Elsewhere torch would unpack it, and be slower than in float32.
    """
    # private names of torch: a version without them is treated like a CPU without the feature
    probes: list[Callable[[], bool] | None] = [
        getattr(torch.cpu, name, None) for name in ("_is_amx_tile_supported", "_is_avx512_bf16_supported")
    ]
    is_native = any(probe is not None and probe() for probe in probes)
    return torch.bfloat16 if is_native or make_cpu_linear() is not None else torch.float32
