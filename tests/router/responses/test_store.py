"""What the store of responses keeps, counted."""

from __future__ import annotations

from tandem.router.openai.messages import Message
from tandem.router.responses.store import ResponseStore


def test_a_response_that_ends_twice_counts_once() -> None:
    """As when its client leaves while the end is being sent."""
    store = ResponseStore(max_characters=100)
    for status in ("completed", "cancelled"):
        store.put("one", "me", {"status": status}, [Message(role="user", content="x" * 40)])
    assert store.get("one", "me").response == {"status": "cancelled"}
    store.delete("one", "me")
    assert store._num_characters == 0
