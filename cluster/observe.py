"""What is told about a gateway's requests, as configured: metrics under more names, a log line each, traces."""

from __future__ import annotations

import logging
from contextlib import AsyncExitStack

from tandem.cluster.config import ClusterConfig
from tandem.router.gateway import Gateway
from tandem.router.journey import Journey
from tandem.router.otlp import TraceExporter

logger = logging.getLogger("tandem.requests")


def observe(gateway: Gateway, config: ClusterConfig, stack: AsyncExitStack) -> None:
    """From now on, until the stack is left."""
    if config.metrics_compat == "vllm":
        gateway.metrics.add_usual_names(gateway.config.model_name)
    if config.log_format == "json":
        gateway.journeys.on_end.append(log_request)
    if config.otlp_endpoint is not None:
        exporter = TraceExporter(config.otlp_endpoint, gateway.config.model_name)
        gateway.journeys.is_tracing = True
        gateway.journeys.on_end.append(exporter.add)
        exporter.start()
        stack.push_async_callback(exporter.stop)


def log_request(journey: Journey) -> None:
    """One line when a request has ended; what was said in it, of either side, is in no log."""
    started, first_token = journey.first("started"), journey.first("first token")
    fields = {
        "request_id": journey.request_id,
        "trace_id": journey.trace_id,
        "path": journey.path,
        "outcome": journey.outcome,
        "duration_s": round(journey.duration_s, 4),
        "time_to_first_token_s": None if first_token is None else round(first_token.at_s, 4),
        "num_tokens": journey.num_tokens,
        "prefill": None if started is None else started.details["prefill"],
        "decode": None if started is None else started.details["decode"],
    }
    logger.info("request %s: %s", journey.request_id, journey.outcome, extra={"fields": fields})
