"""Requests to an engine and what streams back.

The gateway publishes `InferRequest` on the instance's `infer` subject with `reply = subjects.reply(gateway, request_id)`. Everything
comes back there, numbered from 0 without gaps by `seq`: one `InferStarted`, any number of `InferChunk`, and exactly one last message,
`InferFinished`, `EmbeddingsFinished`, `InferRaw` or `InferFailed`. With nobody listening, NATS itself answers on the reply subject with a 503 header.
`CancelInfer` goes to the engine's control subject; a cancelled request ends without a last message.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, TypeAdapter

from shared.contracts.base import ErrorBody, Frozen, Message, Request
from shared.contracts.phases import PhaseSpan

Endpoint = Literal["chat", "completion", "embedding", "other"]
"""`other`: a route of `ModelCard.routes`, which only the engine understands; asked by `InferRequest.route`, answered by `InferRaw`."""
FinishReason = Literal["stop", "length", "tool_calls", "content_filter"]


class InferRequest(Request):
    DEADLINE_MS: ClassVar[int] = 600_000
    kind: Literal["infer"] = "infer"
    request_id: str
    instance_id: str
    model: str
    endpoint: Endpoint
    body: dict[str, Any] = Field(description="The validated OpenAI request, unknown fields included.")
    route: str = Field(default="", description="With `other`: the path that was asked, as `/v1/rerank`.")


class CancelInfer(Request):
    """Stop generating for `request_id`; harmless if it is not there (any more)."""

    kind: Literal["cancel"] = "cancel"
    request_id: str


class TopLogprob(Frozen):
    token_id: int
    token: str
    logprob: float
    bytes: tuple[int, ...] = ()


class TokenLogprob(TopLogprob):
    top: tuple[TopLogprob, ...] = ()


class ChoiceDelta(Frozen):
    """What one choice gained. `text` may lag behind `token_ids` while a character is incomplete or a stop string may be starting;
    all the text of all deltas is the answer, and all their token ids are what the model generated."""

    index: int = 0
    text: str = ""
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] | None = None
    finish_reason: FinishReason | None = None


class Usage(Frozen):
    prompt_tokens: int
    completion_tokens: int = 0
    cached_tokens: int = 0


class InferStarted(Message):
    """The engine has admitted the request. `phases` end when this was sent (times relative to the sending)."""

    kind: Literal["started"] = "started"
    seq: int = 0
    prompt_tokens: int
    phases: tuple[PhaseSpan, ...] = ()
    ignored: tuple[str, ...] = Field(default=(), description="Fields of the body that the engine knows no meaning for.")
    prompt_token_ids: tuple[int, ...] | None = None


class InferChunk(Message):
    kind: Literal["chunk"] = "chunk"
    seq: int
    choices: tuple[ChoiceDelta, ...]
    phases: tuple[PhaseSpan, ...] = Field(default=(), description="On the first chunk: prefill. Relative to its sending.")


class InferFinished(Message):
    kind: Literal["finished"] = "finished"
    seq: int
    usage: Usage


class EmbeddingsFinished(Message):
    kind: Literal["embeddings"] = "embeddings"
    seq: int
    dimensions: int
    vectors: tuple[str, ...] = Field(description="One base64 little-endian float32 vector for each input.")
    usage: Usage


class InferRaw(Message):
    """The whole answer to a request of an `other` endpoint."""

    kind: Literal["raw"] = "raw"
    seq: int
    body: Any = Field(description="JSON that the client gets as it is.")
    usage: Usage = Usage(prompt_tokens=0)


class InferFailed(Message):
    kind: Literal["failed"] = "failed"
    seq: int
    error: ErrorBody


Answered = InferFinished | EmbeddingsFinished | InferRaw
"""The last message of a request that went well."""
InferReply = Annotated[InferStarted | InferChunk | Answered | InferFailed, Field(discriminator="kind")]
INFER_REPLY: TypeAdapter[InferReply] = TypeAdapter(InferReply)
