"""The trace of each model load: a root span linked with its requests, and a `thaw trace` record."""

from __future__ import annotations

from collections.abc import Callable

from opentelemetry.context import Context
from opentelemetry.trace import Span, Status, StatusCode

from services.scheduler.domain.effects import LoadEnded, LoadStarted
from shared.contracts.phases import Phase
from shared.contracts.plans import PlanRecord
from shared.contracts.traces import LoadTrace
from shared.telemetry.critical_path import critical_path
from shared.telemetry.tracing import link_to, traceparent, tracer

SCHEDULER = "scheduler"
_OUTCOMES = {"ready": "ready", "failed": "failed"}


class LoadTraces:
    """Open load spans by plan.

    A span ends with its leader; its trace id is stored with the plan.
    """

    def __init__(self, plan_ended: Callable[[PlanRecord], None] | None = None) -> None:
        """Start without spans.

        Args:
            plan_ended: Called with every plan that has ended.
        """
        self._plan_ended = plan_ended
        self._open: dict[str, tuple[Span, tuple[str, ...]]] = {}
        self._parents: dict[str, str] = {}

    def record_started(self, effect: LoadStarted) -> str | None:
        """Open the load's root span and return its traceparent."""
        span = tracer.start_span(
            f"load {effect.model}",
            context=Context(),
            links=[link for w in effect.waiters if (link := link_to(w)) is not None],
            attributes={
                "gen_ai.request.model": effect.model,
                "thaw.plan_id": effect.plan_id,
                "thaw.instance_id": effect.instance_id,
                "thaw.node": effect.node,
            },
            start_time=int(effect.requested_at * 1e9),
        )
        self._open[effect.plan_id] = (span, effect.waiters)
        parent = traceparent(span)
        if parent is not None:
            self._parents[effect.instance_id] = parent
        return parent

    def parent(self, instance_id: str) -> str | None:
        return self._parents.get(instance_id)

    def record_ended(self, effect: LoadEnded) -> LoadTrace:
        """Close the load's span with the scheduler's own phases as children; return the load's
        record.
        """
        plan = effect.plan
        if self._plan_ended is not None:
            self._plan_ended(plan)
        span, waiters = self._open.pop(plan.plan_id, (None, ()))
        parent = self._parents.pop(plan.instance_id or "", None) or plan.traceparent
        if span is not None:
            _export_own_phases(span, effect)
            if plan.outcome == "failed":
                span.set_status(Status(StatusCode.ERROR, plan.error.message if plan.error else ""))
            span.set_attribute("thaw.outcome", plan.outcome)
            span.end(int(effect.ended_at * 1e9))
        duration = max(0.0, (effect.ended_at - effect.requested_at) * 1e3)
        return LoadTrace(
            plan_id=plan.plan_id,
            trace_id=_trace_id(parent),
            model=plan.model,
            node=effect.node,
            instance_id=plan.instance_id or "",
            created=plan.created,
            duration_ms=duration,
            outcome="ready" if plan.outcome == "ready" else "failed" if plan.outcome == "failed" else "cancelled",
            spans=plan.measured,
            critical_path=critical_path(plan.measured, 0.0, duration, before=Phase.SCHEDULE),
            waiters=tuple(_trace_id(w) for w in waiters),
        )

    def close(self) -> None:
        """End the open spans; the loads continue under the next leader."""
        for span, _ in self._open.values():
            span.set_attribute("thaw.outcome", "handed over")
            span.end()
        self._open.clear()
        self._parents.clear()


def _export_own_phases(span: Span, effect: LoadEnded) -> None:
    from opentelemetry.trace import set_span_in_context

    for s in effect.plan.measured:
        if s.process == SCHEDULER:
            start = int((effect.requested_at + s.start_ms / 1e3) * 1e9)
            child = tracer.start_span(s.phase.value, context=set_span_in_context(span, Context()), start_time=start)
            child.end(start + int(s.duration_ms * 1e6))


def _trace_id(parent: str | None) -> str:
    return parent.split("-")[1] if parent and parent.count("-") == 3 else ""
