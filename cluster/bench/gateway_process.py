"""The gateway of `tandem bench gateway`: the real applications on the real server, in a process of its own."""

from __future__ import annotations

import gc
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import msgspec
import uvloop

from tandem.cluster.bench.children import obey
from tandem.cluster.http_server import running_server
from tandem.cluster.listeners import bind
from tandem.router.config import GatewayConfig
from tandem.router.gateway import Gateway
from tandem.workers.types import WorkerAddress

REST_S = 60.0


async def _main() -> None:
    gateways: list[Gateway] = []
    async with AsyncExitStack() as stack:

        async def start(order: dict[str, Any]) -> dict[str, Any]:
            """A gateway before these workers, ready to serve."""
            addresses = msgspec.convert(order["workers"], list[WorkerAddress])
            config = GatewayConfig(
                model_name=order["model"],
                tokenizer_folder=Path(order["tokenizer_folder"]),
                max_model_len=order["max_model_len"],
                cluster_key=bytes.fromhex(order["cluster_key"]),
                num_decode=len(addresses),
                max_in_flight=order["max_in_flight"],
                max_in_flight_tokens=1 << 30,
                request_timeout_s=3600.0,
            )
            gateway = Gateway(config)
            gateways.append(gateway)
            await gateway.start()
            stack.push_async_callback(gateway.stop)
            for address in addresses:
                gateway.workers.add(address)
            await gateway.wait_ready()
            listener = stack.enter_context(bind("127.0.0.1", 0, flag="--port"))
            await stack.enter_async_context(running_server(gateway.app, listener))
            return {"port": listener.getsockname()[1]}

        async def rest(order: dict[str, Any]) -> None:
            """Wait until nothing is in the house; nothing that is measured from here on is garbage from before."""
            await gateways[0].admission.until_empty(REST_S)
            gc.collect()

        await obey({"start": start, "rest": rest})


if __name__ == "__main__":
    uvloop.run(_main())
