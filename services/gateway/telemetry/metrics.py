"""What /metrics shows: OpenTelemetry instruments with the `gen_ai` names, exported as Prometheus text."""

from __future__ import annotations

from collections.abc import Iterable

from opentelemetry.exporter.prometheus import PrometheusMetricReader
from opentelemetry.metrics import CallbackOptions, Observation
from opentelemetry.sdk.metrics import MeterProvider
from prometheus_client import CollectorRegistry, generate_latest

from services.gateway.domain.dispatcher import Dispatcher
from services.gateway.requests.active_request import Exchange

SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 7.5, 10, 15, 20, 30, 45, 60, 90, 120)
"""To two minutes: with the conventional end at 10 s every cold start would be +Inf."""
PER_TOKEN = (0.0001, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1, 2.5)
TOKENS = (1, 4, 16, 64, 256, 1024, 4096, 16384, 65536, 262144, 1048576, 4194304, 16777216, 67108864)
"""The convention's own, as is the name: a server that stands before its engines counts what its clients use."""
_OPERATION = {"chat": "chat", "completion": "text_completion", "embedding": "embeddings", "other": "other"}


class Metrics:
    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self._provider = MeterProvider(
            metric_readers=[PrometheusMetricReader(registry=self._registry, scope_info_enabled=False, disable_target_info=True)],
            shutdown_on_exit=False,
        )
        meter = self._provider.get_meter("thaw.gateway")
        self._meter = meter
        self.duration = meter.create_histogram(
            "gen_ai.server.request.duration", "s", "Time of a request, whole.", explicit_bucket_boundaries_advisory=SECONDS
        )
        self.ttft = meter.create_histogram(
            "gen_ai.server.time_to_first_token", "s", "Time to the first token.", explicit_bucket_boundaries_advisory=SECONDS
        )
        self.tpot = meter.create_histogram(
            "gen_ai.server.time_per_output_token",
            "s",
            "Time for each token after the first.",
            explicit_bucket_boundaries_advisory=PER_TOKEN,
        )
        self.tokens = meter.create_histogram(
            "gen_ai.client.token.usage", "{token}", "Tokens read and written.", explicit_bucket_boundaries_advisory=TOKENS
        )
        self.cold = meter.create_counter("thaw.cold_starts", "{request}", "Requests that waited for their model's start.")
        self.handovers = meter.create_counter(
            "thaw.requests.handed_over", "{handover}", "Times that a request went on at another instance, by kind (move, failover)."
        )
        self.pause = meter.create_histogram(
            "thaw.requests.pause",
            "s",
            "From the last token of one instance to the first of the next.",
            explicit_bucket_boundaries_advisory=SECONDS,
        )
        self.requests = meter.create_counter("thaw.requests", "{request}", "Requests answered, by status.")

    def observe(self, dispatcher: Dispatcher) -> None:
        """Show the queues and what is in flight."""

        def waiting(_: CallbackOptions) -> Iterable[Observation]:
            return [Observation(dispatcher.waiting(m), {"gen_ai.request.model": m}) for m in dispatcher.models()]

        def in_flight(_: CallbackOptions) -> Iterable[Observation]:
            return [Observation(dispatcher.in_flight(m), {"gen_ai.request.model": m}) for m in dispatcher.models()]

        self._meter.create_observable_gauge("thaw.queue.length", [waiting], "{request}", "Requests that wait in this gateway.")
        self._meter.create_observable_gauge("thaw.requests.in_flight", [in_flight], "{request}", "Requests given to engines.")

    def record(self, exchange: Exchange, status: int, ended: float) -> None:
        ticket, usage = exchange.ticket, exchange.usage
        names = {
            "gen_ai.operation.name": _OPERATION[exchange.ask.endpoint],
            "gen_ai.provider.name": "thaw",
            "gen_ai.request.model": ticket.model,
        }
        failure = {"error.type": exchange.error.code} if exchange.error else {}
        self.requests.add(1, names | {"http.response.status_code": status})
        self.duration.record(ended - ticket.arrived, names | failure)
        if exchange.cold_ready_at is not None:
            self.cold.add(1, names)
        for handover in exchange.handovers:
            kind = names | {"thaw.kind": handover.kind}
            self.handovers.add(1, kind)
            if handover.pause_ms is not None:
                self.pause.record(handover.pause_ms / 1e3, kind)
        if exchange.first_at is None:
            return
        self.ttft.record(exchange.first_at - ticket.arrived, names)
        if usage.completion_tokens > 1 and exchange.ended_at is not None:
            self.tpot.record((exchange.ended_at - exchange.first_at) / (usage.completion_tokens - 1), names)
        if exchange.replayed:
            return
        self.tokens.record(usage.prompt_tokens, names | {"gen_ai.token.type": "input"})
        if exchange.ask.endpoint in ("chat", "completion"):
            self.tokens.record(usage.completion_tokens, names | {"gen_ai.token.type": "output"})

    def render(self) -> bytes:
        text: bytes = generate_latest(self._registry)
        return text

    def close(self) -> None:
        self._provider.shutdown()
