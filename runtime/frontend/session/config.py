"""What a session is opened with."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from phloem.radix import Namespace
from phloem.runtime.errors import InvalidRequest
from phloem.runtime.frontend.session.tools import Toolbox
from phloem.runtime.sampling_params import SamplingParams

Overflow = Literal["error", "drop_oldest"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionConfig:
    """The settings of a session; every one has a default.

    Raises:
        InvalidRequest: One is of a wrong kind, or a function can't be a tool; the message names it.
    """

    system: str | None = None
    """The system message. None: what the template does without one, which may be a text of its own."""

    tools: Toolbox | Sequence[Callable[..., Any]] = ()
    """Python functions that the model may call; a :class:`Toolbox` sets more about them."""

    pin_ttl: float | None = None
    """After each turn, keep the conversation from eviction for so many seconds after its last use. None: no lease."""

    params: SamplingParams = field(default_factory=SamplingParams)
    """For turns that are given none."""

    overflow: Overflow = "error"
    """What to do when the context is full: refuse the turn, or leave the oldest turns out of the prompt."""

    namespace: Namespace | None = None
    """Its `salt` and `adapter` keep the session's cache apart from others'."""

    template_options: Mapping[str, Any] = field(default_factory=dict)
    """More variables for the chat template, such as `enable_thinking`."""

    def __post_init__(self) -> None:
        if self.system is not None and not isinstance(self.system, str):
            raise InvalidRequest(f"system must be a text, not {self.system!r}", field="system")
        if self.overflow not in get_args(Overflow):
            raise InvalidRequest(
                f"overflow must be one of {', '.join(get_args(Overflow))}, not {self.overflow!r}",
                field="overflow",
            )
        number = isinstance(self.pin_ttl, int | float) and not isinstance(self.pin_ttl, bool)
        if self.pin_ttl is not None and (not number or not self.pin_ttl > 0):
            raise InvalidRequest(
                f"pin_ttl must be a number of seconds above 0, not {self.pin_ttl!r}", field="pin_ttl"
            )
        if not isinstance(self.params, SamplingParams):
            raise InvalidRequest(f"params must be SamplingParams, not {self.params!r}", field="params")
        if not isinstance(self.tools, Toolbox):
            object.__setattr__(self, "tools", Toolbox(self.tools))

    @property
    def toolbox(self) -> Toolbox:
        """The tools."""
        assert isinstance(self.tools, Toolbox)
        return self.tools
