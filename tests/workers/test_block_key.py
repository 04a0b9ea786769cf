"""Names of blocks."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from tandem.kernels import compiler
from tandem.workers.block_key import block_keys, next_key
from tandem.workers.native_keys import chain_of_keys


@pytest.fixture(params=["native", "hashlib"])
def way(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Keys by our own code, and by hashlib as where there is no compiler."""
    if request.param == "hashlib":
        monkeypatch.setenv("TANDEM_CACHE_DIR", str(tmp_path))
        monkeypatch.setenv(compiler.COMPILER_VARIABLE, "/nowhere/g++")
        forget()
    assert (chain_of_keys() is None) == (request.param == "hashlib")
    yield request.param
    forget()


def forget() -> None:
    compiler.find_compiler.cache_clear()
    chain_of_keys.cache_clear()


def one_by_one(key: bytes, root: bytes, tokens: tuple[int, ...], size: int) -> list[bytes]:
    keys, parent = [], root
    for start in range(0, len(tokens) - size + 1, size):
        parent = next_key(key, parent, tokens[start : start + size])
        keys.append(parent)
    return keys


@pytest.mark.parametrize("num_tokens", [0, 3, 4, 5, 8, 41])
def test_a_whole_prompt_at_once_gives_the_same_keys_as_block_by_block(num_tokens: int, way: str) -> None:
    tokens = tuple(range(1, num_tokens + 1))
    keys = block_keys(b"key", b"root" * 4, tokens, 4)
    assert keys == one_by_one(b"key", b"root" * 4, tokens, 4)
    assert len(keys) == num_tokens // 4


def test_random_prompts_keys_and_block_sizes(way: str) -> None:
    """Messages that end before, at and behind every border of 128 bytes; keys of every length that counts."""
    source = random.Random(7)
    for size in (1, 2, 16, 32, 37, 38, 64, 79, 80, 81, 112, 122, 123, 128, 256):
        for key_bytes in (0, 1, 31, 32, 63, 64, 65, 200):
            tokens = tuple(source.choices([0, 1, 255, 49_151, (1 << 24) - 1, source.getrandbits(17)], k=3 * size + 5))
            key, root = source.randbytes(key_bytes), source.randbytes(16)
            assert block_keys(key, root, tokens, size) == one_by_one(key, root, tokens, size)
            assert block_keys(key, root, list(tokens), size) == one_by_one(key, root, tokens, size)


@pytest.mark.parametrize("token", [-1, 1 << 24, 1 << 32])
def test_a_token_that_is_none(token: int, way: str) -> None:
    with pytest.raises(OverflowError):
        block_keys(b"key", b"root" * 4, [1, 2, token, 3], 4)
    with pytest.raises(OverflowError):
        next_key(b"key", b"root" * 4, [1, 2, token, 3])
