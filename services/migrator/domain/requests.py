"""One request: read, prepare, read again, hand over."""

from __future__ import annotations

from services.migrator.domain.rounds import KIB, Speed, Way, choose_way, learn_speed, next_step, transfer_speed
from services.migrator.domain.turn import GIVEN_UP, SOURCE_GONE, Turn
from services.migrator.domain.work import Job, is_same_request, sequences_of
from shared.contracts.base import ErrorBody
from shared.contracts.migration import (
    ListRequests,
    MoveRequest,
    PrepareResume,
    ResumePrepared,
    RunningRequest,
    TokensRead,
)
from shared.errors import (
    Conflict,
    DeadlineExceeded,
    InsufficientMemory,
    NotFound,
    PayloadTooLarge,
    StaleToken,
    Unreachable,
    UnsupportedParameter,
)

LEAST_MS = 5_000
"""Deadline in milliseconds for steps that are expected to be quick."""
UNKNOWN_MS = 20_000
"""Deadline in milliseconds for steps without a measurement."""
PATIENT = 3.0
"""The deadline as a multiple of the expected duration."""
SLICE_MS = 2_000
"""Longest round in milliseconds; a longer one is cut, so that its speed is learned."""
LIST_MS = 2_000
FINISHED = "it finished before it could be handed over"
IGNORED = "the destination did not ask the source for keys and values"


def read(t: Turn, name: str, tokens: TokensRead) -> None:
    """Decide after a reading of tokens.

    1. The request cannot move. 2. First reading: compute the whole sequence. 3. Later readings: the
    gap decides. 4. Continue a cut round, which counts only if the source was faster.
    """
    job = t.work.jobs.get(name)
    if job is None:
        return
    if tokens.running.fixed:  # 1
        t.resolve(name, "fixed", reason=tokens.running.fixed)
        return
    sequences = sequences_of(tokens)
    total = sum(map(len, sequences))
    kv = tokens.kv if not job.kv_refused else None
    job = t.job(name, running=tokens.running, total=total, read_at=t.now, rate=_rate(job, tokens, total, t.now), kv=kv)
    if not job.asked_prepare:  # 2
        t.note(name, "moving", predicted_ms=_speed(t, job, total).predict_ms(total), tokens=tokens.running.generated_tokens)
        t.job(name, last_gap=total)
        _prepare(t, name, tokens, sequences, total)
        return
    gap = total - job.prepared  # 3
    start_ms = max(0.0, (job.round_began - t.work.began) * 1e3)
    t.round(name, job.result, t.now * 1e3 - job.round_began * 1e3, gap, start_ms)
    if job.left and gap < job.last_gap:  # 4
        t.job(name, last_gap=gap)
        _prepare(t, name, tokens, sequences, gap)
        return
    if job.left:
        job = t.job(name, rounds=job.rounds + 1)
    # One late round is no evidence that the destination cannot keep up; two together are.
    speed = _speed(t, job, gap)
    match next_step(gap, max(job.last_gap, job.earlier_gap), job.rounds, speed, job.rate, t.work.options.pause_ms):
        case "round":
            t.job(name, last_gap=gap, earlier_gap=job.last_gap)
            _prepare(t, name, tokens, sequences, gap)
        case "hand_over":
            _move(t, name, gap)
        case "give_up":
            t.set(given_up=True)
            t.resolve(name, "failed", reason=f"{GIVEN_UP}: {gap} tokens behind after {job.rounds} rounds, which do not shrink")


def _way(t: Turn, job: Job, tokens: int) -> Way:
    """Decide how the destination gets the next `tokens`."""
    options, token_bytes = t.work.options, job.kv.token_bytes if job.kv is not None else None
    if options.kv == "always" and token_bytes is not None:
        return "transfer"
    return choose_way(tokens, token_bytes, t.work.speed, t.work.link)


def _speed(t: Turn, job: Job, tokens: int) -> Speed:
    """Return the cost of the way that the destination gets the next `tokens`."""
    if job.kv is None or _way(t, job, tokens) == "recompute":
        return t.work.speed
    return transfer_speed(t.work.link, job.kv.token_bytes)


def _rate(job: Job, tokens: TokensRead, total: int, now: float) -> float:
    """Return tokens per second over all choices.

    That is the engine's measurement, or else the difference of two readings.
    """
    running = tokens.running
    open_choices = sum(1 for c in tokens.choices if c.finish_reason is None) or running.choices
    if running.tokens_per_second > 0:
        return running.tokens_per_second * max(1, open_choices)
    if job.read_at and now > job.read_at:
        return max(0.0, (total - job.total) / (now - job.read_at))
    return job.rate


def _prepare(t: Turn, name: str, tokens: TokensRead, sequences: tuple[tuple[int, ...], ...], new: int) -> None:
    job = t.work.jobs[name]
    way = _way(t, job, new)
    t.job(name, stage="preparing", round_began=t.now, asked_prepare=True, way=way)
    known = t.work.speed.weight > 0
    message = PrepareResume(
        deadline_ms=max(LEAST_MS if known else UNKNOWN_MS, int(PATIENT * t.work.speed.predict_ms(new))),
        within_ms=SLICE_MS,
        prepared=t.prepared_name(name),
        revision=t.work.record.revision,
        sequences=sequences,
        adapter=tokens.adapter,
        cache_salt=tokens.cache_salt,
        caused_by=t.work.record.plan_id or "",
        kv=job.kv if way == "transfer" else None,
    )
    t.ask(f"prepare:{name}", "engine", t.work.record.instance_id, message)


def handle_prepared(t: Turn, name: str, result: ResumePrepared) -> None:
    job = t.work.jobs.get(name)
    if job is None:
        return
    t.set(speed=learn_speed(t.work.speed, result.tokens, max(0.0, result.took_ms - result.kv_ms)))
    t.set(link=learn_speed(t.work.link, result.kv_bytes // KIB, result.kv_ms))
    refused = result.kv_reason
    if job.way == "transfer" and not result.kv_bytes and not refused and result.tokens:
        refused = IGNORED
    rounds = job.rounds if result.left else job.rounds + 1
    t.job(
        name,
        prepared=job.total - result.left,
        left=result.left,
        rounds=rounds,
        result=result.model_copy(update={"kv_reason": refused}),
        kv_refused=job.kv_refused or refused,
    )
    t.read(name)


def handle_not_read(t: Turn, name: str, error: ErrorBody) -> None:
    """The source does not have it: it finished or moved, or its engine is gone.

    The destination knows which.
    """
    if name not in t.work.jobs:
        return
    if error.code in (UnsupportedParameter.code, PayloadTooLarge.code):
        t.resolve(name, "fixed", reason=error.message or "its engine does not report its tokens")
        return
    gone = error.code != NotFound.code
    if gone:
        t.set(source_error=error)
    _check(t, name, f"{SOURCE_GONE}: {error.message}" if gone else "")


def handle_not_prepared(t: Turn, name: str, error: ErrorBody) -> None:
    """1. The destination resumes from its own cache: hand over. 2.

    It has other weights, or the request arrived there meanwhile. 3. The tokens do not fit in a
    message. 4. It has no memory, or is gone: the request stays.
    """
    job = t.work.jobs.get(name)
    if job is None:
        return
    refusal = f"the destination refused it: {error.message or error.code}"
    if error.code == UnsupportedParameter.code:  # 1
        t.job(name, asked_prepare=False)
        _move(t, name, job.total, prepared=False)
    elif error.code == Conflict.code:  # 2
        _check(t, name, refusal)
    elif error.code == PayloadTooLarge.code:  # 3
        t.resolve(name, "fixed", reason=error.message)
    else:  # 4
        t.resolve(name, "failed", reason=refusal)


def _move(t: Turn, name: str, gap: int, *, prepared: bool = True) -> None:
    job = t.job(name, stage="moving")
    record = t.work.record
    if record.state != "handing_over":
        t.record(state="handing_over")
    message = MoveRequest(
        deadline_ms=max(LEAST_MS, int(PATIENT * t.work.speed.predict_ms(gap if prepared else job.total))),
        request_id=name,
        migration_id=record.migration_id,
        token=record.token,
        source_instance=record.source_instance,
        instance_id=record.instance_id,
        prepared=t.prepared_name(name) if prepared else "",
    )
    t.ask(f"move:{name}", "gateway", job.running.gateway_id, message)


def was_moved(t: Turn, name: str, tokens: int, pause_ms: float | None) -> None:
    if name in t.work.jobs:
        t.resolve(name, "moved", resumed=True, tokens=tokens, pause_ms=pause_ms)


def handle_not_moved(t: Turn, name: str, error: ErrorBody) -> None:
    """1. A newer migration has it. 2.

    Its memory was lost. 3. Any other refusal may follow a successful switch.
    """
    if name not in t.work.jobs:
        return
    if error.code == StaleToken.code:  # 1
        t.resolve(name, "elsewhere", reason="a newer migration moves it")
    elif error.code == InsufficientMemory.code:  # 2
        t.resolve(name, "failed", reason=error.message)
    else:  # 3
        gone = error.code in (Unreachable.code, DeadlineExceeded.code)
        _check(t, name, "" if error.code == NotFound.code else f"its gateway is gone: {error.message}" if gone else error.message)


def _check(t: Turn, name: str, refusal: str) -> None:
    t.job(name, stage="checking", refusal=refusal)
    t.ask(f"check:{name}", "engine", t.work.record.instance_id, ListRequests(deadline_ms=LIST_MS))


def destination_known(t: Turn, name: str, requests: tuple[RunningRequest, ...]) -> None:
    """Resolve a request that its source or its gateway refused.

    The destination's list decides.
    """
    job = t.work.jobs.get(name)
    if job is None:
        return
    if any(is_same_request(r.request_id, name) for r in requests):
        t.resolve(name, "moved")
    elif not job.refusal:
        t.resolve(name, "finished", reason=FINISHED)
    else:
        t.resolve(name, "elsewhere" if job.refusal.startswith(SOURCE_GONE) else "failed", reason=job.refusal)
