"""vLLM's API server in front of an engine without a model, run with vLLM's own Python:

    python vllm_front.py STEP_SECONDS --model FOLDER --served-model-name NAME --port PORT ...

All of it is vLLM's: HTTP, parsing, templates, tokenising, AsyncLLM and its output processor. In the place of the
process with the engine stands a list of requests that gives each one token per step, within this process: what crosses
a socket in earnest (one MessagePack message per step) is spared, which is to vLLM's advantage.
"""

from __future__ import annotations

import asyncio
import sys
import time
from types import SimpleNamespace
from typing import Any

import uvloop
from vllm.entrypoints.launchers.api_server.entry import run_server
from vllm.entrypoints.launchers.cli_args import make_arg_parser, validate_parsed_serve_args
from vllm.utils.argparse_utils import FlexibleArgumentParser
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, FinishReason
from vllm.v1.engine.core_client import EngineCoreClient

FIRST_TOKEN, NUM_TOKENS = 1000, 500
STEP_S = float(sys.argv[1])


class FakeCore:
    """As much of an engine core's client as AsyncLLM asks for."""

    def __init__(self) -> None:
        self.engine_ranks_managed = [0]
        self.resources = SimpleNamespace(engine_dead=False)
        self._left: dict[str, int] = {}
        self._number = 0
        self._due = 0.0
        self._arrived = asyncio.Event()

    async def get_supported_tasks_async(self) -> tuple[str, ...]:
        return ("generate",)

    async def add_request_async(self, request: Any) -> None:
        self._left[request.request_id] = request.sampling_params.max_tokens
        self._arrived.set()

    async def abort_requests_async(self, request_ids: list[str]) -> None:
        for request_id in request_ids:
            self._left.pop(request_id, None)

    async def get_output_async(self) -> EngineCoreOutputs:
        while not self._left:
            self._arrived.clear()
            await self._arrived.wait()
        self._due = max(self._due + STEP_S, time.monotonic() - STEP_S)
        await asyncio.sleep(self._due - time.monotonic())
        self._number += 1
        token_id = FIRST_TOKEN + self._number % NUM_TOKENS
        outputs = []
        for request_id, left in list(self._left.items()):
            reason = FinishReason.LENGTH if left == 1 else None
            outputs.append(EngineCoreOutput(request_id=request_id, new_token_ids=[token_id], finish_reason=reason))
            if left == 1:
                del self._left[request_id]
            else:
                self._left[request_id] = left - 1
        return EngineCoreOutputs(outputs=outputs, timestamp=time.monotonic())

    async def reset_mm_cache_async(self) -> None:
        """There is none."""

    def get_kv_event_sources(self) -> dict[int, Any]:
        return {}

    def shutdown(self, timeout: float | None = None) -> None:
        """There is nobody to stop."""


def main() -> None:
    EngineCoreClient.make_async_mp_client = staticmethod(lambda **given: FakeCore())
    parser = make_arg_parser(FlexibleArgumentParser())
    args = parser.parse_args(sys.argv[2:])
    validate_parsed_serve_args(args)
    uvloop.run(run_server(args))


if __name__ == "__main__":
    main()
