"""Endpoints that answer with one JSON object and ask no worker."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

from starlette.types import Receive, Scope, Send

from tandem.router.errors import ApiError, ClientDisconnected, internal_error
from tandem.router.http import caller, check_json, read_body, request_id, send_error, send_json
from tandem.router.openai.endpoint import House, in_a_thread_if_large, openai_error

logger = logging.getLogger(__name__)


class JsonEndpoint:
    """As a plain ASGI application. `error_body`: its shape of errors."""

    def __init__(
        self, house: Callable[[], House], error_body: Callable[[ApiError], Mapping[str, Any]] = openai_error
    ) -> None:
        self._house = house
        self._error_body = error_body

    async def _answered(self, scope: Scope, receive: Receive) -> Mapping[str, Any]:
        """The object. Raises `ApiError` and `ClientDisconnected`."""
        raise NotImplementedError

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = [("x-request-id", request_id(scope))]
        try:
            await send_json(send, 200, await self._answered(scope, receive), headers)
        except ClientDisconnected:
            return
        except ApiError as error:
            await send_error(send, error, headers, body=self._error_body(error))
        except Exception:
            logger.exception("a request to %s met a bug", scope["path"])
            bug = internal_error()
            await send_error(send, bug, headers, body=self._error_body(bug))


class PlainEndpoint(JsonEndpoint):
    """By a function: `answer` is given the house, the body (empty unless `has_body`), the caller and the path's
    parameters."""

    def __init__(
        self,
        house: Callable[[], House],
        answer: Callable[[House, bytes, str, Mapping[str, str]], Mapping[str, Any]],
        *,
        has_body: bool,
        error_body: Callable[[ApiError], Mapping[str, Any]] = openai_error,
    ) -> None:
        super().__init__(house, error_body)
        self._answer = answer
        self._has_body = has_body

    async def _answered(self, scope: Scope, receive: Receive) -> Mapping[str, Any]:
        house = self._house()
        body = b""
        if self._has_body:
            check_json(scope)
            limit, timeout_s = house.config.max_body_bytes, house.config.body_timeout_s
            body = await read_body(scope, receive, max_bytes=limit, timeout_s=timeout_s)
        path = scope.get("path_params", {})
        return await in_a_thread_if_large(body, self._answer, house, body, caller(scope), path)
