"""Who shares a cache with whom.

Blocks are found by their keys, and the salt is part of every key: requests with different salts share nothing, and
cannot tell from `cached_tokens` or from their timing what the other has asked. Each API key is a tenant of its own; a
request may divide it further with `cache_salt`. Without API keys there is one tenant.
"""

from __future__ import annotations

from hashlib import blake2b

SALT_BYTES = 16


def cache_salt(cluster_key: bytes, caller: str, asked: str | None) -> str:
    """The salt of a request's blocks: hex, or "" for whom nothing sets apart.

    `caller`: the name of the API key (`http.caller`); `asked`: the request's own `cache_salt`. Keyed, so that neither
    can be guessed from what workers are told.
    """
    if not caller and asked is None:
        return ""
    # lengths first: no pair of the two may be read as another pair
    parts = [caller.encode(), b"" if asked is None else asked.encode()]
    body = b"".join(len(part).to_bytes(4, "big") + part for part in parts)
    return blake2b(body, key=cluster_key[:64], digest_size=SALT_BYTES, person=b"tandem-tenant").hexdigest()
