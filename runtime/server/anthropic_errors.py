"""Anthropic's form of errors. The statuses are those of all protocols (see `errors.py`): what Anthropic's own API answers with 529 is 503 here."""

from __future__ import annotations

from typing import Any

from phloem.runtime.server.errors import Failure

_TYPES = {
    "invalid_request": "invalid_request_error",
    "authentication": "authentication_error",
    "permission": "permission_error",
    "not_found": "not_found_error",
    "conflict": "invalid_request_error",
    "timeout": "timeout_error",
    "too_large": "request_too_large",
    "rate_limit": "rate_limit_error",
    "unavailable": "overloaded_error",
    "internal": "api_error",
}


def anthropic_error(failure: Failure) -> dict[str, Any]:
    """Return Anthropic's form of a failure. It has no place for the wrong field, so that the message names it."""
    message = failure.message
    if failure.field is not None and failure.field not in message:
        message = f"{failure.field}: {message}"
    return {"type": "error", "error": {"type": _TYPES[failure.kind], "message": message}}
