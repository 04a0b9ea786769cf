"""The name of a block's content: equal keys mean equal KV. No torch: the router hashes prompts with it.

key(block) = BLAKE2b-128, keyed with the cluster key, over (parent key, the block's token ids). The chain starts from a
root that stands for everything else that KV depends on: model, revision, dtype, layout, block size, tenant salt.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from hashlib import blake2b

from tandem.workers.types import ModelIdentity

KEY_BYTES = 16


def root_key(cluster_key: bytes, identity: ModelIdentity, salt: str) -> bytes:
    """The parent of every first block of one tenant of one model. 16 bytes."""
    fields = (
        identity.model,
        identity.revision,
        identity.dtype,
        str(identity.layout_version),
        str(identity.block_size),
        salt,
    )
    body = b"".join(len(field.encode()).to_bytes(8, "big") + field.encode() for field in fields)
    return blake2b(body, key=cluster_key[:64], digest_size=KEY_BYTES, person=b"tandem-root").digest()


def next_key(cluster_key: bytes, parent: bytes, token_ids: Sequence[int]) -> bytes:
    """The key of a full block with these tokens behind `parent`. 16 bytes."""
    return blake2b(parent + array("I", token_ids).tobytes(), key=cluster_key[:64], digest_size=KEY_BYTES).digest()


def block_keys(cluster_key: bytes, root: bytes, token_ids: Sequence[int], block_size: int) -> list[bytes]:
    """Keys of all full blocks of `token_ids`, in order. The same as `next_key` block by block, in two thirds of the
    time: one conversion for the whole prompt, one keyed hasher to copy."""
    data = array("I", token_ids).tobytes()
    stride = block_size * array("I").itemsize
    hasher = blake2b(key=cluster_key[:64], digest_size=KEY_BYTES).copy
    keys: list[bytes] = []
    parent = root
    for start in range(0, len(data) - stride + 1, stride):
        block = hasher()
        block.update(parent)
        block.update(data[start : start + stride])
        parent = block.digest()
        keys.append(parent)
    return keys
