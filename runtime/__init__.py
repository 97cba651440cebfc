"""phloem's runtime: an engine that computes every prefix once.

See :class:`Engine`; the cache itself is `phloem.radix`. What is named here is imported when it is first used: torch takes
seconds, and `phloem --help` or a module that only names an error can do without it.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from phloem.radix import Namespace
    from phloem.runtime.branch import Branch, Score
    from phloem.runtime.config import EngineConfig
    from phloem.runtime.engine import Engine
    from phloem.runtime.errors import (
        BranchBusy,
        BranchReleased,
        CacheFull,
        Cancelled,
        EngineClosed,
        GrammarError,
        IncompleteOutput,
        InvalidRequest,
        ModelCorrupted,
        ModelError,
        ModelNotFound,
        ModelUnsupported,
        PhloemError,
        ProgramError,
        PromptTooLong,
        QueueFull,
        StepFailed,
        ToolFailed,
        UnknownCapture,
    )
    from phloem.runtime.grammar import Grammar
    from phloem.runtime.outputs import Chunk, Completion, EngineStats, TokenLogprob, Usage
    from phloem.runtime.sampling_params import SamplingParams

__all__ = [
    "Branch",
    "BranchBusy",
    "BranchReleased",
    "CacheFull",
    "Cancelled",
    "Chunk",
    "Completion",
    "Engine",
    "EngineClosed",
    "EngineConfig",
    "EngineStats",
    "Grammar",
    "GrammarError",
    "IncompleteOutput",
    "InvalidRequest",
    "ModelCorrupted",
    "ModelError",
    "ModelNotFound",
    "ModelUnsupported",
    "Namespace",
    "PhloemError",
    "ProgramError",
    "PromptTooLong",
    "QueueFull",
    "SamplingParams",
    "Score",
    "StepFailed",
    "TokenLogprob",
    "ToolFailed",
    "UnknownCapture",
    "Usage",
]

_HOMES = {
    "Namespace": "phloem.radix",
    "EngineConfig": "phloem.runtime.config",
    "Engine": "phloem.runtime.engine",
    "Chunk": "phloem.runtime.outputs",
    "Completion": "phloem.runtime.outputs",
    "EngineStats": "phloem.runtime.outputs",
    "TokenLogprob": "phloem.runtime.outputs",
    "Usage": "phloem.runtime.outputs",
    "Branch": "phloem.runtime.branch",
    "Score": "phloem.runtime.branch",
    "Grammar": "phloem.runtime.grammar",
    "SamplingParams": "phloem.runtime.sampling_params",
}
"""Where each name lives; those not listed are errors."""


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES.get(name, "phloem.runtime.errors")), name)


def __dir__() -> list[str]:
    return __all__
