"""Errors in the shape of the Messages API."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tandem.router.errors import ApiError

_KINDS = {
    400: "invalid_request_error",
    401: "authentication_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


def error_body(error: ApiError) -> Mapping[str, Any]:
    """This API's shape of errors."""
    kind = _KINDS.get(error.status, "invalid_request_error" if error.status < 500 else "api_error")
    return {"type": "error", "error": {"type": kind, "message": error.message}}
