"""Progress of one migration: the record, and what only its owner knows."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Literal

from services.migrator.domain.events import Ask
from services.migrator.domain.rounds import UNKNOWN_LINK, Speed, Way
from shared.contracts.base import ErrorBody
from shared.contracts.kv_transfer import KvOffer
from shared.contracts.migration import MigrationRecord, MovedRequest, ResumePrepared, RunningRequest, TokensRead

NOTHING = ResumePrepared(tokens=0, took_ms=0.0)


@dataclass(frozen=True, slots=True)
class Options:
    """Options of a migration.

    Attributes:
        at_once: Requests of an instance moved concurrently.
        pause_ms: A pause that clients do not notice.
        kv: When keys and values are sent: where that is predicted sooner, wherever it is possible,
            or never.
    """

    at_once: int = 4
    pause_ms: float = 100.0
    kv: Literal["auto", "always", "never"] = "auto"


@dataclass(frozen=True, slots=True)
class Asked:
    """An open question.

    Attributes:
        again_at: When to repeat it after a transient failure.
    """

    ask: Ask
    since: float
    tries: int = 1
    again_at: float | None = None


@dataclass(frozen=True, slots=True)
class Job:
    """One request being moved.

    Attributes:
        prepared: Tokens of all its sequences that the destination has computed.
        total: Tokens of all its sequences at the last reading, at `read_at`.
        left: Tokens that its last round did not reach.
        kv: The source's offer of keys and values, at the last reading.
        way: Of the last round.
        kv_refused: Why keys and values are not sent any more; empty: they may be.
    """

    running: RunningRequest
    began: float
    stage: Literal["reading", "preparing", "moving", "checking"] = "reading"
    prepared: int = 0
    left: int = 0
    total: int = 0
    last_gap: int = 0
    earlier_gap: int = 0
    rounds: int = 0
    round_began: float = 0.0
    result: ResumePrepared = NOTHING
    """Result of the last round."""
    read_at: float = 0.0
    rate: float = 0.0
    asked_prepare: bool = False
    kv: KvOffer | None = None
    way: Way = "recompute"
    kv_refused: str = ""
    refusal: str = ""
    """The reason why the gateway refused the move; the destination is asked whether it has the
    request.
    """


@dataclass(frozen=True, slots=True)
class Work:
    record: MigrationRecord
    began: float
    beat_at: float
    speed: Speed
    options: Options = Options()
    link: Speed = UNKNOWN_LINK
    """Milliseconds to send KiB of keys and values from the source's node to the destination's."""
    asked: dict[str, Asked] = field(default_factory=dict)
    jobs: dict[str, Job] = field(default_factory=dict)
    """Jobs by the request's name at the source."""
    queue: tuple[RunningRequest, ...] = ()
    source: tuple[RunningRequest, ...] | None = None
    destination: tuple[RunningRequest, ...] | None = None
    passes: int = 0
    source_error: ErrorBody | None = None
    """The reason why the source could not be asked."""
    given_up: bool = False
    ended: bool = False

    def copy(self) -> Work:
        return replace(self, asked=dict(self.asked), jobs=dict(self.jobs))


def base_of(request_id: str) -> str:
    """Return a request's base name.

    A gateway appends a hyphen and a number for each attempt.
    """
    base, _, number = request_id.rpartition("-")
    return base if base and number.isdigit() else request_id


def is_same_request(request_id: str, other: str) -> bool:
    """True if both ids name one request, with or without the number of an attempt."""
    return (
        request_id == other or base_of(request_id) == base_of(other) or base_of(request_id) == other or request_id == base_of(other)
    )


def sequences_of(tokens: TokensRead) -> tuple[tuple[int, ...], ...]:
    """Return the tokens of each choice that the destination has to compute."""
    generated = {c.index: c.token_ids for c in tokens.choices}
    return tuple((*prompt, *generated.get(i, ())) for i, prompt in enumerate(tokens.prompt_token_ids))


def moved_of(record: MigrationRecord, request_id: str) -> MovedRequest | None:
    return next((m for m in record.requests if is_same_request(m.request_id, request_id)), None)
