"""Metrics with OpenTelemetry's `gen_ai` names, exported as Prometheus or OpenMetrics text."""

from __future__ import annotations

from collections.abc import Iterable

from opentelemetry.exporter.prometheus import PrometheusMetricReader
from opentelemetry.metrics import CallbackOptions, Observation
from opentelemetry.sdk.metrics import MeterProvider
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder

from services.gateway.domain.admission import Admission
from services.gateway.domain.dispatcher import Dispatcher
from services.gateway.requests.active_request import ActiveRequest
from services.gateway.telemetry.counter import Counter
from services.gateway.telemetry.histogram import Histogram
from services.gateway.telemetry.key_usage import KeyUsage
from services.gateway.telemetry.rejections import rejection_reason
from shared.contracts.traces import RequestTrace
from shared.errors import ThawError

SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 7.5, 10, 15, 20, 30, 45, 60, 90, 120)
"""Buckets up to two minutes: the convention ends at 10 s, where every cold start would be +Inf."""
PHASE_SECONDS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 45, 120)
PER_TOKEN = (0.0001, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1, 2.5)
TOKENS = (1, 4, 16, 64, 256, 1024, 4096, 16384, 65536, 262144, 1048576, 4194304, 16777216, 67108864)
"""Buckets of the convention for `gen_ai.client.token.usage`."""
_ATTRIBUTES = ("gen_ai.operation.name", "gen_ai.provider.name", "gen_ai.request.model")
_NAMES = tuple(name.replace(".", "_") for name in _ATTRIBUTES)
_PROVIDER = "thaw"
_OPERATION = {"chat": "chat", "completion": "text_completion", "embedding": "embeddings", "other": "other"}


class Metrics:
    """Instruments of one gateway, in a registry of its own."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self._provider = MeterProvider(
            metric_readers=[PrometheusMetricReader(registry=self._registry, scope_info_enabled=False, disable_target_info=True)],
            shutdown_on_exit=False,
        )
        meter = self._provider.get_meter("thaw.gateway")
        self._meter = meter
        self._requests = Counter("thaw_requests", "Finished requests, by status.", (*_NAMES, "http_response_status_code"))
        self._duration = Histogram(
            "gen_ai_server_request_duration_seconds", "Duration of a request.", (*_NAMES, "error_type"), SECONDS
        )
        self._ttft = Histogram(
            "gen_ai_server_time_to_first_token_seconds", "Time to the first token.", (*_NAMES, "thaw_cold"), SECONDS
        )
        self._ttft_phases = Histogram(
            "thaw_ttft_phase_seconds",
            "Parts of the time to the first token: each phase of the request's critical path, by thaw.cold.",
            ("gen_ai_request_model", "thaw_cold", "thaw_phase"),
            PHASE_SECONDS,
        )
        self._tpot = Histogram(
            "gen_ai_server_time_per_output_token_seconds", "Time for each token after the first.", _NAMES, PER_TOKEN
        )
        self._tokens = Histogram(
            "gen_ai_client_token_usage", "Tokens of prompts and responses.", (*_NAMES, "gen_ai_token_type"), TOKENS
        )
        for collector in (self._requests, self._duration, self._ttft, self._ttft_phases, self._tpot, self._tokens):
            self._registry.register(collector)
        self.cold = meter.create_counter("thaw.cold_starts", "{request}", "Requests that waited for a cold start.")
        self.handoffs = meter.create_counter(
            "thaw.requests.handed_over", "{handover}", "Hand-offs of requests to another instance, by kind (move, failover)."
        )
        self.pause = meter.create_histogram(
            "thaw.requests.pause",
            "s",
            "From the last token of one instance to the first of the next.",
            explicit_bucket_boundaries_advisory=SECONDS,
        )
        self.rejections = meter.create_counter(
            "thaw.requests.rejected",
            "{request}",
            "Rejected requests, by API key and thaw.reason; those of batches are not counted.",
        )
        self.objectives = meter.create_counter(
            "thaw.requests.objective", "{request}", "Requests of models with an objective (`slo`), by thaw.met."
        )
        self.key_usage = KeyUsage(meter)
        self.batches = meter.create_counter("thaw.batches", "{batch}", "Batches that have ended, by status.")
        self.batch_requests = meter.create_counter("thaw.batch.requests", "{request}", "Stored results of batches, by HTTP status.")

    def observe(self, dispatcher: Dispatcher, bodies: Admission, held: Admission) -> None:
        """Export the dispatcher's queue lengths and requests in flight, and the bytes of requests.

        Args:
            bodies: Those in memory.
            held: Those in files, which exceed a message.
        """

        def observe_waiting(_: CallbackOptions) -> Iterable[Observation]:
            return [Observation(dispatcher.count_waiting(m), {"gen_ai.request.model": m}) for m in dispatcher.models()]

        def observe_keys(_: CallbackOptions) -> Iterable[Observation]:
            return [Observation(count, {"thaw.key": key}) for key, count in dispatcher.waiting_by_key().items()]

        def observe_in_flight(_: CallbackOptions) -> Iterable[Observation]:
            return [Observation(dispatcher.count_in_flight(m), {"gen_ai.request.model": m}) for m in dispatcher.models()]

        self._meter.create_observable_gauge(
            "thaw.queue.length", [observe_waiting], "{request}", "Requests that wait in this gateway's queue."
        )
        self._meter.create_observable_gauge(
            "thaw.key.queue.length",
            [observe_keys],
            "{request}",
            "Requests that wait in this gateway's queue, by the name of their API key.",
        )
        self._meter.create_observable_gauge(
            "thaw.requests.in_flight", [observe_in_flight], "{request}", "Requests sent to engines."
        )

        def observe_bytes(_: CallbackOptions) -> Iterable[Observation]:
            return [Observation(a.total, {"thaw.place": place}) for place, a in (("memory", bodies), ("file", held))]

        self._meter.create_observable_gauge(
            "thaw.requests.bytes", [observe_bytes], "By", "Bytes of active requests, by thaw.place: memory or file."
        )

    def record(self, request: ActiveRequest, status: int, now: float) -> None:
        ticket, stats, error = request.ticket, request.stats, request.completion.error
        names = (_OPERATION[request.engine_request.endpoint], _PROVIDER, ticket.model)
        self._requests.add((*names, str(status)))
        self._duration.record((*names, error.code if error else ""), now - ticket.arrived_at)
        attributes = dict(zip(_ATTRIBUTES, names, strict=True))
        if stats.cold_ready_at is not None:
            self.cold.add(1, attributes)
        for handoff in request.handoffs:
            kind = attributes | {"thaw.kind": handoff.kind}
            self.handoffs.add(1, kind)
            if handoff.pause_ms is not None:
                self.pause.record(handoff.pause_ms / 1e3, kind)
        if stats.first_token_at is None:
            return
        usage, tpot_s = stats.usage, stats.tpot_s(request.completion.done_at)
        if tpot_s is not None:
            self._tpot.record(names, tpot_s)
        if request.response.is_replay:
            return
        self._tokens.record((*names, "input"), usage.prompt_tokens)
        if request.engine_request.endpoint in ("chat", "completion"):
            self._tokens.record((*names, "output"), usage.completion_tokens)

    def record_ttft(self, trace: RequestTrace, *, is_sampled: bool) -> None:
        """Record the time to the first token and its phases; no-op without a first token.

        Args:
            is_sampled: Its spans are exported, so that a trace can be found by its id.
        """
        if trace.ttft_ms is None:
            return
        is_cold, trace_id = "true" if trace.cold else "false", trace.trace_id if is_sampled else ""
        self._ttft.record((_OPERATION[trace.endpoint], _PROVIDER, trace.model, is_cold), trace.ttft_ms / 1e3, trace_id)
        for phase, ms in trace.phases_ms.items():
            self._ttft_phases.record((trace.model, is_cold, phase), ms / 1e3, trace_id)

    def record_rejection(self, error: ThawError, key: str) -> None:
        """Count a request that was rejected; no-op if `error` is a failure of another kind.

        Args:
            error: The error that its client receives.
            key: Name of its API key; empty without a valid one.
        """
        reason = rejection_reason(error)
        if reason is not None:
            self.rejections.add(1, {"thaw.key": key, "thaw.reason": reason})

    def record_objective(self, model: str, *, is_met: bool) -> None:
        self.objectives.add(1, {"gen_ai.request.model": model, "thaw.met": is_met})

    def render(self, accept: str = "") -> tuple[bytes, str]:
        """Return all metrics and their content type.

        Args:
            accept: The request's header. Exemplars are in OpenMetrics only, as Prometheus wants it.
        """
        encode, content_type = choose_encoder(accept)
        return encode(self._registry), content_type

    def close(self) -> None:
        self._provider.shutdown()
