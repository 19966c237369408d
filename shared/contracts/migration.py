"""Define the messages that move a running request to another engine.

The tokens travel (ServerlessLLM §5); see docs/adr/0030-live-migration-by-tokens.md. Keys and values
may travel too, on a connection between the engines (`shared/contracts/kv_transfer.py`). There are
three conversations:

- Engines (`EngineControl`): list running requests (`ListRequests`), read the tokens generated so
  far (`ReadTokens`), precompute keys and values (`PrepareResume`, `ForgetResume`), and stop at the
  next token (`YieldInfer`; `InferYielded` is then the last message of the request's stream).
- Gateways: `MoveRequest` asks the gateway that holds a request to switch its route.
- Migrators: a `MigrationRecord` in the KV bucket `subjects.MIGRATIONS_BUCKET` is both the order and
  the state; the migrator that holds its lease works on it.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field, TypeAdapter

from shared.contracts.base import Deadline, ErrorBody, Frozen, Message, Request
from shared.contracts.inference import FinishReason
from shared.contracts.kv_transfer import KvOffer
from shared.contracts.models import ModelCard
from shared.contracts.states import FINAL as FINAL
from shared.contracts.states import MigrationState as MigrationState


class RunningChoice(Frozen):
    index: int = 0
    token_ids: tuple[int, ...] = Field(default=(), description="Generated so far.")
    finish_reason: FinishReason | None = None


class RunningRequest(Frozen):
    """A request that an engine serves.

    `fixed`: why it cannot be continued elsewhere; empty: it can.
    """

    request_id: str
    gateway_id: str
    prompt_tokens: int
    generated_tokens: int
    tokens_per_second: float = Field(default=0.0, description="Of each of its choices, measured.")
    choices: int = 1
    fixed: str = ""
    traceparent: str | None = Field(default=None, description="Of the request.")


class ListRequests(Request):
    """List the requests that the engine serves, including those in its queue.

    Answered with `RequestsListed`.
    """

    kind: Literal["list_requests"] = "list_requests"


class RequestsListed(Message):
    kind: Literal["requests_listed"] = "requests_listed"
    requests: tuple[RunningRequest, ...] = ()


class ReadTokens(Request):
    """Read a request's prompt and the tokens generated so far.

    Answered with `TokensRead`, or `not_found` if the request is over.
    """

    kind: Literal["read_tokens"] = "read_tokens"
    request_id: str
    offer_kv: bool = Field(default=False, description="Permit another engine to read the request's keys and values.")


class TokensRead(Message):
    kind: Literal["tokens_read"] = "tokens_read"
    running: RunningRequest
    prompt_token_ids: tuple[tuple[int, ...], ...] = Field(description="Of each choice, in their order.")
    choices: tuple[RunningChoice, ...] = ()
    adapter: ModelCard | None = None
    cache_salt: str = Field(
        default="", description="The part of the engine's prefix cache that the request uses; empty: without a salt."
    )
    kv: KvOffer | None = Field(default=None, description="With `offer_kv`; None: this engine sends no keys and values.")


class PrepareResume(Request):
    """Compute the keys and values of `sequences` and keep them as `prepared`.

    The engine computes them in chunks, with less priority than running requests. It keeps them
    until they are resumed or forgotten, or `keep_ms` have passed. For longer sequences in a
    repeated request it computes only the rest.

    The reply is `ResumePrepared` when everything is computed. The request fails with
    `insufficient_memory` without room for them, and with `unsupported_parameter` if this engine
    resumes from its own cache.
    """

    deadline_ms: Deadline = 60_000
    kind: Literal["prepare_resume"] = "prepare_resume"
    prepared: str = Field(description="A name that is the caller's own: the migration's id and the request's.")
    revision: str = Field(description="Of the weights; another one's are refused (`conflict`).")
    sequences: tuple[tuple[int, ...], ...]
    adapter: ModelCard | None = None
    cache_salt: str = Field(default="", description="As in `TokensRead`: the resumed request looks only there.")
    caused_by: str = Field(
        default="",
        description="The plan that needs the memory of the source: what is computed for it is charged to the requests that wait for it. "
        "Empty: none does.",
    )
    keep_ms: int = Field(default=30_000, gt=0)
    within_ms: int | None = Field(
        default=None,
        gt=0,
        description="Answered after that long with what was computed, if that is not all. Engines may not heed it.",
    )
    kv: KvOffer | None = Field(
        default=None,
        description="Read keys and values from that engine first, and compute the rest. The rest of the resumed request is read too.",
    )


class ResumePrepared(Message):
    kind: Literal["resume_prepared"] = "resume_prepared"
    tokens: int = Field(description="Computed by this call.")
    took_ms: float
    left: int = Field(default=0, description="Tokens of the sequences that are not computed yet.")
    kv_tokens: int = Field(default=0, ge=0, description="Tokens whose keys and values were received from the source by this call.")
    kv_bytes: int = Field(default=0, ge=0)
    kv_ms: float = Field(default=0.0, ge=0, description="The part of `took_ms` that receiving took.")
    kv_reason: str = Field(default="", description="Why receiving ended early; empty: it did not, or was not asked for.")


class ForgetResume(Request):
    """Drop what `PrepareResume` keeps. Harmless if there is nothing."""

    kind: Literal["forget_resume"] = "forget_resume"
    prepared: str


class YieldInfer(Request):
    """Stop generating for the request at the next token.

    The stream ends with `InferYielded`. The reply is `Done`, or `not_found` for a finished request.
    """

    kind: Literal["yield"] = "yield"
    request_id: str


class MoveRequest(Request):
    """Continue a request on another instance.

    Answered with `RequestMoved` when the first token has arrived from there; with `not_found` when
    the request is over, `conflict` when it cannot be moved, or not now (another move, no token
    yet), with the instance's error if it could not be resumed there (it then runs where it did, or
    anywhere else: nothing is lost).
    """

    deadline_ms: Deadline = 30_000
    kind: Literal["move_request"] = "move_request"
    request_id: str
    migration_id: str
    token: int = Field(
        description="Fencing token of the migration: an older one than the request has seen is refused (`stale_token`)."
    )
    source_instance: str
    instance_id: str
    prepared: str = ""


class RequestMoved(Message):
    kind: Literal["request_moved"] = "request_moved"
    instance_id: str = Field(description="Where it runs now.")
    tokens: int = Field(description="Generated when it was handed over.")
    pause_ms: float = Field(
        description="From the last token of the source to the first of the destination, as the gateway received them."
    )


GATEWAY_CONTROL: TypeAdapter[MoveRequest] = TypeAdapter(MoveRequest)


class FindRequest(Request):
    """Find the request that a client knows by `x-request-id`.

    Answered with `RequestFound` by the gateway that holds it; other gateways stay silent.
    """

    deadline_ms: Deadline = 1_000
    kind: Literal["find_request"] = "find_request"
    request_id: str


class RequestFound(Message):
    kind: Literal["request_found"] = "request_found"
    gateway_id: str
    request_id: str = Field(description="Its own name: those of its attempts have a number behind it.")
    instance_id: str | None = Field(default=None, description="None: it waits for an instance.")
    model: str = ""


class MigrationRound(Frozen):
    """One recomputation or transfer. Durations in milliseconds."""

    request_id: str
    number: int
    tokens: int = Field(description="Recomputed by this round.")
    took_ms: float
    gap: int = Field(description="Tokens that the destination then lacked: generated meanwhile, or not reached.")
    start_ms: float = Field(default=0.0, description="Since the owner had taken the migration up.")
    kv_tokens: int = Field(default=0, description="Keys and values of so many tokens were sent by the source.")
    kv_bytes: int = 0
    kv_reason: str = Field(
        default="", description="Why fewer were sent than asked for; empty: they were not, or none was asked for."
    )


class MovedRequest(Frozen):
    """The outcome of one request."""

    request_id: str
    outcome: Literal["moving", "moved", "finished", "elsewhere", "fixed", "failed"] = "moving"
    tokens: int = 0
    pause_ms: float | None = None
    predicted_ms: float | None = Field(default=None, description="a·(t_in + t_out) + b, when it began.")
    reason: str = ""
    start_ms: float = Field(default=0.0, description="When it began, since the owner had taken the migration up.")
    took_ms: float | None = Field(default=None, description="Until its outcome was known.")


class MigrationRecord(Message):
    """An order to move one request, or all requests of an instance, and its progress.

    Written with compare-and-set only.

    `owner` works on it; its lease is over when the record has not changed for `LEASE_S` by the
    watcher's own clock (clocks are not compared).
    """

    kind: Literal["migration"] = "migration"
    migration_id: str
    token: int
    model: str
    revision: str
    source_instance: str
    source_node: str
    instance_id: str = Field(description="The destination.")
    node: str
    request_id: str | None = Field(default=None, description="None: everything that the source serves.")
    reason: str = Field(default="", description="operator, drain, placement, preemption, rebalance, consolidation.")
    plan_id: str | None = Field(default=None, description="The plan that waits for its end.")
    at_most: int | None = Field(
        default=None, gt=0, description="Move so many requests of the source, and leave the others there; None: all."
    )
    created: float = Field(description="Unix seconds, for people.")
    state: MigrationState = "asked"
    owner: str = ""
    beats: int = Field(default=0, description="Raised by the owner to keep its lease.")
    rounds: tuple[MigrationRound, ...] = ()
    requests: tuple[MovedRequest, ...] = ()
    error: ErrorBody | None = None
    traceparent: str | None = None
    ms_per_token: float | None = Field(default=None, description="a, as the scheduler has learned it; None: not yet.")
    ms_fixed: float | None = Field(default=None, description="b.")
    duration_ms: float | None = Field(default=None, description="From being taken up to its end, as its last owner measured.")

    @property
    def over(self) -> bool:
        return self.state in FINAL


LEASE_S = 3.0
BEAT_S = 1.0
MIGRATION_KEPT_S = 3_600
