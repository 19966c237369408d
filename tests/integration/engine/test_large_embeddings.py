"""Embeddings whose response exceeds a NATS message."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from services.engine.server.serving import split_vectors
from shared.contracts.inference import EmbeddingsFinished, EmbeddingsPart
from tests.support.engines import Engines
from tests.support.servers import NatsServer

INPUTS = 1000


@pytest.fixture
def nats_server() -> Iterator[NatsServer]:
    """Start a NATS server whose maximum payload is a fifth of the response."""
    server = NatsServer(max_payload="80kB")
    yield server
    server.close()


async def test_a_response_over_the_message_limit_is_sent_in_parts(engines: Engines, instance: tuple[str, int]) -> None:
    texts = [str(i % 7) for i in range(INPUTS)]
    stream = await engines.answer(instance[0], "embedding", input=texts)
    done = stream.replies[-1]
    assert isinstance(done, EmbeddingsFinished), done
    parts = [r.vectors for r in stream.replies if isinstance(r, EmbeddingsPart)]
    assert len(parts) >= 4
    vectors = [v for part in (*parts, done.vectors) for v in part]
    assert len(vectors) == INPUTS
    # Other batch sizes round differently; the order is under test.
    assert len({v[:8] for v in vectors}) >= 7
    assert vectors[:7] == vectors[7:14]
    assert [r.seq for r in stream.replies] == list(range(len(stream.replies)))


def test_embedding_response_is_split_only_above_the_message_limit() -> None:
    vectors = tuple("x" * 97 for _ in range(1000))  # 100 bytes each with its quotes
    assert split_vectors(vectors, 101_024) == ([], vectors)
    first, last = split_vectors(vectors, 101_023)
    assert [len(part) for part in (*first, last)] == [999, 1]
    assert split_vectors((), 10_000) == ([], ())
    first, last = split_vectors(vectors, 500)  # the engine refuses to send a vector that exceeds a message
    assert all(len(part) == 1 for part in (*first, last))
