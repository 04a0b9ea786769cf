"""`tandem bench serve`: put a server under load and report what its clients would have felt.

    arrivals (Poisson, trace, closed loop) -> prompts -> one streamed request each -> records -> summary

Works against any OpenAI-compatible server. Open loop (rate, trace): requests are sent at their time whatever the server
does, so that waiting is seen. Closed loop (concurrency): the next is sent when one has ended.
"""

from __future__ import annotations

import asyncio
import secrets
import signal
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, Protocol

import httpx

from tandem.cluster.bench.arrivals import Arrival, bounded, poisson, read_trace, steady
from tandem.cluster.bench.client import Answer, Api, OpenAIClient, first_model, scrape_histogram
from tandem.cluster.bench.prompts import Content, Conversation, PromptMaker
from tandem.cluster.bench.reuse import SeenPrefixes, reusable_share
from tandem.cluster.bench.statistics import Percentiles, RequestRecord, Summary, summarise
from tandem.workers.errors import UserError

HANDOVER_METRIC = "tandem_handover_seconds"


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeOptions:
    """What to send. Exactly one of `rate`, `trace` and `concurrency` is set. Times in seconds, lengths in tokens."""

    url: str
    model: str | None = None
    api: Api = "completions"
    api_key: str | None = None
    admin_url: str | None = None
    rate: float | None = None
    trace: Path | None = None
    concurrency: int | None = None
    time_scale: float = 1.0
    length_scale: float = 1.0
    duration_s: float = 60.0
    max_requests: int | None = None
    input_len: int = 512
    input_len_spread: int = 0
    output_len: int = 64
    shared_prefix_len: int = 0
    num_shared_prefixes: int = 1
    """Every prompt begins with one of so many, drawn at random."""
    num_turns: int = 1
    """Requests of one conversation, one after another: each begins with the one before and its answer."""
    turn_input_len: int = 64
    """What every turn after the first adds to its conversation."""
    num_tokens: int | None = None
    seed: int = field(default_factory=lambda: secrets.randbelow(1 << 31))
    """Fresh by default, so that no run finds its prompts in the server's cache."""
    ignore_eos: bool = True
    temperature: float = 0.0
    num_warm_up: int = 1
    request_timeout_s: float = 300.0
    slo_ttft_s: float = 1.0
    slo_itl_s: float = 0.1

    def __post_init__(self) -> None:
        if sum(value is not None for value in (self.rate, self.trace, self.concurrency)) != 1:
            raise UserError("choose one of --rate, --trace and --concurrency")
        if self.api == "chat" and self.num_tokens is not None:
            raise UserError("--tokens needs --api completions: chat messages are text")
        counts = ("concurrency", "num_shared_prefixes", "num_turns", "turn_input_len", "max_requests", "output_len")
        for name in (*counts, "rate", "time_scale", "length_scale", "duration_s"):
            value = getattr(self, name)
            if value is not None and not 0 < value < float("inf"):
                option = name.removesuffix("_s").removeprefix("num_").replace("_", "-")
                raise UserError(f"--{option} must be positive, but is {value}")
        if not 0 <= self.input_len_spread < self.input_len:
            raise UserError("--input-len-spread must be at least 0 and less than --input-len")
        if not 0 <= self.shared_prefix_len < self.input_len:
            raise UserError("--shared-prefix-len must be at least 0 and less than --input-len")
        if self.num_tokens is not None and self.num_tokens < 8:
            raise UserError("--tokens must be at least 8")

    def arrivals(self) -> Iterator[Arrival]:
        shape = (self.seed, self.input_len, self.input_len_spread, self.output_len)
        if self.trace is not None:
            every = iter(read_trace(self.trace, time_scale=self.time_scale, length_scale=self.length_scale))
        elif self.rate is not None:
            every = poisson(self.rate, *shape)
        else:
            every = steady(*shape)
        return bounded(every, self.duration_s, self.max_requests)


@dataclass(frozen=True, slots=True)
class ServeReport:
    """All that was measured, request by request, and what follows from it."""

    options: ServeOptions
    model: str
    records: tuple[RequestRecord, ...]
    summary: Summary
    handover: Percentiles | None
    """From the server's own histogram; None without --admin-url, or when there was no handover."""
    was_interrupted: bool


class ProgressSink(Protocol):
    """Who is told how it goes."""

    def started(self, total: int | None) -> None: ...

    def sent(self) -> None: ...

    def ended(self, record: RequestRecord) -> None: ...


class Silent:
    """A `ProgressSink` that says nothing."""

    def started(self, total: int | None) -> None:
        pass

    def sent(self) -> None:
        pass

    def ended(self, record: RequestRecord) -> None:
        pass


async def bench_serve(options: ServeOptions, progress: ProgressSink | None = None) -> ServeReport:
    """Run the load to its end, or to Ctrl-C, and report. Failed requests are counted; only what makes the whole run
    pointless (nobody answers, an unreadable trace) raises `UserError`."""
    progress = progress or Silent()
    headers = {"Authorization": f"Bearer {options.api_key}"} if options.api_key else {}
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    timeout = httpx.Timeout(None, connect=10.0)
    async with httpx.AsyncClient(base_url=options.url, headers=headers, limits=limits, timeout=timeout) as http:
        model = options.model or await first_model(http)
        await _warm_up(options, http, model)
        before = await _handover(options)
        load = _Load(options, http, model, progress)
        await load.run()
        after = await _handover(options)
    records = tuple(sorted(load.records, key=lambda record: record.number))
    return ServeReport(
        options=options,
        model=model,
        records=records,
        summary=summarise(records, slo_ttft_s=options.slo_ttft_s, slo_itl_s=options.slo_itl_s),
        handover=after.since(before).percentiles() if after else None,
        was_interrupted=load.was_interrupted,
    )


class _Load:
    """The measured part of a run."""

    def __init__(self, options: ServeOptions, http: httpx.AsyncClient, model: str, progress: ProgressSink) -> None:
        self._options = options
        self._progress = progress
        self._prompts = _prompt_maker(options)
        self._seen = SeenPrefixes()
        self._start = time.perf_counter()
        self._client = _client(options, http, model, self._start)
        self._interrupted = asyncio.Event()
        self.records: list[RequestRecord] = []

    @property
    def was_interrupted(self) -> bool:
        return self._interrupted.is_set()

    async def run(self) -> None:
        loop = asyncio.get_running_loop()
        sending = asyncio.ensure_future(self._closed_loop() if self._options.concurrency else self._open_loop())
        interrupted = asyncio.ensure_future(self._interrupted.wait())
        # Handled once: a second Ctrl-C ends the program as usual.
        loop.add_signal_handler(signal.SIGINT, self._interrupt)
        try:
            await asyncio.wait([sending, interrupted], return_when=asyncio.FIRST_COMPLETED)
        finally:
            loop.remove_signal_handler(signal.SIGINT)
            interrupted.cancel()
            sending.cancel()
            results = await asyncio.gather(sending, interrupted, return_exceptions=True)
        if isinstance(results[0], Exception):
            raise results[0]

    def _interrupt(self) -> None:
        self._interrupted.set()
        asyncio.get_running_loop().remove_signal_handler(signal.SIGINT)

    async def _open_loop(self) -> None:
        arrivals = list(self._options.arrivals())
        self._progress.started(len(arrivals) * self._options.num_turns)
        # Made beforehand: drawing a long prompt takes milliseconds, which would delay others.
        prompts = [self._prompts.prompt(number, arrival) for number, arrival in enumerate(arrivals)]
        self._restart_clock()
        tasks: list[asyncio.Task[None]] = []
        try:
            for number, (arrival, prompt) in enumerate(zip(arrivals, prompts, strict=True)):
                await asyncio.sleep(max(0.0, arrival.at_s - self._elapsed_s()))
                tasks.append(asyncio.ensure_future(self._converse(number, arrival.at_s, arrival, prompt)))
            await asyncio.gather(*tasks)
        finally:
            await _cancel_all(tasks)

    async def _closed_loop(self) -> None:
        assert self._options.concurrency is not None
        max_requests = self._options.max_requests
        self._progress.started(max_requests and max_requests * self._options.num_turns)
        numbered = enumerate(self._options.arrivals())
        self._restart_clock()

        async def one_after_another() -> None:
            for number, arrival in numbered:
                if self._elapsed_s() >= self._options.duration_s:
                    return
                prompt = self._prompts.prompt(number, arrival)
                await self._converse(number, self._elapsed_s(), arrival, prompt)

        tasks = [asyncio.ensure_future(one_after_another()) for _ in range(self._options.concurrency)]
        try:
            await asyncio.gather(*tasks)
        finally:
            await _cancel_all(tasks)

    async def _converse(self, number: int, scheduled_s: float, arrival: Arrival, content: Content) -> None:
        """One request, or the turns of a conversation, which ends early when one of them fails."""
        conversation = Conversation(content, is_chat=self._options.api == "chat")
        num_turns = self._options.num_turns
        for turn in range(num_turns):
            if turn > 0:
                conversation.ask(self._prompts.turn(number, turn, self._options.turn_input_len))
                scheduled_s = self._elapsed_s()
            answer = await self._send(number * num_turns + turn, turn, scheduled_s, arrival.output_len, conversation)
            if answer is None:
                return
            conversation.answer(answer)
            if turn + 1 < num_turns:
                self._seen.add(conversation.symbols())

    async def _send(
        self, number: int, turn: int, scheduled_s: float, output_len: int, conversation: Conversation
    ) -> Answer | None:
        self._progress.sent()
        symbols = conversation.symbols()
        reusable = reusable_share(self._seen.add(symbols), len(symbols))
        record, answer = await self._client.measure(
            number, scheduled_s, conversation.prompt, output_len, turn=turn, reusable=reusable
        )
        self.records.append(record)
        self._progress.ended(record)
        if record.error == "interrupted":
            raise asyncio.CancelledError
        return answer if record.error is None else None

    def _restart_clock(self) -> None:
        self._start = time.perf_counter()
        self._client.restart_clock(self._start)

    def _elapsed_s(self) -> float:
        return time.perf_counter() - self._start


async def _cancel_all(tasks: Sequence[asyncio.Task[None]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def _warm_up(options: ServeOptions, http: httpx.AsyncClient, model: str) -> None:
    """A few requests, one after another, that are not counted. A server that fails them shows in the measured ones."""
    client = _client(options, http, model, time.perf_counter())
    prompts = _prompt_maker(options)
    for number, arrival in enumerate(islice(options.arrivals(), options.num_warm_up)):
        await client.measure(number, 0.0, prompts.warm_up_prompt(number, arrival), arrival.output_len)


def _prompt_maker(options: ServeOptions) -> PromptMaker:
    return PromptMaker(
        options.seed,
        num_tokens=options.num_tokens,
        shared_prefix_len=options.shared_prefix_len,
        num_shared_prefixes=options.num_shared_prefixes,
    )


def _client(options: ServeOptions, http: httpx.AsyncClient, model: str, start: float) -> OpenAIClient:
    extra: dict[str, Any] = {"temperature": options.temperature}
    if options.ignore_eos:
        extra["ignore_eos"] = True
    if options.num_turns > 1 and options.num_tokens is not None:
        extra["return_token_ids"] = True
    return OpenAIClient(
        http, api=options.api, model=model, extra=extra, timeout_s=options.request_timeout_s, start=start
    )


async def _handover(options: ServeOptions) -> Any:
    return None if options.admin_url is None else await scrape_histogram(options.admin_url, HANDOVER_METRIC)
