"""Timings, token counts and phases of one request."""

from __future__ import annotations

from dataclasses import dataclass, field

from services.gateway.domain.route_table import Route
from shared.contracts.inference import Usage
from shared.contracts.node import InstanceStatus
from shared.contracts.phases import PhaseSpan


@dataclass(slots=True)
class PhaseReport:
    """Phases that a message carried, relative to its arrival."""

    received_at: float
    phases: tuple[PhaseSpan, ...]


@dataclass(slots=True)
class RequestStats:
    """Times are seconds on the gateway's monotonic clock.

    Attributes:
        sent_at: Time at which the response was last requested from its beginning.
        last_token_at: Time at which the last output arrived; 0: none has.
        ignored_parameters: Fields of the body that the engine does not know.
        earlier_device_s: Device-seconds of earlier attempts.
        instance: The instance that began the response.
        cold_ready_at: Time at which the instance became ready, if the request waited for its cold
            start.
    """

    sent_at: float = 0.0
    first_token_at: float | None = None
    last_token_at: float = 0.0
    usage: Usage = field(default_factory=lambda: Usage(prompt_tokens=0))
    ignored_parameters: tuple[str, ...] = ()
    earlier_device_s: float = 0.0
    phase_reports: list[PhaseReport] = field(default_factory=list)
    instance: InstanceStatus | None = None
    cold_ready_at: float | None = None

    def restart(self, *, keep_first_token: bool) -> None:
        """Discard what the previous attempt reported."""
        if not keep_first_token:
            self.first_token_at = None
        self.phase_reports.clear()

    def response_requested(self, route: Route, arrived_at: float, now: float) -> None:
        """The response is requested from its beginning, on the instance of `route`."""
        self.sent_at = now
        self.instance = route.status
        self.cold_ready_at = None
        if route.ready_since is not None and route.ready_since > arrived_at:
            self.cold_ready_at = route.ready_since
            self.add_phases(route.ready_since, route.start_phases)

    def tpot_s(self, done_at: float | None) -> float | None:
        """Return the seconds for each token after the first; None without such tokens."""
        if self.first_token_at is None or done_at is None or self.usage.completion_tokens < 2:
            return None
        return (done_at - self.first_token_at) / (self.usage.completion_tokens - 1)

    def add_phases(self, received_at: float, phases: tuple[PhaseSpan, ...]) -> None:
        self.phase_reports.append(PhaseReport(received_at, phases))
