"""The errors that phloem raises, all of one family.

::

    PhloemError
    ├── InvalidRequest   (also ValueError)   a prompt, a message or an option that can't be right
    │   ├── PromptTooLong                    more tokens than the model or the cache can ever hold
    │   ├── GrammarError                     a JSON schema, regex or grammar that doesn't compile
    │   └── BranchBusy                       what changes a branch, asked for while a request is on it
    ├── ModelError       (also ValueError)   a model that can't be loaded
    │   ├── ModelNotFound                    no such directory, file, alias or hub id
    │   ├── ModelCorrupted                   files that are missing, cut short, or contradict each other
    │   └── ModelUnsupported                 a sound model with a feature that phloem has no code for
    ├── CacheFull                            a request that needs more blocks than there can be
    ├── QueueFull                            more requests wait than the engine was told to queue
    ├── BranchReleased                       a branch that was released is used again
    ├── StepFailed                           the model failed, or its numbers did (NaN), in a step of this request
    ├── ProgramError                         a program that uses its state in a way that can't work
    │   ├── UnknownCapture   (also KeyError) a name under which nothing was captured
    │   └── IncompleteOutput                 constrained output that was cut off; carries its beginning
    ├── EngineClosed                         a call on an engine after `close()`, or cut off by it
    ├── ToolFailed                           a Python function that a session's model called has raised
    └── Cancelled                            a request ended by its caller; carries what was made so far

What is wrong with the input is a ``ValueError`` too, so callers need not import this module to catch it. Each
error ends one request, never the engine, and its message says what failed, with numbers, and the way out.
`OutOfBlocks` and `InvariantError` of ``phloem.radix`` are not of this family: the first never leaves the
scheduler, and the second is a bug of phloem's own.
"""

from __future__ import annotations


class PhloemError(Exception):
    """The root of the family: ``except PhloemError`` catches all that phloem raises on purpose."""

    program_line: str | None = None
    """Where in a program it happened, as ``file:line, in function``; the message ends with it. None outside of programs."""


class InvalidRequest(PhloemError, ValueError):
    """A request that can't be served as it stands, whatever the state of the engine."""

    field: str | None
    """The request's field that is wrong, such as ``messages[2].role``; None if no single one is."""

    def __init__(self, message: str, *, field: str | None = None) -> None:
        super().__init__(message)
        self.field = field


class PromptTooLong(InvalidRequest):
    """A prompt (with its ``max_tokens``) beyond the model's context or the whole block pool."""


class GrammarError(InvalidRequest):
    """A JSON schema, regular expression or grammar that doesn't compile."""


class BranchBusy(InvalidRequest):
    """A request is on the branch, which can't change meanwhile; wait for its end, or fork."""


class ModelError(PhloemError, ValueError):
    """A model that can't be loaded."""


class ModelNotFound(ModelError):
    """The name is no local directory, no ``.gguf`` file, no built-in alias, and no reachable hub id."""


class ModelCorrupted(ModelError):
    """The model's files are incomplete, damaged, or don't fit to each other."""


class ModelUnsupported(ModelError):
    """The model's files are sound, but its architecture or one of its features has no code here."""


class CacheFull(PhloemError):
    """The request needs more blocks than the pool could free for it, now and later."""


class QueueFull(PhloemError):
    """As many requests wait already as `max_waiting` allows; try again later, or raise it."""


class BranchReleased(PhloemError):
    """The branch was released before; fork or open another one."""


class Cancelled(PhloemError):
    """The request was cancelled before its end."""

    partial: object
    """The output made until then (the type that the cancelled call would have returned), or None."""

    def __init__(self, message: str, *, partial: object = None) -> None:
        super().__init__(message)
        self.partial = partial


class ToolFailed(PhloemError):
    """A tool raised; its error is the cause of this one, and the message says where. The turn that called it has not been."""

    call: object
    """Which tool, with which arguments."""

    def __init__(self, message: str, *, call: object = None) -> None:
        super().__init__(message)
        self.call = call


class StepFailed(PhloemError):
    """The step that computed the request failed; nothing that it wrote stays in the cache, and others go on."""


class ProgramError(PhloemError):
    """A program (`phloem.runtime.frontend.program`) that uses its state in a way that can't work."""


class UnknownCapture(ProgramError, KeyError):
    """Nothing was captured under this name; the message lists the names there are."""

    __str__ = Exception.__str__  # KeyError would show the message in quotes


class IncompleteOutput(ProgramError):
    """Output that was to fit a grammar or a schema, cut off by `max_tokens`, the context or a stop string."""

    partial: str
    """The text until there."""

    def __init__(self, message: str, *, partial: str) -> None:
        super().__init__(message)
        self.partial = partial


class EngineClosed(PhloemError):
    """The engine was closed before, or while, the call was made."""
