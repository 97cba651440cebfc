"""phloem's runtime: an engine that computes every prefix once.

See :class:`Engine`; the cache itself is `phloem.radix`.
"""

from phloem.radix import Namespace
from phloem.runtime.config import EngineConfig
from phloem.runtime.engine import Engine
from phloem.runtime.errors import (
    CacheFull,
    Cancelled,
    EngineClosed,
    GrammarError,
    InvalidRequest,
    ModelCorrupted,
    ModelError,
    ModelNotFound,
    ModelUnsupported,
    PhloemError,
    PromptTooLong,
    StepFailed,
)
from phloem.runtime.outputs import Chunk, Completion, EngineStats, Usage
from phloem.runtime.sampling_params import SamplingParams

__all__ = [
    "CacheFull",
    "Cancelled",
    "Chunk",
    "Completion",
    "Engine",
    "EngineClosed",
    "EngineConfig",
    "EngineStats",
    "GrammarError",
    "InvalidRequest",
    "ModelCorrupted",
    "ModelError",
    "ModelNotFound",
    "ModelUnsupported",
    "Namespace",
    "PhloemError",
    "PromptTooLong",
    "SamplingParams",
    "StepFailed",
    "Usage",
]
