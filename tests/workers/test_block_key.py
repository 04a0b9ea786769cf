"""Names of blocks."""

from __future__ import annotations

import pytest

from tandem.workers.block_key import block_keys, next_key


@pytest.mark.parametrize("num_tokens", [0, 3, 4, 5, 8, 41])
def test_a_whole_prompt_at_once_gives_the_same_keys_as_block_by_block(num_tokens: int) -> None:
    tokens = tuple(range(1, num_tokens + 1))
    expected, parent = [], b"root" * 4
    for start in range(0, num_tokens - 3, 4):
        parent = next_key(b"key", parent, tokens[start : start + 4])
        expected.append(parent)
    assert block_keys(b"key", b"root" * 4, tokens, 4) == expected
    assert len(expected) == num_tokens // 4
