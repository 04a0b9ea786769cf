"""What the store of responses keeps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tandem.router.config import GatewayConfig
from tandem.router.errors import Cancelled
from tandem.router.form import Naming, Usage
from tandem.router.openai.messages import Message
from tandem.router.output import Answer
from tandem.router.responses import wire
from tandem.router.responses.store import ResponseStore
from tandem.workers.types import TokenChunk


def test_who_leaves_while_the_end_is_sent_ends_nothing(tokenizer: Any, tokenizer_folder: Path) -> None:
    store = ResponseStore()
    config = GatewayConfig(model_name="tiny", tokenizer_folder=tokenizer_folder, max_model_len=2048)
    asked = wire.parse(b'{"model": "tiny", "input": "Hi"}', "", store)
    plan = asked.plan(tokenizer, config)
    form = asked.form(plan, tokenizer, Naming("1", "tiny", 0, lambda: None))
    answer = Answer(tokenizer, plan.prompts[0], (), ())
    (token_id,) = tokenizer.encode("Y", add_special_tokens=False)
    answer.push(TokenChunk(request_id="1", choice=0, token_ids=(token_id,), finish_reason="stop"))
    assert store.shown("resp_1", "")["status"] == "in_progress"
    form.end([answer], Usage(1, 1, 0, 0))
    form.fail(Cancelled())
    assert store.shown("resp_1", "")["status"] == "completed"


def test_a_response_that_is_put_twice_counts_once() -> None:
    store = ResponseStore(max_characters=100)
    for status in ("completed", "cancelled"):
        store.put("one", "me", {"status": status}, [Message(role="user", content="x" * 40)])
    assert store.get("one", "me").response == {"status": "cancelled"}
    store.delete("one", "me")
    assert store._num_characters == 0
