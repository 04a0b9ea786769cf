"""The way to Redis: by what URL, under which rights, and when not to try.

    redis://, rediss://, unix://                        as redis-py reads them
    redis+sentinel://[user:password@]host:port,.../service[/db][?sentinel_username=...&sentinel_password=...]
    rediss+sentinel://...                               the same over TLS, sentinels included

Nothing here shows a URL: it may hold a password.
"""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable
from typing import Any, cast
from urllib.parse import parse_qsl, unquote, urlsplit

from redis.asyncio import Redis
from redis.asyncio.sentinel import Sentinel, SentinelConnectionPool
from redis.exceptions import NoScriptError, RedisError

from tandem.router.index.scripts import Script, index_prefix
from tandem.workers.errors import UserError

logger = logging.getLogger(__name__)

SCHEMES = ("redis", "rediss", "unix", "redis+sentinel", "rediss+sentinel")
COMMANDS = (
    *("ping", "select", "evalsha", "eval"),
    *("get", "mget", "set", "del", "incrby", "exists", "expire", "pttl"),
    *("hget", "hset", "hdel", "hgetall"),
    *("xadd", "xread"),
)
"""All that the index uses, inside scripts too."""
FAILURES = (RedisError, OSError, TimeoutError)
"""What a command may raise when Redis is not as it should be."""

SOCKET_TIMEOUT_S = 1.0
FIRST_PAUSE_S = 0.1
LAST_PAUSE_S = 10.0
DEFAULT_SENTINEL_PORT = 26_379


def acl_rule(user: str, namespace: str | None = None) -> str:
    """The ACL command that creates a user with just the rights that the index needs. `>PASSWORD` is to be replaced.
    Without a namespace: for all clusters that share this Redis."""
    keys = "pfx:*" if namespace is None else f"{index_prefix(namespace)}*"
    rights = " ".join(f"+{command}" for command in COMMANDS)
    return f"ACL SETUSER {user} reset on >PASSWORD ~{keys} -@all {rights}"


def check_redis_url(url: str, name: str = "redis_url") -> None:
    """Raises `UserError` if this cannot be a URL of Redis. The message holds no part of it but the scheme."""
    try:
        parts = urlsplit(url)
        if parts.scheme not in SCHEMES:
            shown = f"{parts.scheme}://" if "://" in url and parts.scheme else "no scheme"
            known = ", ".join(f"{scheme}://" for scheme in SCHEMES)
            raise UserError(f"{name} must start with one of {known}, but has {shown}")
        if parts.scheme.endswith("+sentinel"):
            _sentinel_parts(url)
        else:
            Redis.from_url(url, **_settings())
    except (ValueError, TypeError, AttributeError) as error:
        # `from None`: the library's message may repeat the URL
        raise UserError(f"{name} is not a valid {url.partition('://')[0]}:// URL ({type(error).__name__})") from None


def open_redis(url: str) -> Redis:
    """A client; connects when it is used. Raises `UserError` as `check_redis_url` does."""
    check_redis_url(url)
    if not urlsplit(url).scheme.endswith("+sentinel"):
        return Redis.from_url(url, **_settings())
    sentinels, service, settings, sentinel_settings = _sentinel_parts(url)
    sentinel: Any = cast(Any, Sentinel)(
        sentinels, sentinel_kwargs=_settings() | sentinel_settings, **(_settings() | settings)
    )
    return cast(Redis, sentinel.master_for(service))


async def close_redis(redis: Redis) -> None:
    """The client, and the connections to sentinels that it has made."""
    await redis.aclose()
    if isinstance(redis.connection_pool, SentinelConnectionPool):
        for sentinel in cast(Any, redis.connection_pool).sentinel_manager.sentinels:
            await sentinel.aclose()


def _settings() -> dict[str, Any]:
    # our own breaker decides about retries: the client must answer or fail, at once
    return {
        "socket_timeout": SOCKET_TIMEOUT_S,
        "socket_connect_timeout": SOCKET_TIMEOUT_S,
        "retry": None,
        "retry_on_error": [],
        "protocol": 2,
        "max_connections": 64,
    }


def _sentinel_parts(url: str) -> tuple[list[tuple[str, int]], str, dict[str, Any], dict[str, Any]]:
    """(sentinels, service, settings of the Redis connections, settings of the sentinels' own)."""
    parts = urlsplit(url)
    credentials, _, hosts = parts.netloc.rpartition("@")
    sentinels = [_host_and_port(each) for each in hosts.split(",")]
    service, _, database = parts.path.strip("/").partition("/")
    if not service:
        raise UserError("redis_url with +sentinel must name a service: redis+sentinel://host:port/service")
    user, _, password = credentials.partition(":")
    shared: dict[str, Any] = {"ssl": True} if parts.scheme.startswith("rediss") else {}
    settings = shared | {"db": int(database or 0)}
    own = dict(shared)
    for name, value in parse_qsl(parts.query, strict_parsing=True) if parts.query else ():
        if name.startswith("sentinel_") and name.removeprefix("sentinel_") in ("username", "password"):
            own[name.removeprefix("sentinel_")] = value
        elif name in ("ssl_ca_certs", "ssl_certfile", "ssl_keyfile"):
            settings[name] = own[name] = value
        else:
            raise UserError(f"redis_url has the unknown option {name!r}")
    if user:
        settings["username"] = unquote(user)
    if password:
        settings["password"] = unquote(password)
    return sentinels, service, settings, own


def _host_and_port(text: str) -> tuple[str, int]:
    split = urlsplit(f"//{text}")
    if not split.hostname:
        raise ValueError("no host")
    return split.hostname, split.port or DEFAULT_SENTINEL_PORT


async def run_script(redis: Redis, script: Script, prefix: str, *arguments: bytes | str | int) -> Any:
    """Raises one of `FAILURES`."""
    try:
        return await cast(Any, redis).evalsha(script.sha, 1, prefix, *arguments)
    except NoScriptError:
        return await cast(Any, redis).eval(script.source, 1, prefix, *arguments)


class Breaker:
    """Keeps away from a Redis that does not answer, for longer and longer, with jitter; one success forgets it all."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._pause_s = FIRST_PAUSE_S
        self._open_until = 0.0
        self.is_up = True

    @property
    def remaining_s(self) -> float:
        return max(0.0, self._open_until - self._clock())

    @property
    def can_try(self) -> bool:
        return self.remaining_s == 0.0

    def succeed(self) -> None:
        self.is_up = True
        self._pause_s = FIRST_PAUSE_S
        self._open_until = 0.0

    def fail(self) -> None:
        self.is_up = False
        if not self.can_try:
            return  # one outage, seen by several
        self._open_until = self._clock() + self._pause_s * random.uniform(0.75, 1.25)
        self._pause_s = min(2 * self._pause_s, LAST_PAUSE_S)
