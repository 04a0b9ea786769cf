"""Scripted conversations by programs of others, each the way its own manual has it. Runs in their environment.

    python converse.py URL

URL is that of `serve_scripted.py`. Ends with the first assertion that fails.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

GREETING = "Hello there, friend 🙂."
SUNNY = "It is sunny in Bern."
QUESTION = "What is the weather in Bern?"
HELLO: list[Any] = [{"role": "user", "content": "Hello!"}]
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOL: dict[str, Any] = {
    "type": "function",
    "function": {"name": "get_weather", "description": "The weather.", "parameters": PARAMETERS},
}


def refusal_of(kind: type[Exception], ask: Callable[[], Any]) -> str:
    try:
        ask()
    except kind as error:
        return str(error)
    raise AssertionError("it went through")


def with_litellm(url: str) -> None:
    import litellm

    common: dict[str, Any] = {"model": "openai/tiny", "api_base": f"{url}/v1", "api_key": "secret"}
    assert litellm.completion(**common, messages=HELLO).choices[0].message.content == GREETING
    chunks = litellm.completion(**common, messages=HELLO, stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == GREETING
    messages: list[Any] = [{"role": "user", "content": QUESTION}]
    first = litellm.completion(**common, messages=messages, tools=[TOOL]).choices[0].message
    call = first.tool_calls[0]
    assert json.loads(call.function.arguments) == {"city": "Bern"}
    messages += [first.model_dump(), {"role": "tool", "tool_call_id": call.id, "content": "sunny"}]
    assert litellm.completion(**common, messages=messages, tools=[TOOL]).choices[0].message.content == SUNNY
    refused = refusal_of(litellm.BadRequestError, lambda: litellm.completion(**common, messages=HELLO, temperature=7))
    assert "temperature" in refused
    embedded = litellm.embedding(**common, input=["Hello!", "there"], encoding_format="float")
    assert [len(one["embedding"]) for one in embedded.data] == [8, 8]


def with_langchain(url: str) -> None:
    from langchain_core.messages import HumanMessage, ToolMessage
    from langchain_core.tools import tool
    from langchain_openai import ChatOpenAI, OpenAIEmbeddings
    from pydantic import BaseModel

    @tool
    def get_weather(city: str) -> str:
        """The weather in a city."""
        return f"sunny in {city}"

    class Person(BaseModel):
        name: str
        age: int

    model = ChatOpenAI(model="tiny", base_url=f"{url}/v1", api_key="secret")
    assert model.invoke("Hello!").content == GREETING
    assert "".join(str(chunk.content) for chunk in model.stream("Hello!")) == GREETING
    agent = model.bind_tools([get_weather])
    messages: list[Any] = [HumanMessage(QUESTION)]
    answer = agent.invoke(messages)
    call = answer.tool_calls[0]
    assert (call["name"], call["args"]) == ("get_weather", {"city": "Bern"})
    messages += [answer, ToolMessage(get_weather.invoke(call["args"]), tool_call_id=call["id"])]
    assert agent.invoke(messages).content == SUNNY
    for method in ("json_schema", "function_calling"):
        person = model.with_structured_output(Person, method=method).invoke("Who? Person, please.")
        assert person == Person(name="Ada", age=36), (method, person)
    # the check would make tokens of another model's of the text, and send these
    common: dict[str, Any] = {"base_url": f"{url}/v1", "api_key": "secret", "check_embedding_ctx_length": False}
    embeddings = OpenAIEmbeddings(model="tiny", **common)
    assert [len(vector) for vector in embeddings.embed_documents(["Hello!"] * 1500)] == [8] * 1500
    assert len(OpenAIEmbeddings(model="tiny", dimensions=4, **common).embed_query("Hello!")) == 4


def with_instructor(url: str) -> None:
    import instructor
    import openai
    from pydantic import BaseModel

    class Person(BaseModel):
        name: str
        age: int

    for mode in (instructor.Mode.TOOLS, instructor.Mode.JSON_SCHEMA):
        client = instructor.from_openai(openai.OpenAI(base_url=f"{url}/v1", api_key="secret"), mode=mode)
        question: list[Any] = [{"role": "user", "content": "Who? Person, please."}]
        person = client.chat.completions.create(model="tiny", messages=question, response_model=Person, max_retries=0)
        assert (person.name, person.age) == ("Ada", 36), mode


def with_llm(url: str) -> None:
    """The command line, with a model described in its own file."""
    described = {"model_id": "tandem", "model_name": "tiny", "api_base": f"{url}/v1", "api_key_name": "tandem"}
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "extra-openai-models.yaml").write_text(json.dumps([described | {"supports_tools": True}]))
        Path(folder, "keys.json").write_text('{"tandem": "secret"}')
        environment = os.environ | {"LLM_USER_PATH": folder}
        llm = [sys.executable, "-m", "llm", "-m", "tandem"]
        for options in ([], ["--no-stream"]):
            assert output_of([*llm, *options, "Hello!"], environment) == GREETING
        code = "def get_weather(city: str) -> str:\n    'The weather.'\n    return 'sunny'\n"
        assert output_of([*llm, "--functions", code, QUESTION], environment) == SUNNY


def output_of(command: list[str], environment: dict[str, str]) -> str:
    run = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    assert run.returncode == 0, run.stderr
    return run.stdout.strip()


def with_anthropic(url: str) -> None:
    import anthropic

    client = anthropic.Anthropic(base_url=url, api_key="secret", max_retries=0)
    message = client.messages.create(model="tiny", max_tokens=100, messages=HELLO)
    assert message.content[0].text == GREETING
    with client.messages.stream(model="tiny", max_tokens=100, messages=HELLO) as stream:
        assert "".join(stream.text_stream) == GREETING
        assert stream.get_final_message().stop_reason == "end_turn"
    tool: Any = {"name": "get_weather", "description": "The weather.", "input_schema": PARAMETERS}
    messages: list[Any] = [{"role": "user", "content": QUESTION}]
    with client.messages.stream(model="tiny", max_tokens=200, messages=messages, tools=[tool]) as stream:
        first = stream.get_final_message()
    call = first.content[-1]
    assert (first.stop_reason, call.name, call.input) == ("tool_use", "get_weather", {"city": "Bern"})
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "sunny"}
    messages += [{"role": "assistant", "content": first.content}, {"role": "user", "content": [result]}]
    final = client.messages.create(model="tiny", max_tokens=100, messages=messages, tools=[tool])
    assert final.content[0].text == SUNNY
    assert client.messages.count_tokens(model="tiny", messages=HELLO).input_tokens > 5
    refused = refusal_of(
        anthropic.BadRequestError, lambda: client.messages.create(model="tiny", max_tokens=0, messages=HELLO)
    )
    assert "max_tokens" in refused


CONVERSATIONS: dict[str, Callable[[str], None]] = {
    "litellm": with_litellm,
    "langchain-openai": with_langchain,
    "instructor": with_instructor,
    "llm": with_llm,
    "anthropic": with_anthropic,
}


def main() -> None:
    for name, converse in CONVERSATIONS.items():
        converse(sys.argv[1])
        sys.stdout.write(f"{name}: as it should be\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
