"""Run one migration under its lease: (work, event, now) -> (work, effects). Pure.

 1. Ask source and destination for their requests. A new owner sees the same state as its
    predecessor: requests at the destination have moved; requests at neither engine have finished
    (or their gateway resumes them elsewhere).
 2. For each request, a few at a time: read its tokens at the source, let the destination compute
    their keys and values, or receive them from the source if that is predicted sooner; read again …
 3. … until the gap is small (rounds.py); then ask the gateway to switch the route. A request that
    would not converge stays.
 4. A refusal of the gateway may follow an earlier owner's successful switch: ask the destination
    before counting a failure.
 5. For a whole instance, move requests that arrived meanwhile too, in a few passes.
 6. At the end record every outcome; the destination drops state of requests that stayed.

Every question is idempotent: no owner knows whether it asks first. A question that finds no
subscriber is repeated for a while, because a restarting NATS server loses its subscriptions for a
moment.
"""

from __future__ import annotations

from services.migrator.domain.events import Answered, Effect, Event, Lost, Refused, Tick
from services.migrator.domain.requests import (
    SLICE_MS,
    destination_known,
    handle_not_moved,
    handle_not_prepared,
    handle_not_read,
    handle_prepared,
    read,
    was_moved,
)
from services.migrator.domain.rounds import UNKNOWN_LINK, Speed
from services.migrator.domain.turn import GIVEN_UP, SOURCE_GONE, Turn
from services.migrator.domain.work import Asked, Options, Work, is_same_request, moved_of
from shared.contracts.base import ErrorBody
from shared.contracts.migration import (
    BEAT_S,
    ListRequests,
    MigrationRecord,
    MigrationState,
    RequestMoved,
    RequestsListed,
    ResumePrepared,
    RunningRequest,
    TokensRead,
)
from shared.errors import Conflict, DeadlineExceeded, EngineFailed, MigrationFailed, NotFound, Unreachable, UnsupportedParameter

AGAIN_S = 0.2
"""Pause before repeating an unanswered question."""
PATIENCE_S = 2.5
"""Unreachability after which a process counts as gone."""
SLOW_S = 15.0
"""Seconds without an answer after which a process counts as gone. Its engine may be computing, or
starved of CPU time: quick questions are repeated until then.
"""
MAX_TRIES = 2
"""Attempts to ask a process that does not answer in time; of quick questions there may be more."""
NOT_NOW = 4
"""Attempts to ask a gateway that cannot move a request yet: it may not know that the destination is
ready.
"""
MAX_PASSES = 5
LIST_MS = 2_000
LATE_S = SLICE_MS / 1e3
"""Age of a round in seconds from which the destination is probed at each beat."""
_PROBE = "probe:destination"
_QUICK = ("list", "read", "check")
"""Questions that an engine answers without computing."""


def begin(
    record: MigrationRecord, owner: str, speed: Speed, options: Options, now: float, link: Speed = UNKNOWN_LINK
) -> tuple[Work, tuple[Effect, ...]]:
    """Begin work on `record`, which `owner` has just claimed."""
    mine = record.model_copy(update={"owner": owner, "state": "preparing" if record.state == "asked" else record.state})
    if record.ms_per_token is not None and record.ms_fixed is not None and not speed.weight:
        speed = Speed(record.ms_per_token, record.ms_fixed)
    turn = Turn(Work(mine, now, now + BEAT_S, speed, options, link), now)
    turn.ask("list:source", "engine", mine.source_instance, ListRequests(deadline_ms=LIST_MS))
    turn.ask("list:destination", "engine", mine.instance_id, ListRequests(deadline_ms=LIST_MS))
    turn.changed = True
    return turn.finish()


def decide(work: Work, event: Event, now: float) -> tuple[Work, tuple[Effect, ...]]:
    """Return the work after `event` and the effects. `work` is not changed."""
    if work.ended:
        return work, ()
    turn = Turn(work.copy(), now)
    match event:
        case Answered(key, reply):
            if turn.close_question(key):
                _handle_reply(turn, key, reply)
        case Refused(key, error):
            _handle_refusal(turn, key, error)
        case Lost(over=over):
            turn.end(lost=True, forget=over)
            return turn.finish()
        case Tick():
            pass
    _repeat_due(turn)
    _probe_destination(turn)
    _advance(turn)
    _beat(turn)
    return turn.finish()


def deadline(work: Work) -> float:
    """Return when `Tick` is due."""
    return min([work.beat_at, *(a.again_at for a in work.asked.values() if a.again_at is not None)])


def _handle_reply(t: Turn, key: str, reply: object) -> None:
    kind, _, name = key.partition(":")
    match kind, reply:
        case "list", RequestsListed(requests=requests):
            _record_listed(t, name, requests)
        case "read", TokensRead():
            read(t, name, reply)
        case "prepare", ResumePrepared():
            handle_prepared(t, name, reply)
        case "move", RequestMoved():
            was_moved(t, name, reply.tokens, reply.pause_ms)
        case "check", RequestsListed(requests=requests):
            destination_known(t, name, requests)
        case "probe", RequestsListed():
            pass
        case _:
            _refused_for_good(t, key, EngineFailed(f"An unexpected answer: {type(reply).__name__}").body())


def _handle_refusal(t: Turn, key: str, error: ErrorBody) -> None:
    """Repeat the question if that may help; else the error is final."""
    asked = t.work.asked.get(key)
    if asked is None:
        return
    gone = error.code == Unreachable.code and t.now - asked.since < PATIENCE_S and not _expected_gone(t, key)
    late = error.code == DeadlineExceeded.code and _may_still_answer(t, key, asked)
    not_now = error.code == Conflict.code and key.startswith("move:") and asked.tries <= NOT_NOW
    if gone or late or not_now:
        t.postpone(key, t.now + AGAIN_S)
        return
    t.close_question(key)
    _refused_for_good(t, key, error)


def _may_still_answer(t: Turn, key: str, asked: Asked) -> bool:
    """True if a question that was not answered in time is to be repeated."""
    if asked.tries < MAX_TRIES:  # also after a pause of this process
        return True
    return key.partition(":")[0] in _QUICK and t.now - asked.since < SLOW_S


def _expected_gone(t: Turn, key: str) -> bool:
    """True if the source may exit: it has been emptied."""
    return key == "list:source" and t.work.passes > 0


def _refused_for_good(t: Turn, key: str, error: ErrorBody) -> None:
    kind, _, name = key.partition(":")
    match kind:
        case "list":
            _not_listed(t, name, error)
        case "read":
            handle_not_read(t, name, error)
        case "prepare":
            handle_not_prepared(t, name, error)
            if error.code == Unreachable.code:
                _destination_gone(t, error)
        case "move":
            handle_not_moved(t, name, error)
        case "check":
            destination_known(t, name, ())
        case "probe":
            if error.code == Unreachable.code:
                _destination_gone(t, error)


def _record_listed(t: Turn, where: str, requests: tuple[RunningRequest, ...]) -> None:
    t.set(**({"source": requests} if where == "source" else {"destination": requests}))
    if t.work.source is not None and t.work.destination is not None:
        _take_stock(t, t.work.source, t.work.destination)


def _not_listed(t: Turn, where: str, error: ErrorBody) -> None:
    if where == "destination":
        if error.code in (UnsupportedParameter.code, NotFound.code):
            _record_listed(t, where, ())  # it cannot list requests, but can serve them
        else:
            _destination_gone(t, error)
            _record_listed(t, where, ())
    elif t.work.passes:
        _record_listed(t, where, ())
    else:
        t.set(source_error=error)
        _record_listed(t, where, ())


def _destination_gone(t: Turn, error: ErrorBody) -> None:
    """Stop moving: all remaining requests stay at the source."""
    for name in list(t.work.jobs):
        if t.work.jobs[name].stage in ("reading", "preparing"):
            t.resolve(name, "failed", reason=f"the destination is gone: {error.message}")
    t.fail(error)


def _take_stock(t: Turn, source: tuple[RunningRequest, ...], destination: tuple[RunningRequest, ...]) -> None:
    """1: decide which requests to move, and resolve those that an earlier owner moved."""
    wanted = t.work.record.request_id
    chosen = [r for r in source if wanted is None or is_same_request(r.request_id, wanted)]
    at_source = [r.request_id for r in source]
    at_destination = [r.request_id for r in destination]
    for moved in t.work.record.requests:
        if moved.outcome != "moving" or any(is_same_request(moved.request_id, r) for r in at_source):
            continue
        there = any(is_same_request(moved.request_id, r) for r in at_destination)
        lost = t.work.source_error is not None or t.work.record.error is not None
        t.note(moved.request_id, "moved" if there else "elsewhere" if lost else "finished")
        t.forget(moved.request_id)  # the earlier owner may have had it prepared
    if wanted is not None and not chosen and moved_of(t.work.record, wanted) is None:
        if any(is_same_request(wanted, r) for r in at_destination):
            t.note(wanted, "elsewhere", reason="it is at the destination already")
        elif t.work.source_error is not None:
            t.note(wanted, "elsewhere", reason=SOURCE_GONE)
        else:
            t.note(wanted, "finished", reason="it finished before it could be moved")
    fresh: list[RunningRequest] = []
    for running in chosen:
        old = moved_of(t.work.record, running.request_id)
        if old is not None and old.outcome in ("fixed", "failed"):
            continue
        if running.fixed:
            t.note(running.request_id, "fixed", reason=running.fixed)
        else:
            fresh.append(running)
    at_most = t.work.record.at_most
    if at_most is not None:  # an earlier owner may have begun to move some
        ids = {r.request_id for r in fresh}
        done = sum(1 for m in t.work.record.requests if m.outcome == "moved" and m.request_id not in ids)
        fresh = fresh[: max(0, at_most - done)]
    t.set(queue=tuple(fresh))


def _repeat_due(t: Turn) -> None:
    for key, asked in list(t.work.asked.items()):
        if asked.again_at is not None and asked.again_at <= t.now:
            t.repeat(key)


def _probe_destination(t: Turn) -> None:
    """Find out whether the destination of a late round still exists.

    A reply that dies with the engine is awaited until its deadline. A question to an engine that is
    gone fails at once.
    """
    late = any(key.startswith("prepare:") and t.now - a.since > LATE_S for key, a in t.work.asked.items())
    if late and t.now >= t.work.beat_at and _PROBE not in t.work.asked:
        t.ask(_PROBE, "engine", t.work.record.instance_id, ListRequests(deadline_ms=LIST_MS))


def _advance(t: Turn) -> None:
    """2 and 5: start more requests, make another pass, or finish."""
    w = t.work
    if w.ended or w.source is None or w.destination is None:
        return
    if w.record.error is not None:
        t.set(queue=())
    while t.work.queue and len(t.work.jobs) < w.options.at_once:
        first, *rest = t.work.queue
        t.set(queue=tuple(rest))
        t.start(first)
    if t.work.jobs or t.work.queue:
        return
    moved = any(m.outcome == "moved" for m in w.record.requests)
    is_whole = w.record.request_id is None and w.record.at_most is None
    if is_whole and t.work.record.error is None and moved and w.passes < MAX_PASSES and not w.given_up:
        unmoved = [m for m in t.work.record.requests if m.outcome in ("failed", "fixed")]
        if w.passes == 0 or len(w.source) > len(unmoved):
            t.set(passes=w.passes + 1, source=None)
            t.ask("list:source", "engine", w.record.source_instance, ListRequests(deadline_ms=LIST_MS))
            return
    _finish(t)


def _finish(t: Turn) -> None:
    """6."""
    state, error = _verdict(t.work)
    t.record(state=state, error=error, duration_ms=(t.now - t.work.began) * 1e3)
    t.end()


def _verdict(work: Work) -> tuple[MigrationState, ErrorBody | None]:
    record = work.record
    outcomes = [m.outcome for m in record.requests]
    stuck = [m for m in record.requests if m.outcome in ("failed", "fixed")]
    error = record.error
    if error is None and work.source_error is not None and ("elsewhere" in outcomes or "moved" not in outcomes):
        error = work.source_error.model_copy(update={"message": f"{SOURCE_GONE}: {work.source_error.message}"})
    if error is not None:
        return "failed", error
    if stuck and work.given_up and all(m.reason.startswith(GIVEN_UP) for m in stuck):
        return "given_up", None
    if stuck:
        named = "; ".join(dict.fromkeys(m.reason for m in stuck if m.reason))
        return "failed", MigrationFailed(f"{len(stuck)} of {len(outcomes)} requests were not moved: {named}").body()
    if record.request_id is not None and "moved" not in outcomes:
        return "given_up", None
    return "done", None


def _beat(t: Turn) -> None:
    if not t.work.ended and t.now >= t.work.beat_at:
        t.record(beats=t.work.record.beats + 1)
        t.set(beat_at=t.now + BEAT_S)


def handed_over(work: Work) -> MigrationRecord:
    """Return the record of a stopping migrator.

    Another migrator need not wait for the lease to expire.
    """
    return work.record.model_copy(update={"owner": "", "beats": work.record.beats + 1})


def failed_unexpectedly(work: Work, error: Exception) -> MigrationRecord:
    """Return the last record of a migration for which a decision failed.

    The destination drops what it has prepared after a while.
    """
    failure = MigrationFailed(f"{type(error).__name__} in a decision of the migrator: {error}")
    return work.record.model_copy(update={"state": "failed", "error": failure.body()})
