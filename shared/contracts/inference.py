"""Requests to an engine and what streams back.

The gateway publishes `InferRequest` on the instance's `infer` subject with `reply =
subjects.reply(gateway, request_id)`. Everything returns there, numbered from 0 without gaps by
`seq`, in one of two forms, whichever the engine has:

Tokens (`chat`, `completion`, `embedding`): one `InferStarted`, any number of `InferChunk` or
`EmbeddingsPart`, then `InferFinished` or `EmbeddingsFinished`.

HTTP (any endpoint; the only form of `other`): one `InferResponse`, any number of `InferData`, then
`InferEnd`. The client gets status, content type and bytes as they are, an error status too.
`InferStarted` may precede it. `InferRaw` is the short form of all three.

`InferYielded` ends either form when the engine was asked to stop there (`YieldInfer`): the part of
the answer sent so far is what another engine resumes (`InferRequest.resume`).

`InferFailed` ends either form, at any point, when the engine broke. A refusal to take the request
at all (`instance_draining`) is an `InferFailed` with number 0. Without a subscriber, NATS itself
answers on the reply subject with a 503 header. `CancelInfer` goes to the engine's control subject;
a cancelled request ends without a last message.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, TypeAdapter

from shared.contracts.base import Deadline, ErrorBody, Frozen, Message, Request
from shared.contracts.models import ModelCard
from shared.contracts.objectives import ObjectiveStanding
from shared.contracts.phases import PhaseSpan
from shared.contracts.request_body import HeldBody

Endpoint = Literal["chat", "completion", "embedding", "other"]
"""`other`: a route of `ModelCard.routes`, which only the engine understands; asked by
`InferRequest.route`.
"""
FinishReason = Literal["stop", "length", "tool_calls", "content_filter"]
DATA_BYTES = 256 * 1024
"""Most bytes in one `InferData` (before base64): far under any server's message limit, large enough
that the count of messages is none of a long answer's cost.
"""


RESUME = "resume"
"""The `param` of a refusal to resume an answer: another engine may."""


class ResumedChoice(Frozen):
    """One choice as far as it was made.

    An engine that resumes it sends what follows `token_ids`, and `text_chars` characters of text
    (the tokens may have made more, which was held back: an incomplete character, the beginning of a
    stop string).
    """

    index: int = 0
    token_ids: tuple[int, ...] = ()
    text_chars: int = 0
    finish_reason: FinishReason | None = Field(default=None, description="It is complete, and must not be resumed.")


class Resume(Frozen):
    """Resume an answer that another engine of the same weights has begun.

    Messages are numbered from 0 again; `usage` counts everything.
    """

    revision: str = Field(description="Of the weights; any other refuses (`conflict`).")
    choices: tuple[ResumedChoice, ...]
    prompt_tokens: int = Field(description="As the first engine counted; one that counts otherwise refuses (`conflict`).")
    seed: int | None = Field(default=None, description="`InferStarted.seed`: the stream of random numbers continues, too.")
    prepared: str = Field(default="", description="Keys and values that `PrepareResume` has made of it here.")
    head: dict[str, Any] = Field(
        default={}, description="Of an answer in HTTP's form: what its parts have in common, as id and created."
    )
    takes_kept_tokens: bool = Field(default=False, description="The gateway understands `InferResponse.kept_tokens`.")


class FairShare(Frozen):
    """Whose share of a model a request uses."""

    flow: str = Field(default="", max_length=64, description="Opaque id of the API key; empty: no key. The same in all gateways.")
    weight: float = Field(default=1.0, gt=0, description="Share relative to other keys.")
    priority: int = Field(default=0, description="Higher ones go first.")


class InferRequest(Request):
    deadline_ms: Deadline = 600_000
    kind: Literal["infer", "infer_held"] = Field(
        default="infer", description="`infer_held`: with `held`, which hosts of the previous version refuse instead of ignoring it."
    )
    request_id: str
    instance_id: str
    model: str
    endpoint: Endpoint
    body: dict[str, Any] = Field(default={}, description="The validated JSON request, unknown fields included; empty with `data`.")
    route: str = Field(default="", description="With `other`: the path that was asked, as `/v1/rerank`.")
    adapter: ModelCard | None = Field(default=None, description="The LoRA adapter of `model` to answer with.")
    method: str = Field(default="POST", description="With `other`: the HTTP method.")
    query: str = Field(default="", description="With `other`: the query string, without its question mark.")
    headers: dict[str, str] = Field(
        default={}, description="With `other`: the client's headers that belong to the API (FORWARDED), in lower case."
    )
    content_type: str = Field(default="application/json", description="Of `data`, with a form's boundary.")
    data: str | None = Field(
        default=None, description="The body's bytes in base64, where it is no JSON (a form with a file); `body` is empty then."
    )
    held: HeldBody | None = Field(
        default=None,
        description="The gateway holds the body, which exceeds a message: the host reads it from there (`ReadBodyPart`). `body` is the outline "
        "of a JSON body.",
    )
    resume: Resume | None = Field(default=None, description="The answer was begun elsewhere.")
    standing: ObjectiveStanding | None = Field(
        default=None, description="How many requests of `model` met its objective; None: no objective, or none has ended."
    )
    share: FairShare = Field(default=FairShare(), description="By which an engine orders the requests that wait in it.")


FORWARDED = ("accept", "openai-beta", "anthropic-version", "anthropic-beta")
"""Headers of an `other` request that reach the engine. The client's key never does."""


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
    """The new part of one choice.

    `text` may lag behind `token_ids` while a character is incomplete or a stop string may be
    starting; all the text of all deltas is the answer, and all their token ids are what the model
    generated.
    """

    index: int = 0
    text: str = ""
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] | None = None
    finish_reason: FinishReason | None = None


class Usage(Frozen):
    prompt_tokens: int
    completion_tokens: int = 0
    cached_tokens: int = 0
    device_s: float = Field(
        default=0.0,
        ge=0,
        description="Seconds that this engine's devices computed for the request, by its tokens in each step; of a hosted engine its "
        "share of the time that the engine had requests; 0: not measured.",
    )


class InferStarted(Message):
    """The engine has admitted the request.

    `phases` end when this was sent (times relative to the sending).
    """

    kind: Literal["started"] = "started"
    seq: int = 0
    prompt_tokens: int
    phases: tuple[PhaseSpan, ...] = ()
    ignored: tuple[str, ...] = Field(default=(), description="Fields of the body that the engine knows no meaning for.")
    prompt_token_ids: tuple[int, ...] | None = None
    fixed: str = Field(
        default="", description="Why no other engine could resume this answer; empty: another engine can, from its tokens."
    )
    seed: int | None = Field(default=None, description="The seed that tokens are sampled with, chosen by the client or the engine.")
    tool_format: str | None = Field(
        default=None,
        max_length=64,
        description="The text may have tool calls in this form (`ToolFormat`), which the gateway divides from it; None: it has none. A "
        "gateway takes a form that it does not know for text.",
    )


class InferChunk(Message):
    kind: Literal["chunk"] = "chunk"
    seq: int
    choices: tuple[ChoiceDelta, ...]
    phases: tuple[PhaseSpan, ...] = Field(default=(), description="On the first chunk: prefill. Relative to its sending.")
    device_s: float = Field(default=0.0, ge=0, description="`Usage.device_s` so far.")


class InferFinished(Message):
    kind: Literal["finished"] = "finished"
    seq: int
    usage: Usage


class EmbeddingsPart(Message):
    """The first vectors of a response that is too large for one message.

    `EmbeddingsFinished` has the last vectors. A gateway of the previous version does not understand
    this message; such a response failed there before, too.
    """

    kind: Literal["vectors"] = "vectors"
    seq: int
    vectors: tuple[str, ...]


class EmbeddingsFinished(Message):
    kind: Literal["embeddings"] = "embeddings"
    seq: int
    dimensions: int
    vectors: tuple[str, ...] = Field(description="One base64 little-endian float32 vector for each input.")
    usage: Usage


class InferResponse(Message):
    """The head of an HTTP answer. `phases` are relative to its sending."""

    kind: Literal["response"] = "response"
    seq: int = 0
    status: int = Field(ge=100, le=599)
    content_type: str = "application/json"
    headers: dict[str, str] = Field(default={}, description="Others that the client is to get, in lower case, as retry-after.")
    phases: tuple[PhaseSpan, ...] = ()
    fixed: str = Field(default="not known", description="As of `InferStarted`.")
    seed: int | None = None
    prompt_tokens: int = 0
    resume_head: dict[str, Any] = Field(default={}, description="What `Resume.head` is to be.")
    kept_tokens: int | None = Field(
        default=None,
        ge=0,
        description="Of a resumed answer, with `Resume.takes_kept_tokens`: so many of the tokens in `Resume.choices` are still part of it. "
        "`InferData.progress` has those that the engine generates in place of the others, which replace them from the first text on. None: "
        "all are.",
    )


class InferData(Message):
    """More bytes of an HTTP answer, at most DATA_BYTES, sent as they arrive.

    `progress`: their tokens, of an answer that another engine could resume.
    """

    kind: Literal["data"] = "data"
    seq: int
    data: str = Field(description="Base64.")
    phases: tuple[PhaseSpan, ...] = Field(default=(), description="On the first: prefill. Relative to its sending.")
    progress: tuple[ChoiceDelta, ...] = ()
    device_s: float = Field(default=0.0, ge=0, description="`Usage.device_s` so far; 0: not in this message.")


class InferEnd(Message):
    """An HTTP answer is complete, whatever its status.

    `usage`: as far as the engine's answer has it.
    """

    kind: Literal["end"] = "end"
    seq: int
    usage: Usage = Usage(prompt_tokens=0)


class InferRaw(Message):
    """A whole HTTP answer with status 200 and a JSON body."""

    kind: Literal["raw"] = "raw"
    seq: int
    body: Any = Field(description="JSON that the client gets as it is.")
    usage: Usage = Usage(prompt_tokens=0)


class InferFailed(Message):
    kind: Literal["failed"] = "failed"
    seq: int
    error: ErrorBody
    engine_lost: bool = Field(
        default=False,
        description="The engine broke down under the request: another instance may answer what no client has seen of it.",
    )


class InferYielded(Message):
    """Report that the engine has stopped at a `YieldInfer`; its last token was sent."""

    kind: Literal["yielded"] = "yielded"
    seq: int


Answered = InferFinished | EmbeddingsFinished | InferRaw | InferEnd
"""The last message of a request that went well."""
InferReply = Annotated[
    InferStarted | InferChunk | EmbeddingsPart | InferResponse | InferData | Answered | InferYielded | InferFailed,
    Field(discriminator="kind"),
]
INFER_REPLY: TypeAdapter[InferReply] = TypeAdapter(InferReply)
