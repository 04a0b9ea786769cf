"""Tries grammars in child processes before a worker gets them: what a text costs, it costs there.

check(text) ─ tried before? ─> the same answer
            └ a free helper ──> one line each way, 5 s at most; a helper that takes longer is killed and replaced
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import sys
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path

from tandem.router.errors import bad_request, too_many
from tandem.workers.grammar import MAX_GRAMMAR_CHARS

logger = logging.getLogger(__name__)

TIMEOUT_S = 5.0
START_TIMEOUT_S = 60.0
NUM_HELPERS = 2
MAX_WAITING = 64
MAX_CACHED = 4096
_LINE_BYTES = 1 << 20
_TOO_SLOW = "the grammar takes too long to compile"
_TOO_MUCH = "the grammar is too complex"


class GrammarChecker:
    """For one model. Helpers start when the first grammar comes. Everything happens on one event loop."""

    def __init__(
        self, folder: Path, vocab_size: int, eos_token_ids: Sequence[int], *, timeout_s: float = TIMEOUT_S
    ) -> None:
        self._arguments = (str(folder), str(vocab_size), ",".join(map(str, eos_token_ids)))
        self._timeout_s = timeout_s
        self._idle: list[_Helper] = []
        self._helpers: set[_Helper] = set()
        self._free = asyncio.Semaphore(NUM_HELPERS)
        self._running: dict[bytes, asyncio.Task[None]] = {}
        self._known: OrderedDict[bytes, str | None] = OrderedDict()
        """Digest of a text -> what is wrong with it."""

    async def check(self, text: str) -> None:
        """Raises `ApiError`: 400 for a text that is no grammar, or too much of one; 429 when too many are tried."""
        if len(text) > MAX_GRAMMAR_CHARS:
            raise bad_request(f"The grammar is longer than {MAX_GRAMMAR_CHARS} characters.", param="grammar")
        key = hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).digest()
        if key not in self._known:
            if key not in self._running:
                if len(self._running) >= MAX_WAITING:
                    raise too_many("Too many grammars are being compiled. Please try again.")
                self._running[key] = asyncio.create_task(self._try(key, text), name="try a grammar")
            await asyncio.shield(self._running[key])
        self._known.move_to_end(key)
        error = self._known[key]
        if error is not None:
            raise bad_request(f"{error[:1].upper()}{error[1:]}.", param="grammar", code="invalid_grammar")

    async def close(self) -> None:
        """End all helpers, and whatever they try."""
        tasks = list(self._running.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for helper in list(self._helpers):
            await self._end(helper)

    async def _try(self, key: bytes, text: str) -> None:
        try:
            async with self._free:
                error = await self._ask(text)
            self._known[key] = error
            while len(self._known) > MAX_CACHED:
                self._known.popitem(last=False)
        finally:
            del self._running[key]

    async def _ask(self, text: str) -> str | None:
        helper = self._idle.pop() if self._idle else await self._start()
        try:
            async with asyncio.timeout(self._timeout_s):
                error = await helper.ask(text)
        except TimeoutError:
            logger.warning("a grammar took longer than %.0f s: its helper is replaced", self._timeout_s)
            await self._end(helper)
            return _TOO_SLOW
        except (EOFError, OSError):
            logger.warning("a helper died of a grammar")
            await self._end(helper)
            return _TOO_MUCH
        except BaseException:  # cancelled: its answer would be taken for the next one's
            await self._end(helper)
            raise
        self._idle.append(helper)
        return error

    async def _start(self) -> _Helper:
        helper = _Helper(
            await asyncio.create_subprocess_exec(
                *(sys.executable, "-P", "-m", "tandem.router.grammar_helper", *self._arguments),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                limit=_LINE_BYTES,
                start_new_session=True,  # Ctrl-C is for the gateway, which then ends its helpers
            )
        )
        self._helpers.add(helper)
        try:
            async with asyncio.timeout(START_TIMEOUT_S):
                await helper.read()
        except BaseException:
            await self._end(helper)
            raise
        return helper

    async def _end(self, helper: _Helper) -> None:
        self._helpers.discard(helper)
        await helper.kill()


class _Helper:
    """One child process."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    async def ask(self, text: str) -> str | None:
        """What is wrong with this text. Raises `EOFError` or `OSError` when the process is gone."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"text": text}).encode() + b"\n")
        await self._process.stdin.drain()
        error = (await self.read())["error"]
        return None if error is None else str(error)

    async def read(self) -> dict[str, object]:
        assert self._process.stdout is not None
        line = await self._process.stdout.readline()
        if not line.endswith(b"\n"):
            raise EOFError("the helper is gone")
        answer: dict[str, object] = json.loads(line)
        return answer

    async def kill(self) -> None:
        if self._process.returncode is None:
            try:
                self._process.kill()
            except ProcessLookupError:
                logger.debug("the helper had ended")
        await self._process.wait()
