"""`tandem chat` with servers that may be anybody's."""

from __future__ import annotations

import pytest

from tandem.cluster.chat import _pieces
from tandem.workers.errors import TandemError


@pytest.mark.parametrize("data", ["{", "[]", '{"choices": [1]}', '{"choices": null}', '{"error": "no"}', "{}"])
def test_what_is_no_chat_is_told_in_a_line(data: str) -> None:
    with pytest.raises(TandemError, match="no part of a chat"):
        list(_pieces(iter([f"data: {data}"])))


def test_an_answer_ends_with_its_mark_alone() -> None:
    said = 'data: {"choices": [{"delta": {"content": "Yes"}}, {"delta": {"role": "assistant"}}]}'
    assert list(_pieces(iter([": a comment", said, "data: [DONE]"]))) == ["Yes"]
    with pytest.raises(TandemError, match="ended before"):
        list(_pieces(iter([said])))
