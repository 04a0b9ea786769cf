"""Clients that vanish without a word: somebody pulls their cable. Takes a quarter of a minute: `make test-hosts`."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tandem.cluster.http_server import running_server
from tandem.cluster.listeners import bind
from tandem.router.config import GatewayConfig
from tandem.router.gateway import Gateway
from tandem.router.metrics import OUTCOMES
from tandem.router.scripted_worker import Conversation, ScriptedWorker

if TYPE_CHECKING:
    from hosts import HERE, Host, Network, reason_to_skip
else:
    from hosts import HERE, Network, reason_to_skip

    Host = Any

REASON = "takes a while: make test-hosts" if "RUN_HOST_TESTS" not in os.environ else reason_to_skip()
pytestmark = [pytest.mark.skipif(REASON is not None, reason=str(REASON)), pytest.mark.timeout(120)]

PATIENCE_S = 15.0
CLIENT = """
import socket, sys, time
connections = []
for request in sys.argv[3:]:
    connections.append(socket.create_connection((sys.argv[1], int(sys.argv[2]))))
    connections[-1].sendall(request.encode())
time.sleep(600)
"""
"""Sends each request on a connection of its own, and never reads."""
QUIET_S = 5.5
"""When the first token comes for a client that was silent until then: just before silence alone would have told."""


@pytest.fixture
def network(tmp_path: Path) -> Iterator[Network]:
    with Network(tmp_path, {"PATH": os.environ["PATH"]}) as made:
        yield made


async def answer(conversation: Conversation) -> None:
    """What the last token of the prompt asks for: a stream, nothing, or a token after a while."""
    conversation.start()
    wish = conversation.request.prompt_token_ids[-1]
    await asyncio.sleep({1: 0.0, 2: 600.0, 3: QUIET_S}[wish])
    while True:
        conversation.say(conversation.chunk(0, (5,)))
        await asyncio.sleep(0.2 if wish == 1 else 600.0)


@pytest.fixture
async def gateway(tokenizer_folder: Path) -> AsyncIterator[tuple[Gateway, ScriptedWorker]]:
    made = Gateway(GatewayConfig(model_name="m", tokenizer_folder=tokenizer_folder, max_model_len=4096))
    await made.start()
    worker = ScriptedWorker("aggregated-0", "aggregated", answer)
    made.workers.add(await worker.start())
    await made.wait_ready()
    yield made, worker
    await made.stop()
    await worker.stop()


@pytest.fixture
def tokenizer_folder(tmp_path: Path) -> Path:
    from tokenizers import Tokenizer, models, pre_tokenizers

    tokenizer = Tokenizer(models.WordLevel({"[UNK]": 0, **{str(word): word for word in range(1, 9)}}, "[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text("{}")
    return tmp_path


def request(wish: int, **fields: Any) -> str:
    body = json.dumps({"model": "m", "prompt": [4, wish], "max_tokens": 1000, "ignore_eos": True, **fields})
    return f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n{body}"


async def test_clients_whose_cable_is_pulled_cost_nothing_after_15_seconds(network: Network, gateway: Any) -> None:
    house, worker = gateway
    requests = [
        request(1, stream=True),  # tokens are on their way
        request(2),  # nothing is sent to it
        request(2, stream=True),  # nothing but headers
        request(3, stream=True),  # something is, after a while
        request(1)[:-10],  # its body is half there
    ]
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(bind(HERE, 0, flag="--port"))
        host = network.add_host("client")
        port = str(listener.getsockname()[1])
        async with running_server(house.app, listener):
            host.spawn(sys.executable, "-c", CLIENT, HERE, port, *requests)
            await until(lambda: worker.num_running == 4 and num_connections(port) == 5, 20)
            network.pull_the_cable(host)
            pulled = time.monotonic()
            await until(lambda: worker.num_running == 0, PATIENCE_S)
            await until(lambda: num_connections(port) == 0, PATIENCE_S - (time.monotonic() - pulled))
            await house.admission.until_empty(1)
            value = house.metrics.registry.get_sample_value
            counts = {outcome: value("tandem_requests_total", {"outcome": outcome}) for outcome in OUTCOMES}
            sys.stderr.write(f"noticed after {time.monotonic() - pulled:.1f} s: {counts}\n")
    assert counts == {"ok": 0, "cancelled": 5, "failed": 0, "rejected": 0}


def num_connections(port: str) -> int:
    """Established ones from elsewhere, as the system lists them."""
    mine = f":{int(port):04X}"
    lines = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    return sum(fields[1].endswith(mine) and fields[3] == "01" for fields in lines)


async def until(question: Any, timeout_s: float) -> None:
    async with asyncio.timeout(timeout_s):
        while not question():  # noqa: ASYNC110  what is watched is not ours to notify
            await asyncio.sleep(0.05)
