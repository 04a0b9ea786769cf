"""The parent's side of one gateway process: started, looked after, started again.

    absent -> starting -> ready -> (ended, or silent for too long: killed) -> absent ...

Its state is asked for every second, over its private socket, which also tells whether it still answers: one that hangs
would hold a share of all new connections for ever.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any, Literal
from urllib.parse import quote

import httpx
import msgspec

from tandem.cluster.backoff import Backoff
from tandem.cluster.gateway_child import STATE_PATH, ChildSettings
from tandem.cluster.guard import die_with_parent
from tandem.cluster.merged_metrics import Families

logger = logging.getLogger(__name__)

LOOK_S = 0.05
ASK_S = 1.0
ANSWER_TIMEOUT_S = 2.0
LOOK_TIMEOUT_S = 0.5
"""Somebody waits for /cluster."""
MAX_SILENCE_S = 15.0
"""Loading a tokenizer is done in a thread: a gateway that answers nobody for so long will answer nobody."""
START_TIMEOUT_S = 120.0
"""Until it answers for the first time: imports take seconds, and far longer on a machine that is busy."""

_decoder = msgspec.msgpack.Decoder(Families)


class GatewayProcess:
    """Call `run` once: it goes on until it is cancelled. Then `terminate` and `close` end what is there."""

    def __init__(self, number: int, settings: ChildSettings, on_end: Callable[[Families], None]) -> None:
        self.number = number
        self.latest: Families = []
        """What it has counted, as far as is known."""
        self.num_ends = 0
        """How often it has ended since this object was made."""
        self.last_end = ""
        self.is_ready = False
        """It has been ready, and takes its share of the connections."""
        self.max_silence_s = MAX_SILENCE_S
        self._settings = settings
        self._on_end = on_end
        self._process: subprocess.Popen[bytes] | None = None
        self._is_useful = True
        """It was ready when it was looked at last."""
        self._heard_at = 0.0
        self._has_answered = False
        transport = httpx.AsyncHTTPTransport(uds=settings.socket_path)
        self._client = httpx.AsyncClient(transport=transport, base_url="http://gateway")

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    @property
    def exit_code(self) -> int | None:
        """Of the process that was last there; negative: the signal that killed it."""
        return None if self._process is None else self._process.poll()

    @property
    def is_alive(self) -> bool:
        return self._process is not None and self._process.poll() is None

    @property
    def state(self) -> Literal["ready", "unready", "starting", "ended"]:
        """As `look` has found it. `unready`: it serves, and misses workers, or does not answer."""
        if not self.is_alive:
            return "ended"
        if not self.is_ready:
            return "starting"
        return "ready" if self._is_useful else "unready"

    async def look(self) -> None:
        """Ask whether it is ready at this moment."""
        if self.is_alive and self.is_ready:
            answer = await self._get("/ready", timeout_s=LOOK_TIMEOUT_S)
            self._is_useful = answer is not None and answer.status_code == 200

    async def run(self) -> None:
        """For ever: start it, wait for its end, start the next one."""
        backoff = Backoff()
        while True:
            born = time.monotonic()
            self._bury(await self._live())
            backoff.note_life(time.monotonic() - born)
            next_s = backoff.pause_s
            logger.warning("gateway %d has ended: %s; starting it again in %.1f s", self.number, self.last_end, next_s)
            await backoff.pause()

    async def _live(self) -> str:
        """From its start to its end; returns how that was."""
        try:
            self._spawn()
        except OSError as error:  # no memory, or as many processes as there may be
            return f"it cannot be started: {error}"
        await asyncio.to_thread(self._tell_settings)
        await self._watch()
        code = self.exit_code or 0
        return f"exit code {code}" if code >= 0 else f"killed by {signal.Signals(-code).name}"

    async def refresh(self) -> None:
        """Ask what it has counted; what it said last stays known when it does not answer."""
        answer = await self._get(STATE_PATH)
        if answer is not None and answer.status_code == 200:
            self.latest = _decoder.decode(answer.content)

    async def find_trace(self, request_id: str) -> Any | None:
        """The journey of a request, if this process knows it."""
        answer = await self._get(f"/trace/{quote(request_id, safe='')}")
        return answer.json() if answer is not None and answer.status_code == 200 else None

    def terminate(self) -> None:
        """It may finish what runs."""
        if self.is_alive and self._process is not None:
            self._process.send_signal(signal.SIGTERM)

    async def wait_ended(self) -> None:
        while self.is_alive:  # noqa: ASYNC110  processes do not notify
            await asyncio.sleep(LOOK_S)

    async def close(self) -> None:
        """Kill what is left, and hear no more of it. Call `terminate` and `wait_ended` before, for a clean end."""
        if self._process is not None:
            self._process.kill()
            await asyncio.to_thread(self._process.wait)
        await self._client.aclose()

    def _spawn(self) -> None:
        # in a session of its own: Ctrl-C is for the parent, which then lets this one drain
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "tandem.cluster.gateway_child"],
            stdin=subprocess.PIPE,
            start_new_session=True,
            preexec_fn=die_with_parent,
        )
        self._heard_at = time.monotonic()
        self._has_answered = False

    def _tell_settings(self) -> None:
        """In a thread: there may be more than a pipe holds. (To start it is for the main thread: it dies with that.)"""
        assert self._process is not None
        assert self._process.stdin is not None
        try:
            with self._process.stdin as pipe:
                pipe.write(self._settings.encode() + b"\n")
        except BrokenPipeError:
            logger.debug("gateway %d ended before it was told anything", self.number)

    async def _watch(self) -> None:
        """Returns when it has ended."""
        asked_at = 0.0
        while self.is_alive:
            now = time.monotonic()
            if now - asked_at >= (ASK_S if self.is_ready else 2 * LOOK_S):
                asked_at = now
                await self._ask()
            limit_s = self.max_silence_s if self._has_answered else START_TIMEOUT_S
            if time.monotonic() - self._heard_at > limit_s and self._process is not None:
                logger.error("gateway %d does not answer and is killed", self.number)
                self._process.kill()
            await asyncio.sleep(LOOK_S)

    async def _ask(self) -> None:
        if self.is_ready:
            await self.refresh()
            return
        answer = await self._get("/ready")
        if answer is not None and answer.status_code == 200:
            self.is_ready = True
            if self.num_ends:
                logger.warning("gateway %d is back, process %d", self.number, self.pid or 0)

    async def _get(self, path: str, *, timeout_s: float = ANSWER_TIMEOUT_S) -> httpx.Response | None:
        try:
            answer = await self._client.get(path, timeout=timeout_s)
        except httpx.HTTPError as error:
            logger.debug("gateway %d does not answer: %s", self.number, type(error).__name__)
            return None
        self._heard_at = time.monotonic()
        self._has_answered = True
        return answer

    def _bury(self, how: str) -> None:
        self.last_end = how
        self.num_ends += 1
        self.is_ready = False
        latest, self.latest = self.latest, []
        self._on_end(latest)
