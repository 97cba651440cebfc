"""From errors to answers: what went wrong, in no protocol's words, and then in OpenAI's.

=====================================  ======  =====================
what                                   status  kind
=====================================  ======  =====================
the request is wrong, or too long      400     invalid_request
no key, or a wrong one                 401     authentication
a key that may not do that             403     permission
no such model, path or object          404     not_found
the request took too long              408     timeout
the body is too large                  413     too_large
too many requests                      429     rate_limit
no memory for it now, or draining      503     unavailable
a fault of phloem's or the machine's   500     internal
=====================================  ======  =====================
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse, Response

from phloem.radix import InvalidNamespace
from phloem.runtime.errors import (
    BranchBusy,
    BranchReleased,
    CacheFull,
    Cancelled,
    EngineClosed,
    GrammarError,
    InvalidRequest,
    PromptTooLong,
    QueueFull,
)

MAX_LISTED = 3
"""Faults of one request that a message lists."""

CLIENT_GONE = 499
"""Nobody reads it; the number is what logs of other servers show for it."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a request is not served."""

    status: int
    kind: str
    message: str
    field: str | None = None
    """The field of the request that is wrong; None if no single one is."""

    code: str | None = None
    """What programs look for, such as `context_length_exceeded`."""

    retry_after_s: int | None = None

    @property
    def headers(self) -> dict[str, str]:
        """What clients look for to decide whether to try again."""
        if self.retry_after_s is not None:
            return {"Retry-After": str(self.retry_after_s)}
        # OpenAI's clients would repeat what timed out, which is the last thing that a busy server needs.
        return {"x-should-retry": "false"} if self.kind == "timeout" else {}


Render = Callable[[Failure], Mapping[str, Any]]
"""A protocol's form of a failure: the JSON body."""


class ApiError(Exception):
    """A failure that the server itself found."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.message)
        self.failure = failure


class ClientGone(Exception):
    """The client closed the connection before it had its answer."""


def invalid(message: str, field: str | None = None, *, code: str | None = None) -> ApiError:
    """Return the error of a request that is wrong."""
    return ApiError(Failure(400, "invalid_request", message, field, code))


def not_found(message: str, field: str | None = None, *, code: str | None = None) -> ApiError:
    """Return the error of a request for what there is not."""
    return ApiError(Failure(404, "not_found", message, field, code))


def failure_of(error: Exception, *, retry_after_s: int = 1) -> Failure:
    """Return what an error means to a client. Of one that is not meant for clients it tells nothing, and logs it."""
    if isinstance(error, ApiError):
        return error.failure
    if isinstance(error, RequestValidationError):
        return _of_validation(error.errors())
    if isinstance(error, InvalidRequest | InvalidNamespace):
        return _of_invalid(error)
    if isinstance(error, Cancelled):
        return Failure(408, "timeout", str(error))
    if isinstance(error, BranchReleased):
        return Failure(404, "not_found", "the branch was deleted before the request ended", "branch_id")
    if isinstance(error, QueueFull):
        return Failure(429, "rate_limit", str(error), retry_after_s=retry_after_s)
    if isinstance(error, CacheFull | EngineClosed):
        return Failure(503, "unavailable", str(error), retry_after_s=retry_after_s)
    if isinstance(error, HTTPException):
        return Failure(error.status_code, _KINDS.get(error.status_code, "invalid_request"), str(error.detail))
    logger.error("a request failed", exc_info=error)
    return Failure(500, "internal", "the server failed; its log says more")


def _of_invalid(error: InvalidRequest | InvalidNamespace) -> Failure:
    field = getattr(error, "field", None)
    if isinstance(error, BranchBusy):
        return Failure(409, "conflict", str(error), field, "branch_busy")
    code = "context_length_exceeded" if isinstance(error, PromptTooLong) else None
    return Failure(400, "invalid_request", str(error), field, code)


_KINDS = {404: "not_found", 429: "rate_limit", 500: "internal", 503: "unavailable"}


def _of_validation(faults: Sequence[Mapping[str, Any]]) -> Failure:
    """Say which fields are wrong and how. What they hold is not repeated: it may be a prompt."""
    texts = [f"{_place(fault)}: {fault['msg']}" for fault in faults[:MAX_LISTED]]
    if len(faults) > MAX_LISTED:
        texts.append(f"and {len(faults) - MAX_LISTED} more")
    return Failure(400, "invalid_request", "; ".join(texts), _place(faults[0]) if faults else None)


_TYPE_NAMES = frozenset({"str", "int", "float", "bool", "none", "constrained-int"})


def _place(fault: Mapping[str, Any]) -> str:
    """Write ("body", "messages", 2, "role") as "messages[2].role"."""
    if fault["type"] == "json_invalid":
        return "body"
    place = ""
    for part in fault["loc"][1:]:
        # Which of several types a value was tried as is no part of its place.
        if isinstance(part, str) and (part in _TYPE_NAMES or "[" in part or part[:1].isupper()):
            continue
        place += f"[{part}]" if isinstance(part, int) else f".{part}" if place else str(part)
    return place or "body"


_OPENAI_TYPES = {
    "invalid_request": "invalid_request_error",
    "authentication": "authentication_error",
    "permission": "permission_error",
    "not_found": "not_found_error",
    "conflict": "conflict_error",
    "timeout": "timeout_error",
    "too_large": "invalid_request_error",
    "rate_limit": "rate_limit_error",
    "unavailable": "service_unavailable_error",
    "internal": "server_error",
}


def openai_error(failure: Failure) -> dict[str, Any]:
    """Return OpenAI's form of a failure."""
    return {
        "error": {
            "message": failure.message,
            "type": _OPENAI_TYPES[failure.kind],
            "param": failure.field,
            "code": failure.code,
        }
    }


def grammar_refused(error: GrammarError, field: str) -> ApiError:
    """Return the error of a grammar that was made from a field of the request."""
    return invalid(str(error), field)


class JsonAnswer(JSONResponse):
    """JSON that repeats what a request held, which may be what UTF-8 or JSON can't hold: never an error, at worst a "?"."""

    def render(self, content: Any) -> bytes:
        """Return the body."""
        return printable(json.dumps(content, ensure_ascii=False, separators=(",", ":"))).encode()


def respond(failure: Failure, render: Render) -> Response:
    """Return the HTTP answer of a failure."""
    return JsonAnswer(render(failure), status_code=failure.status, headers=failure.headers)


def printable(text: str) -> str:
    """Replace lone surrogates, which came out of a request's JSON and which no answer can hold."""
    return text.encode("utf-8", "replace").decode("utf-8")
