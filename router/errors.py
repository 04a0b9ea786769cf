"""What can go wrong with a request, as the client is told.

TandemError
└── ApiError            ends a request with an HTTP status, or with an error event when the stream has begun
    └── Cancelled       by another request
ClientDisconnected      nobody is left to be told anything
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from tandem.workers.errors import TandemError

MAX_MESSAGE_CHARACTERS = 400
MAX_PARAM_CHARACTERS = 100
"""Both may repeat what a client sent. Six bytes a character at most in JSON: an error has 4 KB."""


def shortened(text: str, max_characters: int) -> str:
    return text if len(text) <= max_characters else text[: max_characters - 3] + "..."


class ApiError(TandemError):
    """An answer in the shape of the OpenAI API's errors. The text never holds paths, addresses or stack traces."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        type: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
        retry_after_s: int | None = None,
        headers: tuple[tuple[str, str], ...] = (),
    ) -> None:
        message = shortened(message, MAX_MESSAGE_CHARACTERS)
        super().__init__(message)
        self.status = status
        self.message = message
        self.type = type
        self.param = None if param is None else shortened(param, MAX_PARAM_CHARACTERS)
        self.code = code
        self.headers = headers if retry_after_s is None else (*headers, ("retry-after", str(retry_after_s)))

    def body(self) -> dict[str, object]:
        error = {"message": self.message, "type": self.type, "param": self.param, "code": self.code}
        return {"error": error}


class Cancelled(ApiError):
    """Somebody asked for the end of a request."""

    def __init__(self) -> None:
        super().__init__(400, "The response was cancelled.", code="response_cancelled")


class ClientDisconnected(Exception):
    """The client hung up."""


def bad_request(message: str, *, param: str | None = None, code: str | None = None) -> ApiError:
    return ApiError(400, message, param=param, code=code)


def renamed(error: ApiError, names: Mapping[str, str]) -> ApiError:
    """The same error for an API in which the field has another name."""
    param = error.param or ""
    match = re.match(r"[a-z_]+", param)
    if match is None or match[0] not in names:
        return error
    old, new = match[0], names[match[0]]
    return ApiError(
        error.status,
        error.message.replace(f"'{old}", f"'{new}"),
        type=error.type,
        param=new + param[len(old) :],
        code=error.code,
        headers=error.headers,
    )


def too_many(message: str, *, retry_after_s: int = 1) -> ApiError:
    return ApiError(429, message, type="rate_limit_error", code="rate_limit_exceeded", retry_after_s=retry_after_s)


def nobody_left(message: str = "No worker is available to serve this request. Please try again.") -> ApiError:
    return ApiError(503, message, type="server_error", code="service_unavailable", retry_after_s=1)


def internal_error() -> ApiError:
    return ApiError(500, "The server could not complete this request.", type="server_error", code="internal_error")


def too_slow() -> ApiError:
    return ApiError(504, "The request was not finished in time.", type="server_error", code="timeout")


def shutting_down() -> ApiError:
    return ApiError(
        503, "The server is shutting down. Please try again.", type="server_error", code="draining", retry_after_s=1
    )
