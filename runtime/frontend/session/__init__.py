"""Chat sessions: conversations that grow by turns, and compute each turn's new words only. See :class:`Session`."""

from phloem.runtime.frontend.session.config import SessionConfig
from phloem.runtime.frontend.session.messages import Message, ToolCall, ToolResult, Turn
from phloem.runtime.frontend.session.session import Session
from phloem.runtime.frontend.session.stream import AsyncTurnStream, TurnStream
from phloem.runtime.frontend.session.template import TemplateReport
from phloem.runtime.frontend.session.tools import Toolbox

__all__ = [
    "AsyncTurnStream",
    "Message",
    "Session",
    "SessionConfig",
    "TemplateReport",
    "ToolCall",
    "ToolResult",
    "Toolbox",
    "Turn",
    "TurnStream",
]
