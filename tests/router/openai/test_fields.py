"""Fields beyond the plainest: what reaches the worker, and what the client sees of it."""

from __future__ import annotations

from typing import Any

import pytest
from openai.types import Completion
from openai.types.chat import ChatCompletion

from tandem.router.scripted_worker import Conversation
from tandem.workers.protocol import Submit

HELLO: list[Any] = [{"role": "user", "content": "Hi"}]
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"


@pytest.fixture
async def house(open_house: Any, saying: Any) -> Any:
    return await open_house(saying("Yes, indeed. No."))


async def post(house: Any, path: str = COMPLETIONS, status: int = 200, **fields: Any) -> Any:
    question: dict[str, Any] = {"messages": HELLO} if path == CHAT else {"prompt": "Well"}
    response = await house.http.post(path, json={"model": "tiny", **question, **fields})
    assert response.status_code == status, response.text
    return response.json()


def sampling(house: Any) -> Any:
    return next(m for m in reversed(house.workers["decode-0"].received) if isinstance(m, Submit)).request.sampling


async def test_constraints_reach_the_worker(house: Any, tokenizer: Any) -> None:
    await post(house, logit_bias={"7": -100, "9": 1.5}, allowed_token_ids=[9, 7, 2, 9], bad_words=["the"], min_tokens=3)
    params = sampling(house)
    assert params.logit_bias == ((7, -100.0), (9, 1.5))
    assert params.allowed_token_ids == (2, 7, 9)
    assert params.min_tokens == 3
    texts = {tokenizer.text_of(ids) for ids in params.bad_token_ids}
    assert texts == {"the", " the"}


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"logit_bias": {"400": 1}}, "logit_bias"),
        ({"logit_bias": {"-1": 1}}, "logit_bias"),
        ({"logit_bias": {"²": 1}}, "logit_bias"),
        ({"logit_bias": {"7": 101}}, "logit_bias.7"),
        ({"logit_bias": {str(number): 1 for number in range(1025)}}, "logit_bias"),
        ({"allowed_token_ids": []}, "allowed_token_ids"),
        ({"allowed_token_ids": [400]}, "allowed_token_ids"),
        ({"bad_words": [""]}, "bad_words[0]"),
        ({"min_tokens": 9, "max_tokens": 8}, "min_tokens"),
        ({"structured_outputs": {}}, "structured_outputs"),
        ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs"),
        ({"structured_outputs": {"json": "{"}}, "structured_outputs.json"),
        ({"priority": -1}, "priority"),
        ({"priority": 101}, "priority"),
        ({"priority": 1.5}, "priority"),
        ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
        ({"stream_options": {"include_obfuscation": True}, "stream": True}, "stream_options.include_obfuscation"),
        ({"beam_width": 65}, "beam_width"),
    ],
)  # fmt: skip
async def test_refusals(doorstep: Any, path: str, fields: Any, param: str) -> None:
    body = await post(doorstep, path, 400, **fields)
    assert body["error"]["param"] == param


@pytest.mark.parametrize(
    ("fields", "part"),
    [
        ({"structured_outputs": {"json": {"type": "integer"}}}, '"integer"'),
        ({"structured_outputs": {"json": '{"type": "integer"}'}}, '"integer"'),
        ({"structured_outputs": {"regex": "[0-9]+"}}, "[0-9]+"),
        ({"structured_outputs": {"choice": ["yes", "no"]}}, '"yes"'),
        ({"structured_outputs": {"grammar": 'start: "a"'}}, 'start: "a"'),
        ({"structured_outputs": {"json_object": True}}, "object"),
    ],
)
async def test_forms_of_answers(house: Any, fields: Any, part: str) -> None:
    for path in (CHAT, COMPLETIONS):
        await post(house, path, **fields)
        assert part in sampling(house).grammar


async def test_response_format(house: Any, strictly: Any) -> None:
    schema = {"name": "n", "schema": {"type": "object", "properties": {"q": {"type": "string"}}}, "strict": True}
    body = await post(house, CHAT, response_format={"type": "json_schema", "json_schema": schema})
    strictly(ChatCompletion, body)
    assert '"q"' in sampling(house).grammar
    await post(house, CHAT, response_format={"type": "json_object"})
    assert "object" in sampling(house).grammar
    await post(house, CHAT, response_format={"type": "text"})
    assert sampling(house).grammar is None
    both = {"response_format": {"type": "json_object"}, "structured_outputs": {"regex": "a"}}
    assert (await post(house, CHAT, 400, **both))["error"]["param"] == "structured_outputs"


async def test_fields_that_change_nothing_by_the_apis_own_words(house: Any) -> None:
    labels = {
        "metadata": {"a": "b"}, "user": "me", "safety_identifier": "x", "prompt_cache_key": "k",
        "service_tier": "auto", "store": False, "prompt_cache_retention": "in_memory",
    }  # fmt: skip
    await post(house, CHAT, **labels)
    for field, value in (("service_tier", "flex"), ("store", True), ("metadata", {"a": 1}), ("user", "x" * 600)):
        assert (await post(house, CHAT, 400, **{field: value}))["error"]["param"].startswith(field)


async def test_the_stop_string_may_stay(house: Any) -> None:
    for include, text in ((None, "Yes"), (False, "Yes"), (True, "Yes, in")):
        body = await post(house, stop=[", in", "zz"], include_stop_str_in_output=include, max_tokens=30)
        assert (body["choices"][0]["text"], body["choices"][0]["finish_reason"]) == (text, "stop")


async def test_control_tokens_may_be_shown(house: Any) -> None:
    body = await post(house, max_tokens=30, skip_special_tokens=False, ignore_eos=True)
    assert body["choices"][0]["text"].startswith("Yes, indeed. No.<|im_end|>")
    body = await post(house, max_tokens=30, skip_special_tokens=False, include_stop_str_in_output=True)
    assert body["choices"][0]["text"] == "Yes, indeed. No.<|im_end|>"
    assert (await post(house, max_tokens=30))["choices"][0]["text"] == "Yes, indeed. No."


async def test_echo(house: Any, strictly: Any) -> None:
    body = await post(house, prompt=["Well ", "So"], n=2, echo=True, max_tokens=30)
    texts = [choice.text for choice in strictly(Completion, body).choices]
    assert texts == ["Well Yes, indeed. No."] * 2 + ["SoYes, indeed. No."] * 2
    stream = await house.client.completions.create(model="tiny", prompt="Well ", echo=True, stream=True, max_tokens=30)
    assert "".join([chunk.choices[0].text async for chunk in stream]) == "Well Yes, indeed. No."


async def test_the_echoed_prompt_is_scored(house: Any, tokenizer: Any, strictly: Any) -> None:
    body = await post(house, prompt=["Grüße, ", "So"], echo=True, logprobs=2, max_tokens=30)
    for choice in body["choices"]:
        logprobs = choice["logprobs"]
        assert {len(each) for each in logprobs.values()} == {len(logprobs["tokens"])}
        # the API's null, where its client's types have none
        assert (logprobs["token_logprobs"].pop(0), logprobs["top_logprobs"].pop(0)) == (None, None)
        for token, offset in zip(logprobs["tokens"][:-1], logprobs["text_offset"], strict=False):
            assert token.startswith("bytes:") or choice["text"][offset:].startswith(token)
    strictly(Completion, body)


async def test_the_prompt_alone(house: Any) -> None:
    """As evaluation harnesses ask for the likelihood of a text."""
    body = await post(house, prompt=[40, 41, 42], echo=True, logprobs=1, max_tokens=0)
    choice = body["choices"][0]
    assert choice["text"] == house.gateway._house.tokenizer.text_of([40, 41, 42])
    assert (len(choice["logprobs"]["tokens"]), choice["finish_reason"]) == (3, "length")
    assert (body["usage"]["prompt_tokens"], body["usage"]["completion_tokens"]) == (3, 0)
    assert (await post(house, status=400, max_tokens=0))["error"]["param"] == "max_tokens"


async def test_prompt_logprobs(house: Any, tokenizer: Any) -> None:
    body = await post(house, prompt=[40, 41], prompt_logprobs=1)
    scored = body["choices"][0]["prompt_logprobs"]
    assert scored[0] is None
    assert scored[1]["41"] == {"logprob": -0.5, "rank": 1, "decoded_token": tokenizer.text_of([41])}
    body = await post(house, CHAT, prompt_logprobs=0)
    assert len(body["prompt_logprobs"]) == body["usage"]["prompt_tokens"]


async def test_beams(house: Any) -> None:
    await post(house, beam_width=4, n=2, length_penalty=0.5, early_stopping=True)
    params = sampling(house)
    assert (params.beam_width, params.length_penalty, params.early_stopping) == (4, 0.5, True)
    assert (await post(house, status=400, beam_width=2, n=3))["error"]["param"] == "n"
    assert (await post(house, status=400, length_penalty=2))["error"]["param"] == "length_penalty"
    assert (await post(house, CHAT, 400, early_stopping="never"))["error"]["param"] == "early_stopping"


async def test_the_best_of_several(open_house: Any, tokenizer: Any, strictly: Any) -> None:
    answers = [tokenizer.encode(text, add_special_tokens=False) for text in ("a", "b", "c", "d")]
    logprobs = [-3.0, -1.0, -2.0, -4.0]

    async def script(conversation: Conversation) -> None:
        conversation.start()
        for choice in conversation.request.choices:
            chunk = conversation.chunk(choice.index, answers[choice.index], "length")
            assert chunk.logprobs is not None
            scored = tuple(type(each)(logprob=logprobs[choice.index]) for each in chunk.logprobs)
            conversation.say(type(chunk)(**{**as_dict(chunk), "logprobs": scored}))

    house = await open_house(script)
    body = await post(house, n=2, best_of=4, max_tokens=1)
    choices = strictly(Completion, body).choices
    assert [(choice.index, choice.text, choice.logprobs) for choice in choices] == [(0, "b", None), (1, "c", None)]
    assert body["usage"]["completion_tokens"] == 4
    assert (await post(house, status=400, n=2, best_of=1))["error"]["param"] == "best_of"
    assert (await post(house, status=400, best_of=2, stream=True))["error"]["param"] == "best_of"


def as_dict(chunk: Any) -> dict[str, Any]:
    return {name: getattr(chunk, name) for name in chunk.__struct_fields__}


async def test_prompts_are_words_and_may_be_shortened(house: Any, tokenizer: Any) -> None:
    body = await post(house, prompt="a<|im_end|>b", return_token_ids=True)
    assert 2 not in body["choices"][0]["prompt_token_ids"]
    body = await post(house, prompt=[7, 8, 9], truncate_prompt_tokens=2, return_token_ids=True)
    assert body["choices"][0]["prompt_token_ids"] == [8, 9]
    assert body["usage"]["prompt_tokens"] == 2


async def test_the_template_is_given_what_it_reads(open_house: Any, saying: Any, tmp_path: Any) -> None:
    template = tmp_path / "template.jinja"
    template.write_text(
        "{{ mood }}/{{ enable_thinking }}/{{ messages[0].content }}{% if add_generation_prompt %}>{% endif %}"
    )
    house = await open_house(saying("Yes."), chat_template=template)

    async def told(**fields: Any) -> str:
        body = await post(house, CHAT, return_token_ids=True, **fields)
        return str(house.gateway._house.tokenizer.text_of(body["prompt_token_ids"]))

    assert await told(chat_template_kwargs={"mood": "glad"}) == "glad//Hi>"
    assert await told(reasoning_effort="none") == "/False/Hi>"
    assert await told(reasoning_effort="high", add_generation_prompt=False) == "/True/Hi"
    refused = await post(house, CHAT, 400, chat_template_kwargs={"other": 1})
    assert refused["error"]["param"] == "chat_template_kwargs.other"
    refused = await post(house, CHAT, 400, chat_template_kwargs={"messages": []})
    assert refused["error"]["param"] == "chat_template_kwargs"
    refused = await post(house, CHAT, 400, messages=[{"role": "user", "content": "Hi", "name": "me"}])
    assert refused["error"]["param"] == "messages[0].name"


async def test_an_answer_goes_on_with_a_message(house: Any) -> None:
    messages = [*HELLO, {"role": "assistant", "content": "Well, "}]
    body = await post(house, CHAT, messages=messages, continue_final_message=True, return_token_ids=True)
    text = house.gateway._house.tokenizer.text_of(body["prompt_token_ids"])
    assert text.endswith("<|im_start|>assistant\nWell, ")
    refused = await post(house, CHAT, 400, continue_final_message=True)
    assert refused["error"]["param"] == "continue_final_message"


async def test_effort_where_nobody_thinks(doorstep: Any, house: Any) -> None:
    assert (await post(doorstep, CHAT, 400, reasoning_effort="high"))["error"]["param"] == "reasoning_effort"
    await post(house, CHAT, reasoning_effort="none")
