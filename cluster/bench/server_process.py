"""A `tandem serve` of our own for as long as a benchmark needs it: started, waited for, stopped."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
import sys
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass

import httpx

from tandem.workers.errors import UserError

START_TIMEOUT_S = 240.0
STOP_TIMEOUT_S = 20.0


@dataclass(frozen=True, slots=True)
class Serving:
    """A running server."""

    url: str
    admin_url: str
    pid: int


@contextlib.asynccontextmanager
async def serving(arguments: Sequence[str]) -> AsyncIterator[Serving]:
    """Run `tandem serve ARGUMENTS` on free ports. Raises `UserError` with its last line if it does not get ready."""
    port, admin_port = free_port(), free_port()
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-P",
        "-c",
        "from tandem.cluster.cli import main; main()",
        *("serve", *arguments, "--port", str(port), "--admin-port", str(admin_port)),
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.PIPE,
        start_new_session=True,  # Ctrl-C is for the benchmark, which then ends its server in its own time
    )
    assert process.stderr is not None
    last_lines = asyncio.create_task(_last_line(process.stderr))
    try:
        server = Serving(f"http://127.0.0.1:{port}", f"http://127.0.0.1:{admin_port}", process.pid)
        await _wait_ready(server, process, last_lines)
        yield server
    finally:
        if process.returncode is None:
            process.send_signal(signal.SIGTERM)
        try:
            async with asyncio.timeout(STOP_TIMEOUT_S):
                await process.wait()
        except TimeoutError:
            process.kill()
            await process.wait()
        await last_lines


async def _wait_ready(server: Serving, process: asyncio.subprocess.Process, last_lines: asyncio.Task[str]) -> None:
    try:
        async with httpx.AsyncClient(trust_env=False) as http, asyncio.timeout(START_TIMEOUT_S):
            while process.returncode is None:
                with contextlib.suppress(httpx.TransportError):
                    if (await http.get(f"{server.url}/ready")).status_code == 200:
                        return
                await asyncio.sleep(0.2)
    except TimeoutError as error:
        raise UserError(f"tandem serve was not ready after {START_TIMEOUT_S:.0f} s") from error
    raise UserError(f"tandem serve ended with exit code {process.returncode}: {await last_lines}")


async def _last_line(stream: asyncio.StreamReader) -> str:
    """Read to the end, so that the server never waits for us; keep the last line that says something."""
    last = ""
    async for line in stream:
        last = line.decode(errors="replace").strip() or last
    return last


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
