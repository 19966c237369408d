"""Simulate the instances that run requests.

An instance prefills, then decodes in steps.
"""

from __future__ import annotations

from collections.abc import Callable
from heapq import heappop, heappush
from typing import Literal

from simulator.clock import Clock, Timer
from simulator.config import Batching, Fixed, Runtime
from simulator.hardware import Device, Node
from simulator.models import Model, RequestRun

SimDevice = Device["Instance"]
SimNode = Node["Instance"]
SimModel = Model["Instance"]
Run = RequestRun["Instance"]
State = Literal["starting", "ready", "leaving", "parked", "gone"]


class Part:
    """The bytes that an instance books on one device."""

    __slots__ = ("device", "nbytes")

    def __init__(self, device: SimDevice, nbytes: int) -> None:
        self.device, self.nbytes = device, nbytes


class Instance:
    """One engine; with several parts a pipeline."""

    def __init__(
        self, key: str, model: SimModel, parts: list[Part], clock: Clock, runtime: Runtime, finished: Callable[[Run], None]
    ) -> None:
        self.key, self.model, self.parts = key, model, parts
        self._clock, self._runtime, self.finished = clock, runtime, finished
        self.service = model.service_on(parts[0].device.node.group.kind)
        self.capacity = self.capacity_of(len(parts))
        self.state: State = "starting"
        self.began, self.ready_at, self.idle_since, self.load_s = clock.now, 0.0, clock.now, 0.0
        self.predicted: float | None = None
        """Seconds to the first token of a prompt of `prompt_predicted` tokens."""
        self.prompt_predicted = 0
        self.loading_since = clock.now
        self.done: list[Part] = []
        """Stages of a pipeline that have the whole model."""
        self.successors = 0
        """Instances that a pipeline becomes; 0: not decided."""
        self.source = ""
        self.bound: Run | None = None
        """The request that it was started for, on devices that run one at a time."""
        self.moving = False
        """True while its requests are migrated: it accepts no new ones."""
        self.runs: dict[Run, None] = {}
        self.keep_timer: Timer | None = None
        self.leaves_at: float | None = None
        """Time at which the keep-alive of an idle instance ends."""
        self._decoding: list[tuple[float, int, Run]] = []
        self._virtual, self._since, self._speed = 0.0, clock.now, 0.0
        self._next: Timer | None = None
        self._prompts_until = 0.0
        self._prompts: dict[Run, float] = {}
        """Prompts that are computed or wait for it, with the times at which they end."""
        self._prompt_slowness = 1.0
        """Slowdown by which these times were computed."""
        self._next_pass: Timer | None = None
        self._pending: list[Run] = []
        """Prompts that wait for the next pass, where several are computed together."""
        self._withheld: list[Run] | None = None
        """Requests whose prompts were computed while weights were still loading."""

    @property
    def open(self) -> bool:
        """True if it accepts one more request."""
        return self.state == "ready" and not self.moving and len(self.runs) < self.capacity

    @property
    def nbytes(self) -> int:
        return sum(p.nbytes for p in self.parts)

    @property
    def batches(self) -> int:
        """Return the batches that are in flight at the same time."""
        return len(self.parts) if self._runtime.stage_batches and isinstance(self.service, Batching) else 1

    def capacity_of(self, engines: int) -> int:
        """Return the requests that so many engines, or stages with a batch each, run at once."""
        one = 1 if isinstance(self.service, Fixed) else self.service.concurrency
        return one * engines if self.batches > 1 else one

    def slowness(self) -> float:
        """Return the slowdown against running alone on one device.

        Each stage does its share of the work at its share of the device.
        """
        parts, rule = self.parts, self._runtime.share_compute
        if rule == "none":
            return 1.0
        slowdown = _slowdown_by_turns if rule == "turns" else _slowdown_by_memory
        if len(parts) == 1:
            return slowdown(parts[0], self)
        return sum(slowdown(p, self) for p in parts) / len(parts)

    def _hops(self) -> float:
        return self._runtime.hop_s * len(self.parts) if len(self.parts) > 1 else 0.0

    def _compute_seconds(self, run: Run) -> float:
        """Return the seconds to compute a prompt, or the rest of it, alone on one device."""
        if isinstance(self.service, Fixed):
            return self.service.seconds
        if _has_context(run):
            return self.model.resume_seconds(max(0, run.prompt + run.tokens - run.prepared), self.service)
        return self.model.prefill_seconds(run.prompt, self.service)

    def admit(self, run: Run, since: float | None = None) -> None:
        """Start or resume a request.

        Args:
            since: Time since which it has been executing, during the load.
        """
        now = self._clock.now
        idle = not self.runs
        self.runs[run] = None
        run.instance, run.waiting = self, False
        if run.begun is None:
            run.begun = now if since is None else since
            run.cold = self.ready_at > run.arrived
        if self.keep_timer is not None:
            self.keep_timer.cancel()
            self.keep_timer = self.leaves_at = None
        for part in self.parts:
            part.device.begin(now if since is None else since)
        if idle:
            self._others_share()
        if isinstance(self.service, Batching) and self.service.prefill_together and since is None:
            run.timer = Timer(lambda: None)
            self._pending.append(run)
            self._clock.call_later(0.0, self._pass)  # prompts that arrive together are computed together
            return
        self._respeed_prompts()
        begin = max(now, self._prompts_until) if since is None else since
        seconds = self._compute_seconds(run) * self.slowness() + self._hops()
        end = max(now, begin + seconds)
        # The first stage is free for the next prompt when it has computed its layers of this one.
        self._prompts_until = end if self.batches == 1 else begin + (seconds - self._hops()) / self.batches
        self._schedule_prompt(run, end)

    def _schedule_prompt(self, run: Run, end: float) -> None:
        self._prompts[run] = end
        run.timer = self._clock.at(end, lambda: self._on_prefilled(run))

    def _respeed_prompts(self) -> None:
        """Move the ends of prompts after a change of the device's busy instances."""
        before, self._prompt_slowness = self._prompt_slowness, self.slowness()
        if not self._prompts or before == self._prompt_slowness:
            return
        begin, ratio = max(self._clock.now, self._since), self._prompt_slowness / before
        self._prompts_until = begin + (self._prompts_until - begin) * ratio
        for run, end in list(self._prompts.items()):
            assert run.timer is not None
            run.timer.cancel()
            self._schedule_prompt(run, begin + (end - begin) * ratio)
        if self._next_pass is not None:
            self._next_pass.cancel()
            self._next_pass = self._clock.at(self._prompts_until, self._pass)

    def _pass(self) -> None:
        """Compute all waiting prompts, unless a pass is under way."""
        now = self._clock.now
        if not self._pending or now < self._prompts_until:
            return
        self._respeed_prompts()
        end = self._prompts_until = now + self._pass_seconds()
        runs, self._pending = self._pending, []
        for run in runs:
            self._schedule_prompt(run, end)
        self._next_pass = self._clock.at(end, self._pass)

    def _pass_seconds(self) -> float:
        """Return the seconds to compute all waiting prompts together."""
        assert isinstance(self.service, Batching)
        new = sum(not _has_context(run) for run in self._pending)
        alone = sum(self._compute_seconds(run) for run in self._pending) - self.service.prefill_ms / 1e3 * max(0, new - 1)
        return alone * self.slowness() + self._hops()

    def withhold(self) -> None:
        """Let no result out until `release`."""
        self._withheld = []

    def release(self) -> None:
        """Let results out, those of `withhold` first."""
        withheld, self._withheld = self._withheld or [], None
        for run in withheld:
            self._on_prefilled(run)

    def _on_prefilled(self, run: Run) -> None:
        self._prompts.pop(run, None)
        if self._withheld is not None:
            self._withheld.append(run)
            run.timer = Timer(lambda: None)  # it has no token yet
            return
        run.timer = None
        self._end_pause(run)
        if run.tokens == 0:
            run.tokens = 1
            if run.first_at is None:
                run.first_at, run.first_pause = self._clock.now, run.pause
        left = run.output - run.tokens
        if left <= 0 or isinstance(self.service, Fixed):
            self._end(run)
            return
        self._advance()
        run.decode_end = self._virtual + left
        heappush(self._decoding, (run.decode_end, run.number, run))
        self.respeed()

    def _end_pause(self, run: Run) -> None:
        """Add an interruption: how much later its prompt is computed, or its first token repeated.

        A request that restarts has lost the tokens since its first one, and their pauses.
        """
        if run.paused_at is None:
            return
        now = self._clock.now
        if run.tokens == 0 and run.first_at is not None:
            run.pause = run.first_pause + now - run.first_at
        else:
            run.pause += max(0.0, now - run.paused_at)
        run.paused_at = None

    def _prompt_end(self, run: Run) -> float:
        """Return the time at which a request's prompt is computed; now if it is already."""
        if run in self._pending:
            return max(self._clock.now, self._prompts_until) + self._pass_seconds()
        return self._prompts.get(run, self._clock.now)

    def _advance(self) -> None:
        now = self._clock.now
        if now > self._since:  # `_since` is in the future while the KV cache is gathered
            self._virtual += (now - self._since) * self._speed
            self._since = now

    def respeed(self) -> None:
        """Recompute the speed after a change of the requests here or beside it."""
        self._respeed_prompts()
        self._advance()
        if self._next is not None:
            self._next.cancel()
            self._next = None
        if not self._decoding:
            return
        assert isinstance(self.service, Batching)
        base = self.service.tpot_ms + self.service.tpot_ms_more * (len(self._decoding) - 1)
        self._speed = 1.0 / (base / 1e3 * self.slowness() * (1.0 + self._overhead()) + self._hops())
        left = max(0.0, self._decoding[0][0] - self._virtual)
        pause = max(0.0, self._since - self._clock.now)
        self._next = self._clock.call_later(pause + left / self._speed, self._on_decoded)

    def _overhead(self) -> float:
        return self._runtime.kv_overhead if self._runtime.elastic_kv else 0.0

    def _on_decoded(self) -> None:
        self._next = None
        self._advance()
        ended = []
        while self._decoding and self._decoding[0][0] <= self._virtual + 1e-6:
            ended.append(heappop(self._decoding)[2])
        for run in ended:
            run.tokens = run.output
            self._forget(run)
        self.respeed()
        for run in ended:
            self.finished(run)

    def _end(self, run: Run) -> None:
        run.tokens = run.output if isinstance(self.service, Batching) else max(1, run.tokens)
        self._forget(run)
        self.finished(run)

    def _forget(self, run: Run) -> None:
        now = self._clock.now
        del self.runs[run]
        for part in self.parts:
            part.device.end(now)
        if not self.runs:
            self.idle_since = now
            self._others_share()

    def take(self, run: Run) -> None:
        """Remove a running request, with its tokens so far."""
        run.tokens = self.tokens_of(run)
        if run.paused_at is None:
            run.paused_at = self._prompt_end(run)
        run.prepared = 0
        if run.timer is not None:
            run.timer.cancel()
            run.timer = None
        self._prompts.pop(run, None)
        for waiting in (self._pending, self._withheld or []):
            if run in waiting:
                waiting.remove(run)
        self._decoding = [d for d in self._decoding if d[2] is not run]
        self._decoding.sort()
        if not any(r.timer is not None for r in self.runs if r is not run):
            self._prompts_until = max(self._clock.now, self._since)
        self._forget(run)
        run.instance = None
        run.release_kv()
        self.respeed()

    def become(self, parts: list[Part], pause: float) -> None:
        """Turn a pipeline into one of its stages.

        It computes nothing while its KV cache is gathered.
        """
        now = self._clock.now
        for run in self.runs:
            for part in self.parts:
                part.device.end(now)
            for part in parts:
                part.device.begin(now)
            if run.paused_at is None:
                run.pause += pause
        self._advance()
        self.parts = parts
        self.capacity = self.capacity_of(len(parts))
        self._respeed_prompts()
        self.hold(pause)
        self.respeed()

    def hold(self, seconds: float) -> None:
        """Compute nothing for so many seconds; what is under way ends that much later."""
        if seconds <= 0:
            return
        self._advance()
        self._since = self._clock.now + seconds
        self._prompts_until = max(self._clock.now, self._prompts_until) + seconds
        for run, end in list(self._prompts.items()):
            assert run.timer is not None
            run.timer.cancel()
            self._schedule_prompt(run, end + seconds)
        if self._next_pass is not None:
            self._next_pass.cancel()
        self._next_pass = self._clock.at(self._prompts_until, self._pass)

    def tokens_of(self, run: Run) -> int:
        """Return the tokens of a request so far."""
        if run.timer is not None or isinstance(self.service, Fixed):
            return run.tokens
        self._advance()
        return max(run.tokens, min(run.output - 1, int(run.output - (run.decode_end - self._virtual) + 1e-6)))

    def kv_tokens_of(self, run: Run) -> int:
        """Return the tokens of a request whose KV cache is there.

        A prompt that waits or is being computed has none, except for the part that was prepared.
        """
        if run.timer is not None and isinstance(self.service, Batching):
            return run.prepared
        return run.prompt + self.tokens_of(run)

    def progress(self) -> tuple[float, int]:
        """Return the seconds until the last request ends, and the tokens of the longest."""
        if isinstance(self.service, Fixed):
            left = max(0.0, self._prompts_until - self._clock.now) if self.runs else 0.0
            return left, max((r.prompt for r in self.runs), default=0)
        self._advance()
        virtual, longest, remaining = self._virtual, 0, 0.0
        for run in self.runs:
            left = run.output - run.tokens if run.timer is not None else run.decode_end - virtual
            if left > remaining:
                remaining = left
            tokens = run.prompt + run.output - left
            if tokens > longest:
                longest = int(tokens)
        speed = self._speed or 1e3 / self.service.tpot_ms
        return remaining / speed, longest

    def _others_share(self) -> None:
        if self._runtime.share_compute != "none":
            for part in self.parts:
                if len(part.device.instances) > 1:
                    for other in part.device.instances.values():
                        if other is not self and other.runs:
                            other.respeed()


def _has_context(run: Run) -> bool:
    """True if it is resumed: it has tokens, or a part of its KV cache is there."""
    return bool(run.tokens or run.prepared)


def _slowdown_by_turns(part: Part, instance: Instance) -> float:
    """Return the slowdown where the busy processes of a device compute in turns."""
    instances = part.device.instances
    return 1.0 + sum(1 for other in instances.values() if other is not instance and other.runs) if len(instances) > 1 else 1.0


def _slowdown_by_memory(part: Part, instance: Instance) -> float:
    """Return the slowdown where shares of a device are by booked memory (HydraServe §4.1)."""
    instances = part.device.instances
    if len(instances) <= 1:
        return 1.0
    total = own = 0
    for other in instances.values():
        if other is instance or other.runs:
            here = sum(p.nbytes for p in other.parts if p.device is part.device)
            total += here
            own += here if other is instance else 0
    return total / own if own else 1.0
