"""Models as the simulation knows them: their requests, their instances and their past."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from simulator.config import GB, Batching, Fixed, ModelGroup, Service

if TYPE_CHECKING:
    from simulator.hardware import SimNode
    from simulator.instances import Instance, Run


class SimModel:
    """`window`: arrivals of the sliding window; `total`: requests so far."""

    def __init__(self, name: str, number: int, group: ModelGroup, nodes: tuple[SimNode, ...]) -> None:
        self.name, self.number, self.group, self.nodes = name, number, group, nodes
        self.weights = int(group.weights_gb * GB)
        self.need = self.weights + int(group.kv_gb * GB)
        self.kv_per_token = group.kv_mb_per_token * 1e6
        self.snapshot = int(group.snapshot_gb * GB) if group.snapshot_gb is not None else self.weights
        self.queue: deque[Run] = deque()
        self.instances: dict[str, Instance] = {}
        self.window: deque[float] = deque()
        self.peak = 0
        """Requests of the last whole window."""
        self._windows = (0, 0)
        self.total = 0
        self.last_asked = 0.0
        self.mean_output = 0.0
        self.tried = -1
        """The state of the devices when it was last tried in vain."""

    def service_on(self, kind: str) -> Service:
        return self.group.services.get(kind, self.group.service)

    def alike(self, other: SimModel) -> bool:
        """Whether what is no room for the other is none for this one: as big or bigger, on the same nodes."""
        return self.need >= other.need and self.nodes == other.nodes and self.group.priority == other.group.priority

    @property
    def capacity(self) -> int:
        return self.group.capacity

    def asked(self, now: float, output: int, window_s: float) -> None:
        self.window.append(now)
        self.last_asked = now
        while self.window and self.window[0] < now - window_s:
            self.window.popleft()
        number, count = self._windows
        current = int(now / window_s)
        if current != number:
            self.peak = count if current == number + 1 else 0
            count = 0
        self._windows = (current, count + 1)
        self.total += 1
        self.mean_output += (output - self.mean_output) / self.total

    def prefill_seconds(self, prompt: int, service: Service | None = None) -> float:
        service = service or self.group.service
        if isinstance(service, Fixed):
            return 0.0
        return service.prefill_ms / 1e3 + prompt / service.prefill_tokens_per_second

    def in_window(self, now: float, window_s: float) -> int:
        while self.window and self.window[0] < now - window_s:
            self.window.popleft()
        return len(self.window)

    def exec_seconds(self, prompt: int, output: float) -> float:
        """Of one request alone on a device."""
        service = self.group.service
        if isinstance(service, Fixed):
            return service.seconds
        return service.prefill_ms / 1e3 + prompt / service.prefill_tokens_per_second + output * service.tpot_ms / 1e3

    def resume_seconds(self, tokens: float, service: Service | None = None) -> float:
        """a·(t_in + t_out) + b of ServerlessLLM §6.2."""
        service = service or self.group.service
        each = self.group.resume_s_per_token
        if each is None:
            each = 1.0 / service.prefill_tokens_per_second if isinstance(service, Batching) else 0.0
        return each * tokens + self.group.resume_s
