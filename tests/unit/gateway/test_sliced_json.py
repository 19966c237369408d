"""Large responses are built in time slices: embeddings, and texts that may have tool calls."""

from __future__ import annotations

import asyncio
import base64
import json
import struct
from collections.abc import AsyncIterator
from typing import Any

import pytest
from starlette.types import Message

from services.gateway.http.parsing import cooperative
from services.gateway.http.responses.buffered import BufferedEmbeddings
from services.gateway.http.responses.sliced_json import encode_in_slices
from services.gateway.http.responses.tool_deltas import ToolDeltas, ToolOptions
from services.gateway.http.responses.translated_send import TranslatedSend
from services.gateway.http.translation.ollama_requests import OllamaReply
from services.gateway.http.translation.ollama_responses import OllamaTranslator
from shared.compact_json import encode_json
from shared.contracts.inference import EmbeddingsFinished, Usage

VECTORS = 500
VALUES = (0.5, -1.25, 0.0)
ENCODED = base64.b64encode(struct.pack("<3f", *VALUES)).decode()


class Ticks:
    """Counts how often the event loop ran."""

    def __init__(self) -> None:
        self.count = 0

    async def run(self) -> None:
        while True:
            self.count += 1
            await asyncio.sleep(0)


@pytest.fixture
async def ticks(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Ticks]:
    monkeypatch.setattr(cooperative, "_SLICE_S", 0.0)
    counted = Ticks()
    task = asyncio.create_task(counted.run())
    yield counted
    task.cancel()


@pytest.mark.parametrize("as_floats", [True, False])
async def test_the_loop_runs_while_embeddings_are_encoded(ticks: Ticks, as_floats: bool) -> None:
    sink = BufferedEmbeddings("m", as_floats)
    sink.on_finished(
        EmbeddingsFinished(seq=0, vectors=(ENCODED,) * VECTORS, dimensions=3, usage=Usage(prompt_tokens=7, completion_tokens=0))
    )
    answer = json.loads(await sink.encode())
    assert ticks.count >= VECTORS
    vector = list(VALUES) if as_floats else ENCODED
    assert answer == {
        "object": "list",
        "data": [{"object": "embedding", "index": i, "embedding": vector} for i in range(VECTORS)],
        "model": "m",
        "usage": {"prompt_tokens": 7, "total_tokens": 7},
    }


async def test_the_loop_runs_while_embeddings_are_encoded_for_ollama(ticks: Ticks) -> None:
    sent: list[Message] = []
    done_at: list[int] = []

    async def send(message: Message) -> None:
        sent.append(message)

    class Counted(OllamaTranslator):
        async def translate_body(self, status: int, body: bytes, now: float) -> tuple[int, dict[str, Any]]:
            translated = await super().translate_body(status, body, now)
            done_at.append(ticks.count)
            return translated

    translated = TranslatedSend(send, Counted(OllamaReply("embed", "m"), 0.0))
    data = {"data": [{"embedding": [3.0, 4.0]}] * VECTORS, "usage": {"prompt_tokens": 7, "total_tokens": 7}}
    await translated({"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"application/json")]})
    await translated({"type": "http.response.body", "body": json.dumps(data).encode()})
    assert ticks.count - done_at[0] >= VECTORS
    assert json.loads(sent[1]["body"])["embeddings"] == [[0.6, 0.8]] * VECTORS


@pytest.mark.parametrize("data", [{}, {"a": []}, {"a": [1, {"b": ["é", None]}], "c": {"d": [1]}, "e": "text"}])
async def test_encoding_in_slices_gives_the_same_json(data: dict[str, Any]) -> None:
    assert await encode_in_slices(data) == encode_json(data)


async def test_the_loop_runs_while_a_long_text_is_searched_for_tool_calls(ticks: Ticks) -> None:
    tools = ToolDeltas(ToolOptions({"f": {}}), "id")
    tools.on_started("hermes")
    text = "word " * 20_000
    message, reason = await tools.message(0, text + '<tool_call>{"name": "f", "arguments": {}}</tool_call>', "stop")
    assert ticks.count >= len(text) // 1024
    assert (message["content"].rstrip(), reason) == (text.rstrip(), "tool_calls")
    assert [call["function"]["name"] for call in message["tool_calls"]] == ["f"]
