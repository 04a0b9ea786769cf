"""The name of a block's content: equal keys mean equal KV. No torch: the router hashes prompts with it.

key(block) = BLAKE2b-128, keyed with the cluster key, over (parent key, the block's token ids in 3 bytes each). The
chain starts from a root that stands for everything else that KV depends on: model, revision, dtype, numerics, layout,
block size, tenant salt. With 3 bytes a block of 32 tokens and its parent fit into one block of BLAKE2b, which halves
the work.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Sequence
from hashlib import blake2b

from tandem.workers.native_keys import KEY_BYTES, TOO_LARGE, chain_of_keys
from tandem.workers.types import ModelIdentity

TOKEN_BYTES = 3


def root_key(cluster_key: bytes, identity: ModelIdentity, salt: str) -> bytes:
    """The parent of every first block of one tenant of one model. 16 bytes."""
    fields = (
        identity.model,
        identity.revision,
        identity.dtype,
        identity.numerics,
        str(identity.layout_version),
        str(identity.block_size),
        salt,
    )
    body = b"".join(len(field.encode()).to_bytes(8, "big") + field.encode() for field in fields)
    return blake2b(body, key=cluster_key[:64], digest_size=KEY_BYTES, person=b"tandem-root").digest()


def next_key(cluster_key: bytes, parent: bytes, token_ids: Sequence[int]) -> bytes:
    """The key of a full block with these tokens behind `parent`: what is right. 16 bytes. Raises `OverflowError` for a
    token that does not fit into 3 bytes."""
    tokens = b"".join(token.to_bytes(TOKEN_BYTES, "little") for token in token_ids)
    return blake2b(parent + tokens, key=cluster_key[:64], digest_size=KEY_BYTES).digest()


def block_keys(cluster_key: bytes, parent: bytes, token_ids: Sequence[int], block_size: int) -> list[bytes]:
    """Keys of all full blocks of `token_ids` behind `parent`, in order: `next_key` block by block, but faster. Raises
    `OverflowError` as it does."""
    chain = chain_of_keys()
    if chain is None or not cluster_key:
        return _keys_by_hashlib(cluster_key, parent, token_ids, block_size)
    return chain(cluster_key[:64], parent, token_ids, block_size)


def _keys_by_hashlib(cluster_key: bytes, parent: bytes, token_ids: Sequence[int], block_size: int) -> list[bytes]:
    """One conversion for all tokens, and one keyed hasher to copy."""
    data, stride = _packed(token_ids), block_size * TOKEN_BYTES
    hasher = blake2b(key=cluster_key[:64], digest_size=KEY_BYTES).copy
    keys: list[bytes] = []
    for start in range(0, len(data) - stride + 1, stride):
        block = hasher()
        block.update(parent)
        block.update(data[start : start + stride])
        parent = block.digest()
        keys.append(parent)
    return keys


def _packed(token_ids: Sequence[int]) -> bytearray:
    """3 bytes each, byte by byte for all tokens at once."""
    words = array("I", token_ids)
    if sys.byteorder != "little":
        words.byteswap()
    data = words.tobytes()
    if data[3::4].strip(b"\0"):
        raise OverflowError(TOO_LARGE)
    packed = bytearray(TOKEN_BYTES * len(words))
    for byte in range(TOKEN_BYTES):
        packed[byte::TOKEN_BYTES] = data[byte::4]
    return packed
