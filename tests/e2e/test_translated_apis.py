"""The real openai and anthropic clients against a real mesh, on routes that its engine lacks."""

from __future__ import annotations

from typing import Any, Literal

import anthropic
import openai
from pydantic import BaseModel

from tests.support.launcher import Thaw

SHARED = True
HELLO: list[Any] = [{"role": "user", "content": "Hello"}]
ASKED: dict[str, Any] = {"model": "one", "temperature": 0}


def chat(client: openai.OpenAI, messages: list[Any]) -> str | None:
    text: str | None = client.chat.completions.create(**ASKED, messages=messages, max_tokens=8).choices[0].message.content
    return text


def test_responses_have_the_text_of_chat_completions(client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {**ASKED, "input": "Hello", "max_output_tokens": 8}
    whole = client.responses.create(**asked)
    with client.responses.stream(**asked) as stream:
        events = list(stream)
    last = events[-1]
    assert last.type == "response.incomplete"
    deltas, streamed = [event.delta for event in events if event.type == "response.output_text.delta"], last.response
    assert whole.output_text == streamed.output_text == "".join(deltas) == chat(client, HELLO)
    assert whole.status == streamed.status == "incomplete"
    assert whole.usage == streamed.usage
    assert whole.usage is not None
    assert whole.usage.output_tokens == 8


def test_stored_response_is_continued(client: openai.OpenAI) -> None:
    first = client.responses.create(**ASKED, input="Hello", max_output_tokens=8)
    assert first.store
    second = client.responses.create(**ASKED, input="More", max_output_tokens=8, previous_response_id=first.id)
    conversation = [*HELLO, {"role": "assistant", "content": first.output_text}, {"role": "user", "content": "More"}]
    assert second.output_text == chat(client, conversation)
    assert client.responses.retrieve(second.id).output_text == second.output_text


def test_format_of_a_response_is_enforced(client: openai.OpenAI) -> None:
    class Size(BaseModel):
        name: Literal["small", "large"]

    response = client.responses.parse(**ASKED, input="Hello", text_format=Size, max_output_tokens=100)
    assert response.output_parsed in (Size(name="small"), Size(name="large"))


def test_messages_have_the_text_of_chat_completions(mesh: Thaw, client: openai.OpenAI) -> None:
    with anthropic.Anthropic(base_url=mesh.url, api_key="none", timeout=120) as messages:
        # This client has no parameter for the temperature any more.
        asked: dict[str, Any] = {"model": "one", "messages": HELLO, "max_tokens": 8, "extra_body": {"temperature": 0}}
        whole = messages.messages.create(**asked)
        with messages.messages.stream(**asked) as stream:
            streamed = stream.get_final_message()
    assert whole.content[0].text == streamed.content[0].text == chat(client, HELLO)
    assert whole.stop_reason == streamed.stop_reason == "max_tokens"
    assert streamed.usage.output_tokens == whole.usage.output_tokens == 8


def test_tokens_of_a_message_are_counted_as_the_engine_does(mesh: Thaw) -> None:
    asked: dict[str, Any] = {"model": "one", "system": "Be brief", "messages": HELLO}
    with anthropic.Anthropic(base_url=mesh.url, api_key="none", timeout=120) as client:
        counted = client.messages.count_tokens(**asked)
        assert counted.input_tokens == client.messages.create(**asked, max_tokens=1).usage.input_tokens
