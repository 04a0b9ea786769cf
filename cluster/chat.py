"""`tandem chat`: a streamed conversation in the terminal, with any server that speaks the OpenAI API."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from typing import Any

import httpx
from rich.console import Console

from tandem.workers.errors import TandemError, UserError

Message = dict[str, str]

NEAR = ("all://127.0.0.1", "all://localhost", "all://[::1]")
"""Asked without the environment's proxy."""
CONNECT_TIMEOUT_S = 5.0
SILENCE_TIMEOUT_S = 300.0
"""Between two pieces of an answer; a long prompt is read before the first one."""


class ChatClient:
    """The few calls that a conversation needs. `sampling` is sent along with every request."""

    def __init__(self, url: str, *, model: str | None, api_key: str | None, sampling: dict[str, Any]) -> None:
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        timeout = httpx.Timeout(SILENCE_TIMEOUT_S, connect=CONNECT_TIMEOUT_S)
        base = url.rstrip("/").removesuffix("/v1")
        try:
            self._http = httpx.Client(base_url=base, headers=headers, timeout=timeout, mounts=dict.fromkeys(NEAR))
        except httpx.InvalidURL as error:
            raise UserError(f"--url {url}: {error}") from error
        self.url = base
        self._model = model
        self._sampling = sampling

    @property
    def model(self) -> str:
        """The model that was asked for, or the first that the server offers."""
        if self._model is None:
            try:
                answer = self._http.get("/v1/models")
                _require_success(answer)
                self._model = str(answer.json()["data"][0]["id"])
            except (httpx.HTTPError, httpx.InvalidURL) as error:
                raise UserError(f"no server answers at {self.url}; start one with: tandem serve MODEL") from error
            except (ValueError, KeyError, IndexError, TypeError) as error:
                raise UserError(f"{self.url} is not an OpenAI-compatible server") from error
        return self._model

    def stream(self, messages: list[Message]) -> Iterator[str]:
        """The answer, piece by piece. Raises `UserError` (refused) or `TandemError` (broken off)."""
        body = {"model": self.model, "messages": messages, "stream": True, **self._sampling}
        try:
            with self._http.stream("POST", "/v1/chat/completions", json=body) as answer:
                if answer.status_code != 200:
                    answer.read()
                _require_success(answer)
                yield from _pieces(answer.iter_lines())
        except httpx.HTTPError as error:
            raise TandemError(f"the connection to {self.url} broke: {type(error).__name__}") from error

    def close(self) -> None:
        self._http.close()


def _require_success(answer: httpx.Response) -> None:
    if answer.status_code == 200:
        return
    try:
        message = answer.json()["error"]["message"]
    except (ValueError, KeyError, TypeError):
        message = answer.text.strip()[:200]
    raise UserError(f"the server answers {answer.status_code}: {message}")


def _pieces(lines: Iterator[str]) -> Iterator[str]:
    """Text deltas of a stream of server-sent events. Raises `TandemError` on an error event, an early end, and what is
    no event of a chat."""
    for line in lines:
        if not line.startswith("data:"):
            continue
        data = line.removeprefix("data:").strip()
        if data == "[DONE]":
            return
        try:
            event = json.loads(data)
            if "error" in event:
                raise TandemError(f"the server gave up: {event['error'].get('message')}")
            texts = [choice["delta"].get("content") for choice in event["choices"]]
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise TandemError("the server sent what is no part of a chat") from error
        yield from filter(None, texts)
    raise TandemError("the stream ended before the answer was complete")


def run_chat(client: ChatClient, *, system: str | None) -> None:
    """A conversation on a terminal; one question and one answer when the input is piped."""
    opening: list[Message] = [] if system is None else [{"role": "system", "content": system}]
    try:
        if sys.stdin.isatty():
            _converse(client, opening)
        else:
            _answer(client, [*opening, {"role": "user", "content": sys.stdin.read().strip()}])
    finally:
        client.close()


def _converse(client: ChatClient, opening: list[Message]) -> None:
    console = Console()
    console.print(f"[bold]{client.model}[/] at {client.url}   /reset begins anew, /quit ends")
    messages = list(opening)
    while True:
        try:
            text = console.input("[bold cyan]you>[/] ").strip()
        except (EOFError, KeyboardInterrupt):
            console.print()
            return
        if text == "/quit":
            return
        if text == "/reset":
            messages = list(opening)
            console.print("[dim]a new conversation[/]")
        elif text.startswith("/"):
            console.print("[dim]there are /reset and /quit[/]")
        elif text:
            messages = _exchange(client, console, messages, text)


def _exchange(client: ChatClient, console: Console, messages: list[Message], text: str) -> list[Message]:
    """Ask, show the answer; returns the conversation as it then stands. A failed turn leaves it as it was."""
    asked = [*messages, {"role": "user", "content": text}]
    try:
        return [*asked, {"role": "assistant", "content": _answer(client, asked)}]
    except KeyboardInterrupt:  # of this answer only
        console.print("\n[dim]interrupted[/]")
    except TandemError as error:
        console.print(f"\n[red]{error}[/]", highlight=False)
    return messages


def _answer(client: ChatClient, messages: list[Message]) -> str:
    """Print the answer while it arrives; returns all of it."""
    pieces: list[str] = []
    for piece in client.stream(messages):
        pieces.append(piece)
        sys.stdout.write(piece)
        sys.stdout.flush()
    sys.stdout.write("\n")
    return "".join(pieces)
