"""The gateway: two ASGI applications over one live set of workers.

    gateway = Gateway(config)
    await gateway.start()                     # loads the tokenizer, looks for the index
    gateway.workers.add(address)              # and `remove`, whenever the supervisor knows better
    await gateway.wait_ready()
    ... serve gateway.app on the public port, gateway.admin_app on the admin port ...
    await gateway.stop(drain_s=30)            # new requests: 503; running ones: finished, or ended with an error event

The applications may be served before `start`: they answer 503 until then.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp

from tandem.router import health
from tandem.router.admission import Admission, Gate
from tandem.router.auth import KeyCheck
from tandem.router.config import GatewayConfig
from tandem.router.dispatch import Dispatcher
from tandem.router.errors import ApiError, internal_error, nobody_left, shutting_down
from tandem.router.grammar_check import GrammarChecker
from tandem.router.http import request_id
from tandem.router.index.reader import IndexReader
from tandem.router.journey import JourneyLog
from tandem.router.metrics import RouterMetrics
from tandem.router.openai.endpoint import LAST_WORDS_S, House
from tandem.router.responses.store import ResponseStore
from tandem.router.routes import public_routes
from tandem.router.tokenizer import Tokenizer
from tandem.router.workers import WorkerSet
from tandem.workers.errors import UserError
from tandem.workers.native_keys import chain_of_keys
from tandem.workers.pooling import read_pooling
from tandem.workers.types import WorkerSnapshot

logger = logging.getLogger(__name__)


class Gateway:
    """See the module. Everything happens on the event loop that calls `start`."""

    def __init__(self, config: GatewayConfig) -> None:
        self.config = config
        self.metrics = RouterMetrics(self._snapshots)
        if config.redis_url is not None:
            self.metrics.add_prefix_index(lambda: float(bool(self.is_index_up)))
        self.workers = WorkerSet(
            key=config.cluster_key,
            peer="gateway",
            heartbeat_s=config.heartbeat_s,
            max_missed_heartbeats=config.max_missed_heartbeats,
            on_snapshot=self.metrics.observe_snapshot,
        )
        self.admission = Admission(config.max_in_flight, config.max_in_flight_tokens)
        self.gate = Gate(config.slo_ttft_s, config.slo_itl_s, config.max_queue)
        self.metrics.held_back.set_function(lambda: float(self.gate.num_waiting))
        self.index: IndexReader | None = None
        self._responses = ResponseStore()
        self.app: ASGIApp = KeyCheck(self._public_app(), config.api_keys)
        self.admin_app: ASGIApp = self._admin_app()
        self.journeys = JourneyLog()
        self.degraded: Callable[[], list[str]] = list
        """What is missing that requests do not need, as the launcher knows it."""
        self._house: House | None = None
        self._grammars: GrammarChecker | None = None

    async def start(self) -> None:
        """Raises `ModelError` when the tokenizer's files cannot be used."""
        tokenizer = await asyncio.to_thread(self._load_tokenizer)
        if self.config.redis_url is not None:
            self.index = IndexReader(
                self.config.redis_url, namespace=self.config.index_namespace, budget_s=self.config.index_budget_s
            )
            await self.index.start()
            if self.config.share_responses:
                self._responses.share(
                    self.config.redis_url, namespace=self.config.index_namespace, cluster_key=self.config.cluster_key
                )
        dispatcher = Dispatcher(self.config, self.workers, self.index, self.metrics)
        dispatcher.on_room = self.gate.notify
        closing: asyncio.Future[ApiError] = asyncio.get_running_loop().create_future()
        self._grammars = GrammarChecker(self.config.tokenizer_folder, tokenizer.vocab_size, tokenizer.eos_token_ids)
        self._house = House(
            config=self.config,
            tokenizer=tokenizer,
            dispatcher=dispatcher,
            admission=self.admission,
            gate=self.gate,
            metrics=self.metrics,
            closing=closing,
            grammars=self._grammars,
            journeys=self.journeys,
            pooling=read_pooling(self.config.tokenizer_folder),
        )

    def _load_tokenizer(self) -> Tokenizer:
        chain_of_keys()  # compiled now, not when the first prompt comes
        return Tokenizer(
            self.config.tokenizer_folder,
            chat_template=self.config.chat_template,
            tool_call_parser=self.config.tool_call_parser,
            reasoning_parser=self.config.reasoning_parser,
        )

    async def wait_ready(self) -> None:
        """Until every worker that the cluster was started with is alive and paired. Raises `UserError` if some compute
        something else than the others."""
        while not health.is_complete(self.config, self.workers):
            if refusals := health.refusals(self.workers):
                raise UserError(refusals[0])
            await self.workers.wait_changed()

    def watch_control_plane(
        self, missing: Callable[[], list[str]], is_draining: Callable[[], bool] = lambda: False
    ) -> None:
        """Tell of it in /ready, /cluster and metrics. `missing` is empty while all is there; `is_draining` once whoever
        keeps the workers is about to stop them: what runs may end, and nothing new is begun."""
        self.degraded = missing
        self.admission.is_cluster_draining = is_draining
        self.metrics.add_control_plane(lambda: float(not missing()))

    async def drain(self, drain_s: float) -> None:
        """Take nothing new on, give what runs `drain_s` to finish, end the rest with an error."""
        self.admission.close_door()
        await self.admission.until_empty(drain_s)
        if self._house is not None and not self._house.closing.done():
            self._house.closing.set_result(shutting_down())
            await self.admission.until_empty(LAST_WORDS_S)

    async def stop(self, drain_s: float = 0.0) -> None:
        """Drain, and leave the workers."""
        await self.drain(drain_s)
        if self._grammars is not None:
            await self._grammars.close()
        await self.workers.close()
        await self._responses.stop()
        if self.index is not None:
            await self.index.stop()

    def shortcomings(self) -> list[str]:
        """What is not as it should be although requests are served."""
        return [*self.degraded(), *health.refusals(self.workers)]

    def _open_house(self) -> House:
        if self._house is None:
            raise nobody_left("The server is starting. Please try again.")
        return self._house

    def _snapshots(self) -> list[WorkerSnapshot]:
        return [link.snapshot for link in self.workers.ready() if link.snapshot is not None]

    @property
    def is_index_up(self) -> bool | None:
        """None where there is no index to be up."""
        if self.config.redis_url is None:
            return None
        return self.index is not None and self.index.is_up

    # Applications

    def _public_app(self) -> FastAPI:
        app = _bare_app()
        app.router.routes += public_routes(self._open_house, self._responses, int(time.time()))
        self._add_health(app)
        return app

    def _admin_app(self) -> FastAPI:
        app = _bare_app()

        @app.get("/metrics")
        async def metrics() -> Response:
            return Response(self.metrics.render(), media_type="text/plain; version=0.0.4; charset=utf-8")

        @app.get("/cluster")
        async def cluster() -> Response:
            described = health.describe_cluster(self.config, self.workers, redis_up=self.is_index_up)
            return JSONResponse(described | {"degraded": self.shortcomings(), "draining": self.admission.is_draining})

        @app.get("/trace/{request_id}")
        async def trace(request_id: str) -> Response:
            journey = self.journeys.find(request_id)
            if journey is None:
                return JSONResponse({"error": "no such request, or it was long ago"}, 404)
            return JSONResponse(journey.described())

        self._add_health(app)
        return app

    def _add_health(self, app: FastAPI) -> None:
        @app.get("/live")
        async def live() -> Response:
            return JSONResponse({"status": "live"})

        @app.get("/health")
        async def healthy() -> Response:
            if self._house is not None and health.can_serve(self.workers):
                return JSONResponse({"status": "healthy"})
            return JSONResponse({"status": "unhealthy", "reasons": ["no worker that decodes is alive"]}, 503)

        @app.get("/ready")
        async def ready() -> Response:
            reasons = health.missing_parts(self.config, self.workers, is_draining=self.admission.is_draining)
            if self._house is None:
                reasons.append("the tokenizer is being loaded")
            if reasons:
                return JSONResponse({"status": "not ready", "reasons": reasons}, 503)
            if degraded := self.shortcomings():  # 200: requests are served, and a balancer must not turn them away
                return JSONResponse({"status": "degraded", "reasons": degraded})
            return JSONResponse({"status": "ready"})


def _bare_app() -> FastAPI:
    """FastAPI without its documentation pages, and with errors in the OpenAI shape."""
    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None, redirect_slashes=False)

    async def on_api_error(request: Request, error: Exception) -> Response:
        assert isinstance(error, ApiError)
        headers = dict(error.headers) | {"x-request-id": request_id(request.scope)}
        return JSONResponse(error.body(), error.status, headers=headers)

    async def on_http_error(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        message = {404: "There is nothing at this URL.", 405: "This URL does not take this method."}
        known = ApiError(
            error.status_code,
            message.get(error.status_code, str(error.detail)),
            code={404: "not_found", 405: "method_not_allowed"}.get(error.status_code),
            headers=tuple((error.headers or {}).items()),
        )
        return await on_api_error(request, known)

    async def on_bug(request: Request, error: Exception) -> Response:
        return await on_api_error(request, internal_error())

    app.add_exception_handler(ApiError, on_api_error)
    app.add_exception_handler(HTTPException, on_http_error)
    app.add_exception_handler(Exception, on_bug)
    return app
