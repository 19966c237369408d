"""Simulated models, and their requests."""

from __future__ import annotations

from collections import deque
from typing import Generic

from simulator.clock import Timer
from simulator.config import GB, Batching, Fixed, ModelGroup, Service
from simulator.hardware import Device, InstanceT, Node
from simulator.workloads.request import Request


class Model(Generic[InstanceT]):
    """A model.

    Attributes:
        window: Arrivals of the sliding window.
        total: Number of requests so far.
    """

    def __init__(self, name: str, number: int, group: ModelGroup, nodes: tuple[Node[InstanceT], ...]) -> None:
        self.name, self.number, self.group, self.nodes = name, number, group, nodes
        self.weights = int(group.weights_gb * GB)
        self.need = self.weights + int(group.kv_gb * GB)
        self.kv_per_token = group.kv_mb_per_token * 1e6
        self.snapshot = int(group.snapshot_gb * GB) if group.snapshot_gb is not None else self.weights
        self.queue: deque[RequestRun[InstanceT]] = deque()
        self.instances: dict[str, InstanceT] = {}
        self.window: deque[float] = deque()
        self.peak = 0
        """Requests of the last whole window."""
        self._windows = (0, 0)
        self.total = 0
        self.last_asked = 0.0
        self.mean_output = 0.0
        self.tried = -1
        """Version of the devices at its last unsuccessful placement."""

    def service_on(self, kind: str) -> Service:
        return self.group.services.get(kind, self.group.service)

    def is_as_large_as(self, other: Model[InstanceT]) -> bool:
        """True if this model needs at least as much room as the other, on the same nodes."""
        return self.need >= other.need and self.nodes == other.nodes and self.group.priority == other.group.priority

    @property
    def capacity(self) -> int:
        return self.group.capacity

    def stage_weights(self, stages: int) -> list[float]:
        """Return the bytes of each stage's weights."""
        first = self.weights * self.group.largest_stage.get(stages, 1 / stages)
        return [first] + [(self.weights - first) / (stages - 1)] * (stages - 1) if stages > 1 else [self.weights]

    def record_request(self, now: float, output: int, window_s: float) -> None:
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
        """Return the seconds of one request alone on a device."""
        service = self.group.service
        if isinstance(service, Fixed):
            return service.seconds
        return service.prefill_ms / 1e3 + prompt / service.prefill_tokens_per_second + output * service.tpot_ms / 1e3

    def resume_seconds(self, tokens: float, service: Service | None = None) -> float:
        """Return a·(t_in + t_out) + b of ServerlessLLM §6.2, in seconds."""
        service = service or self.group.service
        each = self.group.resume_s_per_token
        if each is None:
            each = 1.0 / service.prefill_tokens_per_second if isinstance(service, Batching) else 0.0
        return each * tokens + self.group.resume_s


class RequestRun(Generic[InstanceT]):
    """A request that waits or runs.

    Attributes:
        tokens: Tokens generated so far.
        deadline: Time at which it fails if it still waits.
        paused_at: Start of an interruption, which lasts until the prompt is computed again.
        pause: Seconds of all interruptions.
        first_pause: The part of `pause` before the first token.
        prepared: Tokens whose KV cache is already at the destination.
    """

    __slots__ = (
        "arrived", "begun", "cold", "deadline", "decode_end", "first_at", "first_pause", "instance", "kv_bytes", "kv_device",
        "model", "number", "output", "pause", "paused_at", "prepared", "prompt", "timer", "tokens", "waiting",
    )  # fmt: skip

    def __init__(self, request: Request, number: int, model: Model[InstanceT]) -> None:
        self.arrived, self.number, self.model = request.at, number, model
        self.prompt, self.output = request.prompt_tokens, max(1, request.output_tokens)
        self.begun: float | None = None
        self.first_at: float | None = None
        self.instance: InstanceT | None = None
        self.tokens = self.prepared = 0
        self.deadline = self.decode_end = 0.0
        self.pause = self.first_pause = 0.0
        self.paused_at: float | None = None
        self.timer: Timer | None = None
        self.kv_bytes = 0
        self.kv_device: Device[InstanceT] | None = None
        self.cold = False
        self.waiting = True

    def release_kv(self) -> None:
        """Free its KV cache, where that has memory of its own."""
        if self.kv_device is not None:
            self.kv_device.booked -= self.kv_bytes
        self.kv_bytes, self.kv_device = 0, None
