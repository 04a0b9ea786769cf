"""What a stream tells of a prompt is what a whole answer tells of it, and comes with a choice's first chunk."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from tandem.router import reply
from tandem.router.openai import chat_form, completion_form, endpoint

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
HELLO: list[Any] = [{"role": "user", "content": "Grüße 🙂"}]


@pytest.fixture
async def house(open_house: Any, saying: Any) -> Any:
    return await open_house(saying(["Yes, indeed. No.", "Grüße aus Köln 🙂"]))


async def both(house: Any, events_of: Any, path: str, **body: Any) -> tuple[Any, list[Any]]:
    """The whole answer, and the chunks of a stream."""
    body = {"model": "tiny", "max_tokens": 30, **body}
    whole = await house.http.post(path, json=body)
    stream = await house.http.post(path, json={**body, "stream": True})
    assert (whole.status_code, stream.status_code) == (200, 200), whole.text + stream.text
    *chunks, (_, done) = events_of(stream.text)
    assert done == "[DONE]"
    return whole.json(), [chunk for _, chunk in chunks]


@pytest.mark.parametrize("more", [{}, {"return_token_ids": True}, {"logprobs": True, "top_logprobs": 2}])
async def test_chat(house: Any, events_of: Any, more: dict[str, Any]) -> None:
    whole, chunks = await both(house, events_of, CHAT, messages=HELLO, n=2, prompt_logprobs=2, **more)
    assert len(whole["prompt_logprobs"]) == whole["usage"]["prompt_tokens"]
    for index in range(2):
        first, *others = [chunk for chunk in chunks if chunk["choices"][0]["index"] == index]
        assert first["prompt_logprobs"] == whole["prompt_logprobs"]
        assert first["choices"][0]["delta"] == {"role": "assistant", "content": ""}
        assert not any("prompt_logprobs" in chunk or "role" in chunk["choices"][0]["delta"] for chunk in others)
        text = "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in others)
        assert text == whole["choices"][index]["message"]["content"]


@pytest.mark.parametrize(
    "fields",
    [
        {"prompt_logprobs": 1},
        {"prompt_logprobs": 0, "logprobs": 2, "return_token_ids": True},
        {"echo": True, "logprobs": 2},
        {"echo": True, "logprobs": 0, "prompt_logprobs": 3},
        {"echo": True, "prompt_logprobs": 0, "stop": ["deed", "Köln"]},
    ],
)
async def test_completions(house: Any, events_of: Any, fields: dict[str, Any]) -> None:
    prompts = ["Once 🙂 upon", "the"]
    whole, chunks = await both(house, events_of, COMPLETIONS, prompt=prompts, n=2, **fields)
    for index, expected in enumerate(whole["choices"]):
        parts = [chunk["choices"][0] for chunk in chunks if chunk["choices"][0]["index"] == index]
        first, *others = parts
        for name in ("prompt_logprobs", "prompt_token_ids"):
            assert first.get(name) == expected.get(name)
            assert not any(name in part for part in others)
        assert "".join(part["text"] for part in parts) == expected["text"]
        assert first["text"] == (prompts[index // 2] if fields.get("echo") else "")
        for name in expected["logprobs"] or ():
            joined = [value for part in parts if part["logprobs"] for value in part["logprobs"][name]]
            assert joined == expected["logprobs"][name], name
        assert parts[-1]["finish_reason"] == expected["finish_reason"]


@pytest.mark.parametrize(
    ("path", "more"),
    [
        (CHAT, {"messages": HELLO, "prompt_logprobs": 1}),
        (COMPLETIONS, {"prompt": "Hello", "prompt_logprobs": 1}),
        (COMPLETIONS, {"prompt": "Hello", "echo": True, "logprobs": 1}),
    ],
)
async def test_a_prompts_logprobs_are_made_once_and_beside_the_event_loop(
    house: Any, events_of: Any, path: str, more: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many answers show them: for thousands of tokens they take a second, in which all streams would wait."""
    threads: list[threading.Thread] = []

    def noted(function: Any) -> Any:
        def call(*given: Any) -> Any:
            threads.append(threading.current_thread())
            return function(*given)

        return call

    for form in (chat_form, completion_form):
        monkeypatch.setattr(form, "prompt_logprobs", noted(form.prompt_logprobs))
    monkeypatch.setattr(completion_form, "EchoedLogprobs", noted(completion_form.EchoedLogprobs))
    await both(house, events_of, path, n=3, **more)
    assert len(threads) == 2  # whole, and streamed
    assert threading.main_thread() not in threads


@pytest.mark.parametrize(
    ("more", "param"),
    [({"prompt_logprobs": 20}, "prompt_logprobs"), ({"echo": True, "logprobs": 20, "max_tokens": 1}, "logprobs")],
)
async def test_an_answer_that_would_be_nothing_but_logprobs_is_refused(
    house: Any, more: dict[str, Any], param: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(endpoint, "MAX_PROMPT_LOGPROBS", 3 * 8 * 21)
    body = {"model": "tiny", "prompt": [5] * 8, **more}
    assert (await house.http.post(COMPLETIONS, json={**body, "n": 3})).status_code == 200
    refused = await house.http.post(COMPLETIONS, json={**body, "n": 4})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, param)


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
async def test_many_logprobs_are_told_beside_the_event_loop(
    house: Any, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    form = chat_form.ChatForm if path == CHAT else completion_form.CompletionForm
    whole, threads = form.whole, []

    def noted(self: Any, *given: Any) -> Any:
        threads.append(threading.current_thread())
        return whole(self, *given)

    monkeypatch.setattr(form, "whole", noted)
    body = {"messages": HELLO, "logprobs": True} if path == CHAT else {"prompt": "Hello", "logprobs": 0}
    answers = []
    for many in (1000, 1):
        monkeypatch.setattr(reply, "MANY_LOGPROBS", many)
        answer = await house.http.post(path, json={"model": "tiny", "max_tokens": 30, **body})
        answers.append(answer.json()["choices"])
    assert answers[0] == answers[1]
    assert [thread is threading.main_thread() for thread in threads] == [True, False]
