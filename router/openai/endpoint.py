"""One endpoint that generates, as an ASGI application: from the request's bytes to the last byte of its answer.

Every request ends in exactly one way, and is counted as that: ok, rejected (never taken on), failed, or cancelled (the
client hung up). It may be ended early by three things, all watched from the first moment on: the client's leaving, the
deadline, and the gateway's own end.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

from starlette.types import Receive, Scope, Send

from tandem.router.admission import Admission, Gate
from tandem.router.config import GatewayConfig
from tandem.router.dispatch import Dispatcher, Generation, enter_together, run_all
from tandem.router.errors import ApiError, ClientDisconnected, bad_request, internal_error, too_slow
from tandem.router.http import read_body, request_id, send_error, until_disconnect
from tandem.router.metrics import Outcome, RouterMetrics
from tandem.router.openai.reply import Format, PromptSink, Reply, StreamReply, WholeReply
from tandem.router.plan import Plan
from tandem.router.tokenizer import Tokenizer
from tandem.workers.errors import RequestError

logger = logging.getLogger(__name__)

LAST_WORDS_S = 5.0
"""How long a client may take to read that its request has failed."""
LARGE_BODY_BYTES = 16 << 10
"""Bodies from here on are parsed and tokenised in a thread, so that they do not hold up everybody's streams."""


class HasModel(Protocol):
    @property
    def model(self) -> str: ...


WireRequest = TypeVar("WireRequest", bound=HasModel)


@dataclass(frozen=True, slots=True)
class House:
    """What all endpoints of one gateway share."""

    config: GatewayConfig
    tokenizer: Tokenizer
    dispatcher: Dispatcher
    admission: Admission
    gate: Gate
    metrics: RouterMetrics
    closing: asyncio.Future[ApiError]
    """Done when requests that still run must be ended, with what to tell their clients."""


class GenerationEndpoint(Generic[WireRequest]):
    """POST /v1/chat/completions or /v1/completions, by the functions it is given."""

    def __init__(
        self,
        house: Callable[[], House],
        *,
        parse: Callable[[bytes], WireRequest],
        plan: Callable[[WireRequest, Tokenizer, GatewayConfig], Plan],
        form: Callable[[Plan, Tokenizer], Format],
    ) -> None:
        self._house = house
        self._parse = parse
        self._plan = plan
        self._form = form

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        house = self._house()
        arrived = time.perf_counter()
        house.metrics.started.inc()
        exchange = _Exchange(house, request_id(scope), send, arrived)
        outcome: Outcome = "cancelled"
        try:
            with house.admission.open_door():
                outcome = await self._serve(exchange, scope, receive)
        finally:
            house.metrics.requests.labels(outcome).inc()
            house.metrics.request_duration.observe(time.perf_counter() - arrived)

    async def _serve(self, exchange: _Exchange, scope: Scope, receive: Receive) -> Outcome:
        config = exchange.house.config
        try:
            body = await read_body(scope, receive, max_bytes=config.max_body_bytes, timeout_s=config.body_timeout_s)
            await self._watched(exchange, body, receive)
        except ClientDisconnected:
            return "cancelled"
        except ApiError as error:
            await exchange.fail(error)
            return "rejected" if error.status < 500 or not exchange.is_admitted else "failed"
        except Exception:
            logger.exception("request %s met a bug", exchange.request_id)
            await exchange.fail(internal_error())
            return "failed"
        return "ok"

    async def _watched(self, exchange: _Exchange, body: bytes, receive: Receive) -> None:
        """Answer, unless the client leaves, time runs out or the gateway closes: whichever comes first."""
        closing = exchange.house.closing
        work = asyncio.create_task(self._answer(exchange, body), name=f"request {exchange.request_id}")
        gone = asyncio.create_task(until_disconnect(receive))
        try:
            ends: set[asyncio.Future[Any]] = {work, gone, closing}
            await asyncio.wait(
                ends,
                timeout=exchange.house.config.request_timeout_s,
                return_when=asyncio.FIRST_COMPLETED,
            )
            if work.done():
                await work
            elif gone.done():
                raise ClientDisconnected
            elif closing.done():
                raise closing.result()
            else:
                raise too_slow()
        finally:
            work.cancel()
            gone.cancel()
            await asyncio.gather(work, gone, return_exceptions=True)

    async def _answer(self, exchange: _Exchange, body: bytes) -> None:
        house = exchange.house
        try:
            if len(body) < LARGE_BODY_BYTES:
                plan = self._prepare(house, body)
            else:
                plan = await asyncio.to_thread(self._prepare, house, body)
        except RequestError as error:
            raise bad_request(f"{error}.", param=error.param) from error
        with house.admission.admit(plan.num_sequences):
            generations = [
                Generation(house.dispatcher, request, house.config.request_timeout_s)
                for request in plan.requests(exchange.unique_id)
            ]
            try:
                if house.gate.has_limits:
                    await enter_together(generations, house.gate, exchange.arrived)
                reply = exchange.begin(plan, self._form(plan, house.tokenizer))
                await run_all(
                    [(generation, PromptSink(reply, position)) for position, generation in enumerate(generations)]
                )
                await reply.done()
            finally:
                for generation in generations:
                    generation.close()

    def _prepare(self, house: House, body: bytes) -> Plan:
        request = self._parse(body)
        check_model(request.model, house.config)
        plan = self._plan(request, house.tokenizer, house.config)
        if plan.num_sequences > house.config.max_num_choices:
            raise bad_request(
                f"A request may ask for at most {house.config.max_num_choices} choices in all.", param="n"
            )
        return plan


def check_model(model: str, config: GatewayConfig) -> None:
    """Raises `ApiError` 404 for a model that is not the one served here."""
    if model != config.model_name:
        shown = model if len(model) <= 100 else model[:100] + "..."
        raise ApiError(404, f"The model '{shown}' does not exist.", param="model", code="model_not_found")


class _Exchange:
    """One request and its answer, and whatever must be said when something goes wrong in between."""

    def __init__(self, house: House, request_id: str, send: Send, arrived: float) -> None:
        self.house = house
        self.request_id = request_id
        """As the client knows it."""
        self.unique_id = secrets.token_hex(16)
        """As the workers know it: clients may repeat theirs."""
        self.arrived = arrived
        self._send = send
        self._reply: Reply | None = None

    @property
    def is_admitted(self) -> bool:
        return self._reply is not None

    def begin(self, plan: Plan, form: Format) -> Reply:
        kind = StreamReply if plan.stream else WholeReply
        self._reply = kind(
            plan=plan,
            tokenizer=self.house.tokenizer,
            form=form,
            model=self.house.config.model_name,
            request_id=self.request_id,
            unique_id=self.unique_id,
            send=self._send,
            metrics=self.house.metrics,
            arrived=self.arrived,
        )
        return self._reply

    async def fail(self, error: ApiError) -> None:
        """Tell the client, unless it does not read."""
        try:
            async with asyncio.timeout(LAST_WORDS_S):
                if self._reply is None:
                    await send_error(self._send, error, [("x-request-id", self.request_id)])
                else:
                    await self._reply.fail(error)
        except TimeoutError:
            logger.info("the client of request %s does not read its error", self.request_id)
