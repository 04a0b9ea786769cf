"""/v1/responses: as any endpoint that generates, with responses that all gateways of a cluster share."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import msgspec
from starlette.types import Message, Receive, Scope, Send

from tandem.router.http import caller
from tandem.router.openai.endpoint import Exchange, GenerationEndpoint, House, in_a_thread_if_large
from tandem.router.plain_endpoint import JsonEndpoint
from tandem.router.responses import wire
from tandem.router.responses.store import ResponseStore, noting_writes


class _Previous(msgspec.Struct):
    previous_response_id: str | None = None


class ResponseEndpoint(GenerationEndpoint):
    """POST /v1/responses."""

    def __init__(self, house: Callable[[], House], store: ResponseStore) -> None:
        super().__init__(house, lambda body, caller: wire.parse(body, caller, store))
        self._store = store

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with noting_writes() as writes:

            async def send_when_kept(message: Message) -> None:
                # who has read the end may ask another gateway for it at once
                if writes:
                    await asyncio.wait(writes)
                await send(message)

            await super().__call__(scope, receive, send_when_kept)

    async def _answer(self, exchange: Exchange, body: bytes) -> None:
        previous = await in_a_thread_if_large(body, _previous, body)
        if previous is not None:
            await self._store.learn(previous, exchange.caller)
        await super()._answer(exchange, body)


def _previous(body: bytes) -> str | None:
    """The response that this request goes on with; None also where the request is wrong, which is told elsewhere."""
    if b"previous_response_id" not in body:
        return None
    try:
        return msgspec.json.decode(body, type=_Previous).previous_response_id
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None


class StoredEndpoint(JsonEndpoint):
    """What is done with one response: `act(response id, caller)` answers."""

    def __init__(self, house: Callable[[], House], act: Callable[[str, str], Awaitable[Mapping[str, Any]]]) -> None:
        super().__init__(house)
        self._act = act

    async def _answered(self, scope: Scope, receive: Receive) -> Mapping[str, Any]:
        self._house()  # 503 until it is open
        return await self._act(scope["path_params"]["response_id"], caller(scope))
