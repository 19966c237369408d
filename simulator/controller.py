"""Simulate a controller: queue requests, ask the profile, carry out its choices.

Requests for running models go to the instance with the fewest requests. The profile makes all other
decisions: the order of waiting models, victims, options, keep-alive, and replicas.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from services.scheduler.domain.policies import torpor_queue
from services.scheduler.domain.policies.port import Ask, Option, Usage
from simulator.instances import Instance, Run, SimDevice, SimModel
from simulator.migrations import Migrations
from simulator.options import Options
from simulator.pipelines import Pipelines
from simulator.report import Outcome, Served
from simulator.starts import Start, Starts
from simulator.stops import Stops
from simulator.workloads.request import Request
from simulator.world import World

_NO_BOOK: Mapping[str, Usage] = {}


class Controller:
    def __init__(self, world: World) -> None:
        self.world = world
        self.options = Options(world)
        self.starts = Starts(world, self.options)
        self.stops = Stops(world, self.options, self.starts, self.requeue, self._on_freed)
        self.migrations = Migrations(
            world, self.starts, self._start_at, self.stops.leave, self._served_out, self._grant, self.requeue
        )
        self.stops.migrations = self.migrations
        self.pipelines = Pipelines(
            world, self.starts, self.options, self.stops, self._in_service, self._served_out, self._grant, self.requeue
        )
        self._hungry: dict[SimModel, None] = {}
        self._open = 0
        self._requests: Sequence[Request] = ()
        self._next = 0
        self._pumping = self._again = False
        self._arrivals = False
        """True while requests of this instant wait for a decision."""
        self._alpha, self._ratio = world.runtime.alpha, 1.0
        self._last_ended = 0.0

    # Requests.

    def run(self, requests: Sequence[Request]) -> Outcome:
        world = self.world
        self._requests, self._open = requests, len(requests)
        if requests:
            world.clock.at(requests[0].at, self._arrive)
            if world.profile.slo_queue:
                world.clock.call_later(world.runtime.alpha_period_s, self._adapt)
            world.clock.run(until=lambda: self._open == 0)
        self._close()
        return world.outcome

    def _arrive(self) -> None:
        world, now = self.world, self.world.clock.now
        request = self._requests[self._next]
        number, self._next = self._next, self._next + 1
        if self._next < len(self._requests):
            world.clock.at(self._requests[self._next].at, self._arrive)
        model = world.models[request.model]
        run = Run(request, number, model)
        world.arrived += 1
        model.record_request(now, run.output, world.runtime.window_s)
        if self._fits_nowhere(model):
            self._give_up(run, timed_out=False)
        else:
            model.queue.append(run)
            self._hungry[model] = None
            if not world.runtime.exclusive:
                self.dispatch(model)
            if run.waiting:
                model.tried = -1
                self._arrivals = True
        more = self._next < len(self._requests) and self._requests[self._next].at <= now
        if self._arrivals and (world.runtime.exclusive or not more):
            self._arrivals = False
            self.pump()  # requests of one instant are one decision
        if run.waiting:
            self._limit_wait(run)

    def _fits_nowhere(self, model: SimModel) -> bool:
        return not any(model.need <= d.budget for n in model.nodes for d in n.devices)

    def _limit_wait(self, run: Run) -> None:
        """Fail a waiting request after `timeout_s`; if it is interrupted, it waits again."""
        clock = self.world.clock
        run.deadline = clock.now + self.world.runtime.timeout_s
        clock.at(run.deadline, lambda: self._timed_out(run))

    def _timed_out(self, run: Run) -> None:
        if run.waiting and self.world.clock.now >= run.deadline:
            run.model.queue.remove(run)
            self._give_up(run, timed_out=True)

    def _give_up(self, run: Run, *, timed_out: bool) -> None:
        run.waiting = False
        outcome = self.world.outcome
        if timed_out:
            outcome.timed_out += 1
        else:
            outcome.failed += 1
        outcome.given_up.append((run.model.name, run.arrived, run.number))
        self._record_use(run.model, met=False)
        self._record_end()

    def requeue(self, runs: list[Run]) -> None:
        """Queue preempted requests before all others of their model."""
        for run in reversed(runs):
            run.waiting = True
            run.model.queue.appendleft(run)
            self._hungry[run.model] = None
            run.model.tried = -1
        for model in dict.fromkeys(r.model for r in runs):
            self.dispatch(model)
        self.pump()
        for run in runs:
            if run.waiting:
                self._limit_wait(run)

    def dispatch(self, model: SimModel) -> None:
        """Assign waiting requests to open instances, the least busy first."""
        if self.world.runtime.exclusive:
            return
        queue = model.queue
        while queue:
            best: Instance | None = None
            for instance in model.instances.values():
                if instance.open and (best is None or len(instance.runs) < len(best.runs)):
                    best = instance
            if best is None or not self._grant(best, queue[0]):
                return
            self._serve(best, queue.popleft())
        self._hungry.pop(model, None)

    def _serve(self, instance: Instance, run: Run, since: float | None = None) -> None:
        first = not instance.runs
        instance.admit(run, since)
        if first or self.world.runtime.exclusive:
            for part in instance.parts:
                self.world.touch(part.device)

    def _grant(self, instance: Instance, run: Run) -> bool:
        """Reserve memory for the request's KV cache where instances have none.

        Reusable weights are evicted for it, and idle instances unless those that leave already free
        enough.
        """
        world, model = self.world, instance.model
        if not world.runtime.elastic_kv or not model.kv_per_token or run.kv_bytes:
            return True
        device = instance.parts[0].device
        wanted = min(int(model.kv_per_token * (run.prompt + run.output)), device.budget - model.need)
        if world.free(device) < wanted and not self._clear_for_kv(run, device, wanted):
            return False
        run.kv_bytes, run.kv_device = wanted, device
        device.booked += wanted
        world.touch(device)
        return True

    def _clear_for_kv(self, run: Run, device: SimDevice, wanted: int) -> bool:
        """Clear memory for a KV cache, and return True if it is free at once.

        1. Reusable weights that suffice are evicted.
        2. Otherwise the request waits for the instances that are leaving, and for what the policy
           clears besides.
        """
        world, model = self.world, run.model
        world.asking = model.group.priority
        ask = Ask(model.name, wanted, 0.0, priority=world.asking, exec_s=model.exec_seconds(run.prompt, run.output))
        short = wanted - world.free(device)
        found = self.options.choose_victims(ask, device, short)
        if found is None or not all(key.startswith("weights:") for key in found.victims):
            short -= sum(r.nbytes for r in world.view(device).residents if r.state == "leaving")
            found = self.options.choose_victims(ask, device, short) if short > 0 else None
        if found is None:
            return False
        for key in found.victims:
            if key.startswith("weights:") and short > 0:
                short -= device.drop(key.removeprefix("weights:"), short)
        if short > 0:
            self.stops.clear(device, found)
        world.touch(device)
        return world.free(device) >= wanted

    def on_finished(self, run: Run) -> None:
        """Record a finished request."""
        world, now, instance, model = self.world, self.world.clock.now, run.instance, run.model
        assert instance is not None
        assert run.begun is not None
        if (device := run.kv_device) is not None:
            run.release_kv()
            world.touch(device)
            self.starts.retry_waiting(device)
        first = run.first_at if run.first_at is not None else now
        ttft = first - run.arrived
        tpot = (now - first) / (run.output - 1) if run.output > 1 and now > first else 0.0
        met = ttft <= model.group.slo_ttft
        world.outcome.served.append(
            Served(model.name, run.arrived, run.begun - run.arrived, ttft, tpot, met, run.pause, now, run.cold, run.number)
        )
        self._record_use(model, met)
        run.instance = None
        if instance.runs:
            self.dispatch(model)
            if self._hungry:
                self.pump()
        else:
            self._served_out(instance)
        self._record_end()

    def _served_out(self, instance: Instance) -> None:
        """Handle an instance without requests."""
        if instance.state != "ready":
            return
        for part in instance.parts:
            self.world.touch(part.device)
        if not self.stops.on_emptied(instance):
            self.dispatch(instance.model)
            if not instance.runs:
                self.stops.keep(instance)
        for part in instance.parts:
            self.starts.retry_waiting(part.device)
        if self._hungry:
            self.pump()

    def _record_use(self, model: SimModel, met: bool) -> None:
        usage = self.world.book.get(model.name)
        if usage is None:
            return
        self.world.book[model.name] = Usage(model.name, usage.total + 1, usage.met + met, usage.percentile)

    def _record_end(self) -> None:
        self._open -= 1
        self._last_ended = self.world.clock.now

    def _adapt(self) -> None:
        ratio = torpor_queue.compliant_ratio(u for u in self.world.book.values() if u.total)
        self._alpha, self._ratio = torpor_queue.next_alpha(self._alpha, self._ratio, ratio), ratio
        self.world.clock.call_later(self.world.runtime.alpha_period_s, self._adapt)

    # Decisions.

    def pump(self) -> None:
        """Ask the profile about every waiting model until it chooses nothing more."""
        if self._pumping:
            self._again = True
            return
        self._pumping = self._again = True
        try:
            while self._again:
                self._again = False
                self._consider()
        finally:
            self._pumping = False

    def _on_freed(self) -> None:
        """Decide again after the event that has freed memory, if models wait."""
        if self._hungry:
            self.world.clock.call_later(0.0, self.pump)

    def _consider(self) -> None:
        world = self.world
        if world.runtime.elastic_kv:
            for model in list(self._hungry):
                self.dispatch(model)  # its instances may have memory for KV caches now
        if world.runtime.exclusive and not any(_is_available(d) for d in world.devices.values()):
            return
        asks = [world.ask_of(m, missing) for m in list(self._hungry) if (missing := self._count_missing(m))]
        if not asks:
            return
        profile = world.profile
        if len(asks) > 1:
            asks = profile.order(asks, world.book if profile.slo_queue else _NO_BOOK, self._alpha)
        hopeless: dict[SimModel, int] = {}
        for ask in asks:
            model = world.models[ask.model]
            version = world.version
            if model.tried == version or not model.queue:
                continue
            if any(v == version and model.is_as_large_as(m) for m, v in hopeless.items()) and self._is_nowhere(model):
                model.tried = version  # an equal model has just found no device
                continue
            world.outcome.decisions += 1
            world.asking = ask.priority
            options = self.options.list_options(ask, model)
            option = profile.choose(ask, options, f"{world.seed}:{world.plans}") if options else None
            if option is None:
                model.tried = version
                if not options and self._is_nowhere(model):
                    hopeless[model] = version
                continue
            self._carry_out(model, option)
            self._again = True
            if world.runtime.exclusive and not any(_is_available(d) for d in world.devices.values()):
                return

    def _is_nowhere(self, model: SimModel) -> bool:
        """True if no part of the model is on any device.

        The model may then go to any device where an equal one may go.
        """
        if any(k[1] == model.name for k in self.options.snapshots):
            return False
        return not model.instances and not any(model.name in d.kept for d in self.world.devices.values())

    def _count_missing(self, model: SimModel) -> int:
        """Return how many more instances the model needs.

        With devices that run one request at a time: one, if any request waits.
        """
        if not model.queue:
            self._hungry.pop(model, None)
            return 0
        if model.tried == self.world.version:
            return 0
        if self.world.runtime.exclusive:
            return 1
        demand = self.world.demand_of(model)
        return max(0, self.world.profile.scale(demand) - demand.live)

    def _carry_out(self, model: SimModel, option: Option) -> None:
        world = self.world
        world.plans += 1
        if option.way == "ready":
            device = world.devices[option.key[0]]
            instance = next(i for i in device.instances.values() if i.model is model)
            world.outcome.loads["ready"] = world.outcome.loads.get("ready", 0) + 1
            self._take(instance, world.clock.now)
            return
        start = self.starts.create(model, option, f"i{world.plans}", self.on_finished, self._in_service)
        if world.runtime.exclusive:
            run = start.instance.bound = model.queue.popleft()
            run.waiting = False
            if not model.queue:
                self._hungry.pop(model, None)
        for key in option.key:
            self.stops.clear(world.devices[key], option.clearance)
        self.starts.begin(start)

    def _take(self, instance: Instance, since: float) -> None:
        """Run the next request on a device of its own."""
        run = instance.model.queue.popleft()
        if not instance.model.queue:
            self._hungry.pop(instance.model, None)
        self._serve(instance, run, since)

    def _start_at(self, source: Instance, device: SimDevice, ready: Callable[[Instance], None]) -> Start | None:
        """Start an instance as the destination of another's requests; None without room."""
        world, model = self.world, source.model
        if not device.node.alive or world.free(device) < model.need:
            return None
        world.plans += 1
        path = device.node.tier(model.name)
        option = self.options.make_plain(model, device, path)
        return self.starts.create(model, option, f"i{world.plans}", self.on_finished, ready)

    def _in_service(self, instance: Instance) -> None:
        """Put a ready instance into service."""
        world = self.world
        if instance.predicted is not None and not world.runtime.exclusive:
            first = instance.model.prefill_seconds(instance.prompt_predicted, instance.service)
            world.outcome.prediction_errors.append(instance.load_s + first - instance.predicted)
        if instance.bound is not None:
            run, instance.bound = instance.bound, None
            late = world.runtime.late_execution
            self._serve(instance, run, instance.loading_since if late else world.clock.now)
            return
        self.dispatch(instance.model)
        if len(instance.parts) > 1:
            self.pipelines.consolidate(instance)
        if not instance.runs and instance.state == "ready":
            self.stops.keep(instance)
        if self._hungry:
            self.pump()

    def _close(self) -> None:
        """Finish the run: add what instances held and how busy devices were."""
        world = self.world
        now = world.clock.now = max(self._last_ended, 0.0)
        world.outcome.ended_at = now
        seen = {}
        for device in world.devices.values():
            if device.busy:
                device.busy_s += max(0.0, now - device.busy_since)
            seen.update({i.key: i for i in device.instances.values()})
        for instance in seen.values():
            self.stops.count(instance)
        for node in world.nodes.values():
            world.outcome.device_loads[node.name] = tuple(d.busy_s / now if now else 0.0 for d in node.devices)
        world.outcome.lost = self._open


def _is_available(device: SimDevice) -> bool:
    return device.node.alive and not device.busy and not device.starting
