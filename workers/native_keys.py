"""`native/block_key.cpp`, compiled on first use: a chain of block keys in one call. No torch.

    chain_of_keys() ─> a function, or None where nothing can be compiled: `block_key.py` then goes by hashlib

The same keys either way.
"""

from __future__ import annotations

import ctypes
import logging
import platform
import struct
import sys
from array import array
from collections.abc import Callable, Sequence
from functools import lru_cache
from pathlib import Path

from tandem.kernels.compiler import BuildError, build_once, cache_folder, digest_of

logger = logging.getLogger(__name__)

SOURCE = Path(__file__).parent / "native" / "block_key.cpp"
FLAGS = ("-std=c++17", "-O3", "-fPIC")
KEY_BYTES = 16
TOO_LARGE = "a token id does not fit into 3 bytes"

KeyChain = Callable[[bytes, bytes, Sequence[int], int], list[bytes]]
"""(cluster key of 1 to 64 bytes, the 16 bytes of the first block's parent, tokens, tokens per block) -> the keys of all
full blocks. Raises `OverflowError` for a token that does not fit into 3 bytes."""


@lru_cache(maxsize=1)
def chain_of_keys() -> KeyChain | None:
    """Compiles for half a second the first time on a machine, so call it once where that disturbs nobody."""
    if sys.byteorder != "little":
        return None
    try:
        library = _load()
    except (BuildError, OSError) as error:
        logger.info("block keys are made by hashlib, which takes longer: %s", error)
        return None
    hash_chain = library.tandem_block_keys
    text, size = ctypes.c_char_p, ctypes.c_size_t
    hash_chain.argtypes = [text, size, text, ctypes.c_void_p, size, size, text]

    def chain(cluster_key: bytes, parent: bytes, token_ids: Sequence[int], block_size: int) -> list[bytes]:
        assert 0 < len(cluster_key) <= 64
        assert len(parent) == KEY_BYTES
        tokens = array("I", token_ids)
        num_blocks = len(tokens) // block_size
        keys = ctypes.create_string_buffer(KEY_BYTES * num_blocks)
        address, _ = tokens.buffer_info()
        if hash_chain(cluster_key, len(cluster_key), parent, address, block_size, num_blocks, keys):
            raise OverflowError(TOO_LARGE)
        return list(struct.unpack(f"{KEY_BYTES}s" * num_blocks, keys))

    return chain


def _load() -> ctypes.CDLL:
    """Raises `BuildError`, or `OSError` when what is in the cache cannot be loaded."""
    name = f"block_key-{digest_of([platform.machine(), *FLAGS], [SOURCE])}.so"
    return ctypes.CDLL(str(build_once(cache_folder() / name, [SOURCE], FLAGS)))
