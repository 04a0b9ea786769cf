"""A gateway with one scripted worker, and a conversation with it in another environment.

    python serve_scripted.py PYTHON        PYTHON: the interpreter that has the clients; runs converse.py

What the worker says depends on what it is asked: a call of the tool that is on offer, an answer from its result, a JSON
object where the answer must be one, and a greeting otherwise.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import uvicorn

from tandem.router.config import GatewayConfig
from tandem.router.gateway import Gateway
from tandem.router.http_protocol import LimitedProtocol
from tandem.router.scripted_worker import ScriptedWorker, answering
from tandem.workers.types import Request

sys.path.insert(0, str(Path(__file__).parents[1] / "router"))
from conftest import save_byte_level_tokenizer

CONVERSATION = Path(__file__).with_name("converse.py")
GREETING = "Hello there, friend 🙂."
SUNNY = "It is sunny in Bern."
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Bern"}}\n</tool_call>'
PERSON = {"name": "Ada", "age": 36}


class Server(uvicorn.Server):
    """Signals are the interpreter's."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


async def main(python: str, folder: Path) -> int:
    save_byte_level_tokenizer(folder)
    config = GatewayConfig(
        model_name="tiny", tokenizer_folder=folder, max_model_len=8192, api_keys=("secret",), num_decode=1
    )
    gateway = Gateway(config)
    await gateway.start()
    worker = ScriptedWorker("decode-0", "decode", answering(lambda request, choice: says(gateway, request)))
    gateway.workers.add(await worker.start())
    await gateway.wait_ready()
    listener = socket.create_server(("127.0.0.1", 0))
    server = Server(uvicorn.Config(gateway.app, http=LimitedProtocol, lifespan="off", ws="none", log_config=None))
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    conversation = await asyncio.create_subprocess_exec(python, str(CONVERSATION), url)
    code = await conversation.wait()
    server.should_exit = True
    await serving
    await gateway.stop()
    await worker.stop()
    return code


def says(gateway: Gateway, request: Request) -> Sequence[int]:
    """The script: token ids of the answer."""
    tokenizer = gateway._open_house().tokenizer
    prompt = tokenizer.text_of(request.prompt_token_ids)
    grammar = request.sampling.grammar or ""
    if "<tool_response>" in prompt:
        text = SUNNY
    elif "Person" in prompt or "Person" in grammar:
        call = {"name": "Person", "arguments": PERSON}
        text = f"<tool_call>\n{json.dumps(call)}\n</tool_call>" if "<tool_call>" in grammar else json.dumps(PERSON)
    elif "get_weather" in prompt:
        text = CALL
    else:
        text = GREETING
    return [*tokenizer.encode_plain(text, add_special_tokens=False), tokenizer.eos_token_ids[0]]


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        sys.exit(asyncio.run(main(sys.argv[1], Path(folder))))
