"""One decision in progress: the work so far, and the effects."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal

from services.migrator.domain.events import Ask, Effect, Ended, Forget, Link, Save
from services.migrator.domain.work import Asked, Job, Work, is_same_request, moved_of
from shared.contracts.base import ErrorBody, Request
from shared.contracts.migration import ForgetResume, MigrationRound, MovedRequest, ReadTokens, ResumePrepared, RunningRequest

READ_MS = 2_000
ROUNDS_KEPT = 400
GIVEN_UP = "given up"
SOURCE_GONE = "the source is gone"
Outcome = Literal["moving", "moved", "finished", "elsewhere", "fixed", "failed"]


class Turn:
    def __init__(self, work: Work, now: float) -> None:
        self.work = work
        self.now = now
        self.changed = False
        self._effects: list[Effect] = []

    def finish(self) -> tuple[Work, tuple[Effect, ...]]:
        if self.changed:
            self._effects.insert(0, Save(self.work.record))
        return self.work, tuple(self._effects)

    def set(self, **changes: Any) -> None:
        self.work = replace(self.work, **changes)

    def record(self, **changes: Any) -> None:
        self.set(record=self.work.record.model_copy(update=changes))
        self.changed = True

    # Questions

    def ask(self, key: str, to: Literal["engine", "gateway"], address: str, message: Request) -> None:
        ask = Ask(key, to, address, message)
        self.work.asked[key] = Asked(ask, self.now)
        self._effects.append(ask)

    def close_question(self, key: str) -> bool:
        """Close this question; True if it was open."""
        return self.work.asked.pop(key, None) is not None

    def postpone(self, key: str, at: float) -> None:
        self.work.asked[key] = replace(self.work.asked[key], again_at=at)

    def repeat(self, key: str) -> None:
        asked = self.work.asked[key]
        self.work.asked[key] = replace(asked, again_at=None, tries=asked.tries + 1)
        self._effects.append(asked.ask)

    # Requests

    def start(self, running: RunningRequest) -> None:
        """Begin to move a request."""
        self.work.jobs[running.request_id] = Job(running, self.now)
        if moved_of(self.work.record, running.request_id) is None:
            self.note(running.request_id, "moving", start_ms=self.measure_since(self.work.began))
        if running.traceparent:
            self._effects.append(Link(running.traceparent))
        self.read(running.request_id)

    def read(self, name: str) -> None:
        self.job(name, stage="reading")
        wants_kv = self.work.options.kv != "never" and not self.work.jobs[name].kv_refused
        message = ReadTokens(deadline_ms=READ_MS, request_id=name, offer_kv=wants_kv)
        self.ask(f"read:{name}", "engine", self.work.record.source_instance, message)

    def job(self, name: str, **changes: Any) -> Job:
        job = replace(self.work.jobs[name], **changes)
        self.work.jobs[name] = job
        return job

    def measure_since(self, at: float) -> float:
        return max(0.0, (self.now - at) * 1e3)

    def note(self, name: str, outcome: Outcome, **more: Any) -> None:
        """Record the outcome of a request."""
        old = moved_of(self.work.record, name)
        new = (old or MovedRequest(request_id=name)).model_copy(update={"outcome": outcome, **more})
        if old is None:
            self.record(requests=(*self.work.record.requests, new))
        else:
            self.record(requests=tuple(new if m is old else m for m in self.work.record.requests))

    def resolve(self, name: str, outcome: Outcome, *, resumed: bool = False, **more: Any) -> None:
        """Finish a request.

        The destination drops its prepared state, unless it `resumed` from it.
        """
        job = self.work.jobs.pop(name)
        for key in [k for k in self.work.asked if k.partition(":")[2] == name]:
            del self.work.asked[key]
        self.note(name, outcome, took_ms=self.measure_since(job.began), **more)
        if job.asked_prepare and not resumed:
            self.forget(name)

    def forget(self, name: str) -> None:
        """Have the destination drop what it has prepared for a request."""
        self._effects.append(Forget(self.work.record.instance_id, ForgetResume(prepared=self.prepared_name(name))))

    def prepared_name(self, name: str) -> str:
        """Return the name of prepared state.

        Every owner uses the same, so that the next one continues.
        """
        request = next((m.request_id for m in self.work.record.requests if is_same_request(m.request_id, name)), name)
        return f"{self.work.record.migration_id}.{request}"

    def round(self, name: str, result: ResumePrepared, took_ms: float, gap: int, start_ms: float) -> None:
        number = 1 + sum(1 for r in self.work.record.rounds if is_same_request(r.request_id, name))
        made = MigrationRound(
            request_id=name,
            number=number,
            tokens=result.tokens,
            took_ms=took_ms,
            gap=gap,
            start_ms=start_ms,
            kv_tokens=result.kv_tokens,
            kv_bytes=result.kv_bytes,
            kv_reason=result.kv_reason,
        )
        self.record(rounds=(*self.work.record.rounds, made)[-ROUNDS_KEPT:])

    # The end

    def fail(self, error: ErrorBody) -> None:
        """Fail the migration as a whole."""
        if self.work.record.error is None:
            self.record(error=error)
        self.set(queue=())

    def end(self, *, lost: bool = False, forget: bool = True) -> None:
        """End the work on this migration.

        Args:
            lost: The record is another owner's.
            forget: With `lost`, remove the prepared state; otherwise it stays for the next owner.
        """
        if not lost or forget:
            for name in list(self.work.jobs):
                self.resolve(name, "failed", reason="called off")
        self.set(ended=True, asked={}, jobs={}, queue=())
        if lost:
            self.changed = False
        self._effects.append(Ended(self.work.record, lost))
