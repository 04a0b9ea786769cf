"""One endpoint that asks workers, as an ASGI application: from the request's bytes to the last byte of its answer.

Every request ends in exactly one way, and is counted as that: ok, rejected (never taken on), failed, or cancelled (the
client hung up). It may be ended early by three things, all watched from the first moment on: the client's leaving, the
deadline, and the gateway's own end.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from starlette.types import Receive, Scope, Send

from tandem.router.admission import Admission, Gate
from tandem.router.config import GatewayConfig
from tandem.router.direct_write import direct_writer
from tandem.router.dispatch import Dispatcher, Generation, enter_together, run_all
from tandem.router.errors import (
    MAX_PARAM_CHARACTERS,
    ApiError,
    Cancelled,
    ClientDisconnected,
    bad_request,
    internal_error,
    shortened,
    too_slow,
)
from tandem.router.form import Form, Naming
from tandem.router.grammar_check import GrammarChecker
from tandem.router.http import caller, check_json, header, read_body, request_id, send_error, until_disconnect
from tandem.router.journey import JourneyLog, mark, trace_headers
from tandem.router.metrics import Outcome, RouterMetrics
from tandem.router.plan import Plan
from tandem.router.rendezvous import key_of
from tandem.router.reply import PromptSink, Reply, StreamReply, WholeReply
from tandem.router.tenants import cache_salt
from tandem.router.tokenizer import Tokenizer
from tandem.workers.pooling import Pooling

logger = logging.getLogger(__name__)

LAST_WORDS_S = 5.0
"""How long a client may take to read that its request has failed."""
MAX_PROMPT_LOGPROBS = 1 << 21
"""Of all choices of an answer; some 50 bytes each."""
LARGE_BODY_BYTES = 16 << 10
"""Bodies from here on are parsed and tokenised in a thread, so that they do not hold up everybody's streams."""

Result = TypeVar("Result")


class Asked(Protocol):
    """A request of one endpoint, parsed and valid in itself."""

    @property
    def model(self) -> str: ...

    def plan(self, tokenizer: Tokenizer, config: GatewayConfig) -> Plan:
        """What it comes down to. Slow for long prompts. Raises `ApiError`."""

    def form(self, plan: Plan, tokenizer: Tokenizer, naming: Naming) -> Form:
        """The shape of its answer."""


def openai_error(error: ApiError) -> Mapping[str, Any]:
    return error.body()


@dataclass(frozen=True, slots=True, kw_only=True)
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
    grammars: GrammarChecker
    journeys: JourneyLog
    pooling: Pooling
    """What the model's files say of its embeddings."""


class Endpoint:
    """The life of a request, whatever is asked. `error_body`: the endpoint's shape of errors."""

    def __init__(
        self, house: Callable[[], House], error_body: Callable[[ApiError], Mapping[str, Any]] = openai_error
    ) -> None:
        self._house = house
        self._error_body = error_body

    async def _answer(self, exchange: Exchange, body: bytes) -> None:
        """All of it, to the last byte. Raises `ApiError`."""
        raise NotImplementedError

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        house = self._house()
        arrived = time.perf_counter()
        house.metrics.started.inc()
        exchange = Exchange(house, scope, send, arrived, self._error_body)
        outcome: Outcome = "cancelled"
        trace = [(header(scope, name) or b"").decode("latin-1") for name in (b"traceparent", b"tracestate")]
        with house.journeys.following(exchange.request_id, scope["path"], *trace) as journey:
            try:
                with house.admission.open_door():
                    outcome = await self._serve(exchange, scope, receive)
            finally:
                journey.outcome = outcome
                house.metrics.requests.labels(outcome).inc()
                house.metrics.request_duration.observe(time.perf_counter() - arrived)

    async def _serve(self, exchange: Exchange, scope: Scope, receive: Receive) -> Outcome:
        config = exchange.house.config
        try:
            check_json(scope)
            body = await read_body(scope, receive, max_bytes=config.max_body_bytes, timeout_s=config.body_timeout_s)
            await self._watched(exchange, body, receive)
        except ClientDisconnected:
            exchange.leave()
            return "cancelled"
        except Cancelled as error:
            await exchange.fail(error)
            return "cancelled"
        except ApiError as error:
            await exchange.fail(error)
            return "rejected" if error.status < 500 or not exchange.is_admitted else "failed"
        except Exception:
            logger.exception("request %s met a bug", exchange.request_id)
            await exchange.fail(internal_error())
            return "failed"
        return "ok"

    async def _watched(self, exchange: Exchange, body: bytes, receive: Receive) -> None:
        """Answer, unless the client leaves, time runs out or the gateway closes: whichever comes first."""
        closing = exchange.house.closing
        work = asyncio.create_task(self._answer(exchange, body), name=f"request {exchange.request_id}")
        gone = asyncio.create_task(until_disconnect(receive))
        try:
            ends: set[asyncio.Future[Any]] = {work, gone, closing, exchange.cancelled}
            await asyncio.wait(
                ends,
                timeout=exchange.house.config.request_timeout_s,
                return_when=asyncio.FIRST_COMPLETED,
            )
            if work.done():
                await work
            elif gone.done():
                raise ClientDisconnected
            elif exchange.cancelled.done():
                raise Cancelled
            elif closing.done():
                raise closing.result()
            else:
                raise too_slow()
        finally:
            work.cancel()
            gone.cancel()
            await asyncio.gather(work, gone, return_exceptions=True)


class GenerationEndpoint(Endpoint):
    """POST /v1/chat/completions and the like, by the functions it is given.

    `parse`: the body, and who sent it (`http.caller`), as a request.
    """

    def __init__(
        self,
        house: Callable[[], House],
        parse: Callable[[bytes, str], Asked],
        error_body: Callable[[ApiError], Mapping[str, Any]] = openai_error,
    ) -> None:
        super().__init__(house, error_body)
        self._parse = parse

    async def _answer(self, exchange: Exchange, body: bytes) -> None:
        house = exchange.house
        asked, plan = await in_a_thread_if_large(body, self._prepare, house, body, exchange.caller)
        await _check_grammar(house.grammars, plan)
        mark("prepared", num_prompts=len(plan.prompts), num_prompt_tokens=sum(map(len, plan.prompts)))
        salt = cache_salt(house.config.cluster_key, exchange.caller, plan.cache_salt)
        affinity = None if plan.cache_key is None else key_of(plan.cache_key, salt)
        with house.admission.admit(plan.num_sequences, sum(map(len, plan.prompts))):
            generations = [
                Generation(house.dispatcher, request, house.config.request_timeout_s, affinity)
                for request in plan.requests(exchange.unique_id, salt)
            ]
            try:
                if house.gate.has_limits:
                    await enter_together(generations, house.gate, exchange.arrived, plan.priority)
                reply = exchange.begin(asked, plan)
                await run_all(
                    [(generation, PromptSink(reply, position)) for position, generation in enumerate(generations)]
                )
                await reply.done()
            finally:
                for generation in generations:
                    generation.close()

    def _prepare(self, house: House, body: bytes, caller: str) -> tuple[Asked, Plan]:
        asked = self._parse(body, caller)
        check_model(asked.model, house.config)
        plan = asked.plan(house.tokenizer, house.config)
        if plan.num_sequences > house.config.max_num_choices:
            raise bad_request(
                f"A request may ask for at most {house.config.max_num_choices} choices in all.", param="n"
            )
        _check_scored(plan)
        return asked, plan


async def in_a_thread_if_large(body: bytes, work: Callable[..., Result], *given: Any) -> Result:
    """`work(*given)`, which reads this body: a large one beside the event loop."""
    return work(*given) if len(body) < LARGE_BODY_BYTES else await asyncio.to_thread(work, *given)


def _check_scored(plan: Plan) -> None:
    """Raises `ApiError` 400 for logprobs of prompts that would make an answer of hundreds of megabytes."""
    num_each = plan.sampling.num_prompt_logprobs
    if num_each is None:
        return
    num_scored = sum(map(len, plan.prompts)) * plan.num_choices * (num_each + 1)
    if num_scored > MAX_PROMPT_LOGPROBS:
        message = f"The answer would tell {num_scored} logprobs of prompts: at most {MAX_PROMPT_LOGPROBS} are told."
        raise bad_request(message, param="prompt_logprobs" if plan.shows_prompt_logprobs else "logprobs")


async def _check_grammar(grammars: GrammarChecker, plan: Plan) -> None:
    """Raises `ApiError`, one of status 400 naming the field that the grammar came from."""
    if plan.sampling.grammar is None:
        return
    try:
        await grammars.check(plan.sampling.grammar)
    except ApiError as error:
        if error.status != 400:
            raise
        message = f"Invalid value for '{plan.grammar_field}': {error.message}"
        raise bad_request(message, param=plan.grammar_field, code=error.code) from error


def check_model(model: str, config: GatewayConfig) -> None:
    """Raises `ApiError` 404 for a model that is not the one served here."""
    if model != config.model_name:
        shown = shortened(model, MAX_PARAM_CHARACTERS)
        raise ApiError(404, f"The model '{shown}' does not exist.", param="model", code="model_not_found")


class Exchange:
    """One request and its answer, and whatever must be said when something goes wrong in between."""

    def __init__(
        self,
        house: House,
        scope: Scope,
        send: Send,
        arrived: float,
        error_body: Callable[[ApiError], Mapping[str, Any]],
    ) -> None:
        self.house = house
        self.request_id = request_id(scope)
        """As the client knows it."""
        self.caller = caller(scope)
        self.unique_id = secrets.token_hex(16)
        """As the workers know it: clients may repeat theirs."""
        self.send = send
        self._writer = direct_writer(scope)
        if self._writer is not None:
            self._writer.patience_s = house.config.slow_reader_timeout_s
        self._error_body = error_body
        self.arrived = arrived
        self._reply: Reply | None = None
        self.is_admitted = False
        self.cancelled: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def _cancel(self) -> None:
        if not self.cancelled.done():
            self.cancelled.set_result(None)

    def begin(self, asked: Asked, plan: Plan) -> Reply:
        """From now on it is answered: errors are told by the reply."""
        house = self.house
        self.is_admitted = True
        naming = Naming(self.unique_id, house.config.model_name, int(time.time()), self._cancel)
        kind = StreamReply if plan.stream else WholeReply
        self._reply = kind(
            plan=plan,
            tokenizer=house.tokenizer,
            form=asked.form(plan, house.tokenizer, naming),
            error_body=self._error_body,
            request_id=self.request_id,
            send=self.send,
            writer=self._writer,
            metrics=house.metrics,
            arrived=self.arrived,
        )
        return self._reply

    def leave(self) -> None:
        """Nobody listens any more."""
        if self._reply is not None:
            self._reply.leave()

    async def fail(self, error: ApiError) -> None:
        """Tell the client, unless it does not read."""
        try:
            async with asyncio.timeout(LAST_WORDS_S):
                if self._reply is None:
                    headers = [("x-request-id", self.request_id), *trace_headers()]
                    await send_error(self.send, error, headers, body=self._error_body(error))
                else:
                    await self._reply.fail(error)
        except TimeoutError:
            logger.info("the client of request %s does not read its error", self.request_id)
