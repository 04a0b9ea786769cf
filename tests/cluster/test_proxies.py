"""A proxy that the environment names for the rest of the world is not asked for our own ports."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from tandem.cluster.chat import ChatClient
from tandem.cluster.following import client_of, fetch
from tandem.cluster.status import fetch_cluster
from tandem.cluster.top import take_sample
from tandem.cluster.trace import find_trace

ANSWER = {"model": "m", "max_model_len": 8, "workers": [], "data": [{"id": "m"}]}


class Answering(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        content = b"" if self.path == "/metrics" else json.dumps(ANSWER).encode()
        self.send_response(200)
        self.send_header("content-length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def url(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")  # nobody
    monkeypatch.setenv("NO_PROXY", "")
    monkeypatch.setenv("no_proxy", "")
    with HTTPServer(("127.0.0.1", 0), Answering) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()


def test_those_who_look_ask_the_admin_port_itself(url: str) -> None:
    assert fetch_cluster(url) == ANSWER
    assert take_sample(url).cluster == ANSWER
    assert find_trace("r-1", [url]) == ANSWER


async def test_gateways_ask_the_launcher_itself(url: str) -> None:
    async with client_of(url) as client:
        assert (await fetch(client)).model == "m"


def test_a_chat_with_this_machine_needs_no_proxy(url: str) -> None:
    client = ChatClient(url, model=None, api_key=None, sampling={})
    assert client.model == "m"
    client.close()
