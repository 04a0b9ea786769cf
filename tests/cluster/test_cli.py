"""The command line: what it says, how fast, and how it fails. Everything here runs without a cluster."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from tandem.cluster.chat import ChatClient
from tandem.workers.errors import TandemError, UserError

TANDEM = [sys.executable, "-P", "-c", "from tandem.cluster.cli import main; main()"]


def tandem(*arguments: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "COLUMNS": "120"}
    return subprocess.run(
        [*TANDEM, *arguments], input=stdin, capture_output=True, text=True, timeout=30, env=environment, check=False
    )


def test_help_names_every_command_and_loads_nothing_heavy() -> None:
    started = subprocess.run(
        [TANDEM[0], "-X", "importtime", *TANDEM[1:], "--help"], capture_output=True, text=True, timeout=60, check=True
    )
    imported = {line.rpartition("|")[2].strip() for line in started.stderr.splitlines()}
    assert "typer" in imported
    assert not imported & {"torch", "ray", "transformers", "numpy", "fastapi"}
    shown = started.stdout
    for command in ("serve", "status", "chat", "generate", "bench", "tune"):
        assert command in shown
    program = "import sys, tandem.cluster.cli; print({'torch', 'ray', 'fastapi', 'transformers'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-P", "-c", program], capture_output=True, text=True, check=True, timeout=30)
    assert done.stdout.strip() == "set()"


def test_serve_has_the_flags_that_were_promised() -> None:
    shown = tandem("serve", "--help").stdout
    promised = (
        "--prefill --decode --aggregated --host --port --admin-port --redis-url --transfer --device --dtype"
        " --block-size --max-model-len --max-num-seqs --max-num-batched-tokens --kv-cache-memory-bytes"
        " --kv-host-memory-bytes --kv-disk-path --kv-disk-bytes"
        " --api-key --seed --config"
    )
    assert [flag for flag in promised.split() if flag not in shown] == []


def test_version() -> None:
    assert tandem("--version").stdout.startswith("tandem 0.")


def test_a_command_without_a_subcommand_shows_the_help() -> None:
    assert "Usage" in tandem().stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("serve", "x", "--prefill", "-1"), "tandem: --prefill must not be negative, but is -1"),
        (("serve", "x", "--block-size", "33"), "tandem: --block-size must be a power of two from 2 to 1024, but is 33"),
        (("serve", "x", "--config", "/absent"), "tandem: --config /absent cannot be read: No such file or directory"),
        (("serve", "x", "--port", "0", "--host", "no.such.host.invalid"), "is not an address of this machine"),
        (("status", "--url", "http://127.0.0.1:1"), "tandem: no Tandem cluster answers at http://127.0.0.1:1"),
        (("chat", "--url", "http://127.0.0.1:1"), "tandem: no server answers at http://127.0.0.1:1"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(arguments: tuple[str, ...], message: str) -> None:
    done = tandem(*arguments)
    assert done.returncode == 2
    assert message in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1


def test_a_file_wins_over_defaults_and_flags_win_over_it(tmp_path: Path) -> None:
    file = tmp_path / "cluster.toml"
    file.write_text("port = 70000\nblock-size = 64\n")
    assert "--port must be between" in tandem("serve", "x", "--config", str(file)).stderr
    done = tandem("serve", "x", "--config", str(file), "--port", "0", "--max-num-batched-tokens", "32")
    assert "--max-num-batched-tokens must be a positive multiple of --block-size (64)" in done.stderr


def test_api_keys_are_repeated_and_never_shown() -> None:
    done = tandem("serve", "x", "--api-key", "secret", "--api-key", "")
    assert done.stderr == "tandem: --api-key must not be empty\n"


def test_a_model_that_cannot_be_served_ends_before_ray_starts(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    done = tandem("serve", str(tmp_path), "--port", "0", "--admin-port", "0")
    assert "ray  " not in done.stderr
    assert done.returncode == 2
    assert done.stderr.strip().splitlines()[-1].startswith("tandem: ")
    assert "config.json" in done.stderr.strip().splitlines()[-1]
    assert " ray " not in done.stderr


def test_a_taken_port_ends_before_anything_starts() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        done = tandem("serve", "x", "--port", "0", "--admin-port", str(port))
    assert done.returncode == 2
    assert done.stderr.strip() == f"tandem: --admin-port {port} cannot be used on 127.0.0.1: address already in use"


def event(text: str) -> str:
    return "data: " + json.dumps({"choices": [{"delta": {"content": text}}]}) + "\n\n"


class FakeServer(BaseHTTPRequestHandler):
    """Answers /v1/models, and chats with what `stream` holds."""

    stream = ""
    asked: list[Any] = []  # noqa: RUF012

    def do_GET(self) -> None:
        self.reply("application/json", json.dumps({"data": [{"id": "some-model"}]}))

    def do_POST(self) -> None:
        self.asked.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
        self.reply("text/event-stream", self.stream)

    def reply(self, kind: str, body: str) -> None:
        self.send_response(200)
        self.send_header("Content-Type", kind)
        self.end_headers()
        self.wfile.write(body.encode())

    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.fixture
def fake() -> Iterator[str]:
    server = HTTPServer(("127.0.0.1", 0), FakeServer)
    FakeServer.asked = []
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


def test_a_piped_message_is_asked_and_its_answer_printed(fake: str) -> None:
    FakeServer.stream = event("Good ") + event("day") + "data: [DONE]\n\n"
    done = tandem("chat", "--url", f"{fake}/v1", "--system", "Be kind.", "--seed", "7", stdin="Hello\n")
    assert done.stdout == "Good day\n"
    assert FakeServer.asked == [
        {
            "model": "some-model",
            "messages": [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "Hello"}],
            "stream": True,
            "max_tokens": 512,
            "temperature": 0.0,
            "seed": 7,
        }
    ]


@pytest.mark.parametrize(
    ("stream", "message"),
    [
        (event("Go"), "ended before the answer was complete"),
        (event("Go") + 'data: {"error": {"message": "no worker"}}\n\ndata: [DONE]\n\n', "no worker"),
    ],
)
def test_an_answer_that_breaks_off_is_an_error(fake: str, stream: str, message: str) -> None:
    FakeServer.stream = stream
    client = ChatClient(fake, model=None, api_key=None, sampling={})
    with pytest.raises(TandemError, match=message) as raised:
        list(client.stream([{"role": "user", "content": "Hello"}]))
    assert not isinstance(raised.value, UserError)
    client.close()
