"""The real ollama client against a real mesh, with the same answers as the openai client gets."""

from __future__ import annotations

from typing import Any

import openai
import pytest

from tests.support.launcher import Thaw, until

SHARED = True
HELLO: list[Any] = [{"role": "user", "content": "Hello"}]
ollama = pytest.importorskip("ollama")


def test_the_ollama_client_gets_the_answers_of_the_openai_client(mesh: Thaw, client: openai.OpenAI) -> None:
    own = ollama.Client(host=mesh.url, timeout=120)
    expected = client.chat.completions.create(model="one", messages=HELLO, temperature=0, max_tokens=8)
    options = {"temperature": 0, "num_predict": 8, "repeat_penalty": 1.0}
    whole = own.chat("one", HELLO, options=options)
    parts = list(own.chat("one", HELLO, options=options, stream=True))
    generated = own.generate("one", "Hello", options=options)
    texts = {whole.message.content, "".join(p.message.content for p in parts), generated.response}
    assert texts == {expected.choices[0].message.content}
    assert expected.usage is not None
    for last in (whole, parts[-1], generated):
        assert (last.done_reason, last.eval_count, last.prompt_eval_count) == ("length", 8, expected.usage.prompt_tokens)
    assert parts[-1].eval_duration > 0
    completion = client.completions.create(model="one", prompt="Once", temperature=0, max_tokens=8)
    assert own.generate("one", "Once", raw=True, options=options).response == completion.choices[0].text
    own._client.close()


def test_the_ollama_client_wakes_lists_and_embeds(mesh: Thaw, client: openai.OpenAI) -> None:
    own = ollama.Client(host=mesh.url, timeout=120)
    assert {m.model for m in own.list().models} >= {"one", "two", "three"}
    assert own.generate("two").done_reason == "load"
    until(lambda: any(m.model == "two" and m.size > 0 for m in own.ps().models), what="the running model is listed")
    vector = client.embeddings.create(model="two", input="some text").data[0].embedding
    assert own.embeddings("two", "some text").embedding == pytest.approx(vector)
    [unit] = own.embed("two", "some text").embeddings
    assert sum(x * x for x in unit) == pytest.approx(1)
    own._client.close()
