"""How many decisions a second the scheduler makes: the pure loop, with nothing else around it.

    python -m bench.scheduler [--devices 16,1000,8000] [--seconds S] [--json PATH]

`devices` devices of 24 GiB, eight to a node, whose loaders differ (forty bandwidths), and as many
models (at most 1,000) of 8 GiB. Garbage collection as in the service.

- demand:  demand for a model that has no instance, on a cluster that is two thirds full: placed,
           started.
- evict:   the same on a full cluster where every instance is idle: victims chosen, asked to leave,
           their bytes claimed.
- status:  a node's status in which nothing has changed but the time.
- tick:    the timer's look at everything.
- waiting: the same on a full cluster whose instances all serve, while ten models a device (at most
           320) wait for room. Requests do not migrate, because the residents' replicas would take
           those of many instances, and most of these models would have room.

Each decision is timed with the applying of its changes, in CPU time, so that other work on the
machine does not count. What a decision began is undone outside the clock, so that every one meets
the same cluster.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator
from itertools import cycle
from pathlib import Path

from rich.console import Console
from rich.table import Table

from bench.report import machine, write
from services.scheduler.adapters.gc_tuning import freeze_heap, unfreeze_heap
from services.scheduler.domain import ClusterState, decide
from services.scheduler.domain.effects import SendStart, SendStop
from services.scheduler.domain.events import DemandReceived, Event, NodeStatusReceived, Tick
from services.scheduler.domain.policy import Policy
from services.scheduler.domain.state.changes import Put, apply
from services.scheduler.domain.state.entities import Device, Instance, Model, Node
from services.scheduler.domain.state.volatile import InstanceReport, LoaderPresence, Presence
from shared.contracts.demand import Demand
from shared.contracts.engine import EngineLoad
from shared.contracts.loader import LoaderStatus
from shared.contracts.model_info import ModelInfo
from shared.contracts.models import ModelCard, ModelSpec
from shared.contracts.node import DeviceStatus, InstanceMemory, InstanceState, InstanceStatus, NodeStatus
from shared.percentiles import percentile
from shared.sizing import need_of

GIB = 2**30
PER_NODE = 8
BUDGET = 24 * GIB
NOW = 1_000_000.0
POLICY = Policy()
WITHOUT_MIGRATION = Policy(capabilities=POLICY.capabilities - {"migrate"})


def card(number: int) -> ModelCard:
    info = ModelInfo(
        source=f"/models/{number}",
        revision=f"revision-{number}",
        architecture="LlamaForCausalLM",
        model_type="llama",
        task="generate",
        weights_bytes=6 * GIB,
        parameters=3 * 10**9,
        dtype="bfloat16",
        context_length=8192,
        kv_bytes_per_token=4096,
    )
    return ModelCard(spec=ModelSpec(name=f"model-{number}", source=info.source, keep_alive=-1), info=info, created=0)


class Cluster:
    """A cluster with idle instances."""

    def __init__(self, devices: int, filled: int, cold: int | None = None) -> None:
        """Create the cluster.

        Args:
            devices: Number of devices, each with room for three instances.
            filled: Number of instances on each device.
            cold: Number of models without an instance; None: as many as have one, and at least 8.
        """
        self.state = ClusterState(epoch=1, recovered_at=NOW - 100)
        running = devices * filled
        residents = max(1, min(devices, 1000) // 2)
        count = max(8, residents) if cold is None else cold
        self.cold = [f"model-{n}" for n in range(residents, residents + count)]
        cards = [card(n) for n in range(residents + len(self.cold))]
        changes: list[Put] = [Put(Model(c)) for c in cards]
        self.need = need_of(cards[0]).total
        instances = [
            self._instance(n, cards[n % residents], f"node-{n // filled // PER_NODE}", f"cuda:{n // filled % PER_NODE}")
            for n in range(running)
        ]
        by_node: dict[str, list[tuple[Instance, InstanceStatus]]] = {}
        for pair in instances:
            by_node.setdefault(pair[0].node, []).append(pair)
        for number in range(-(-devices // PER_NODE)):
            name = f"node-{number}"
            count = min(PER_NODE, devices - number * PER_NODE)
            ids = [f"cuda:{d}" for d in range(count)]
            known = by_node.get(name, [])
            status = NodeStatus(
                node=name,
                boot_id="b",
                seq=2,
                devices=tuple(
                    DeviceStatus(device_id=d, kind="cuda", budget_bytes=BUDGET, reserved_bytes=filled * self.need) for d in ids
                ),
                instances=tuple(s for _, s in known),
            )
            changes.append(Put(Node(name, "b", {}, tuple(Device(d, "cuda", "", BUDGET) for d in ids))))
            changes.append(Put(Presence(name, NOW, True, status)))
            speed = 2e9 + number % 40 * 1e8
            changes.append(Put(LoaderPresence(name, NOW, LoaderStatus(node=name, boot_id="b", bytes_per_second=speed))))
            changes += [Put(i) for i, _ in known]
            changes += [Put(InstanceReport(i.instance_id, s, NOW - 60 - hash(i.instance_id) % 1000)) for i, s in known]
        apply(self.state, changes)
        self.nodes = list(self.state.presence)

    def _instance(self, number: int, card: ModelCard, node: str, device: str) -> tuple[Instance, InstanceStatus]:
        need = need_of(card)
        instance = Instance(
            instance_id=f"i-{number}",
            plan_id=f"plan-{number}",
            token=2**32 + number,
            model=card.name,
            generation=card.generation,
            revision=card.info.revision,
            node=node,
            device_ids=(device,),
            reserve_bytes=need.total,
            kv_bytes=need.kv,
            requested_at=NOW - 2000,
            planned_at=NOW - 2000,
            state=InstanceState.READY,
            sent_at=NOW - 2000,
            ready_at=NOW - 1990,
        )
        status = InstanceStatus(
            instance_id=f"i-{number}",
            plan_id=f"plan-{number}",
            token=2**32 + number,
            model=card.name,
            generation=card.generation,
            revision=card.info.revision,
            device_ids=(device,),
            state=InstanceState.READY,
            memory=InstanceMemory(reserved=need.total),
            load=EngineLoad(completed=5, idle_ms=60_000),
        )
        return instance, status

    def demands(self) -> Iterator[Event]:
        for name in cycle(self.cold):
            yield DemandReceived(NOW, Demand(gateway="g", model=name, waiting=1), "w")

    def statuses(self) -> Iterator[Event]:
        seq = 2
        while True:
            seq += 1
            for name in self.nodes:
                status = self.state.presence[name].status
                assert status is not None
                yield NodeStatusReceived(NOW, status.model_copy(update={"seq": seq}))

    def fill_with_waiting(self) -> None:
        """Let every instance serve, and every model without an instance wait for room."""
        for name in self.nodes:
            status = self.state.presence[name].status
            assert status is not None
            serving = tuple(i.model_copy(update={"load": EngineLoad(active=1, completed=5)}) for i in status.instances)
            changed = status.model_copy(update={"seq": 3, "instances": serving})
            apply(self.state, decide(self.state, NodeStatusReceived(NOW, changed), NOW, WITHOUT_MIGRATION).changes)
        for name in self.cold:
            wanted = DemandReceived(NOW, Demand(gateway="g", model=name, waiting=1), "w")
            apply(self.state, decide(self.state, wanted, NOW, WITHOUT_MIGRATION).changes)
        if len(self.state.unschedulable) < len(self.cold):
            raise RuntimeError("models have room that were to wait")

    def ticks(self) -> Iterator[Event]:
        while True:
            yield Tick(NOW)


def run(
    state: ClusterState,
    events: Iterator[Event],
    seconds: float,
    expected: Callable[[object], bool] | None = None,
    policy: Policy = POLICY,
) -> list[float]:
    """Seconds of each decision, for `seconds` seconds.

    Args:
        expected: An effect that every decision must have.
    """
    took: list[float] = []
    until = time.perf_counter() + seconds
    while time.perf_counter() < until or len(took) < 20:
        event = next(events)
        above = state.overlay()
        started = time.process_time()
        decision = decide(state, event, NOW, policy)
        above.absorb(decision.overlay)
        took.append(time.process_time() - started)
        if expected is not None and not any(expected(e) for e in decision.effects):
            raise RuntimeError(f"not the decision that is to be measured: {decision.effects}")
    return took


def measure(devices: int, seconds: float) -> dict[str, list[float]]:
    part, full, waiting = Cluster(devices, 2), Cluster(devices, 3), Cluster(devices, 3, cold=min(10 * devices, 320))
    waiting.fill_with_waiting()
    freeze_heap()  # as the service does
    try:
        return _measure_parts(part, full, waiting, seconds)
    finally:
        unfreeze_heap()


def _measure_parts(part: Cluster, full: Cluster, waiting: Cluster, seconds: float) -> dict[str, list[float]]:
    return {
        "demand": run(part.state, part.demands(), seconds, lambda e: isinstance(e, SendStart)),
        "evict": run(full.state, full.demands(), seconds, lambda e: isinstance(e, SendStop)),
        "status": run(part.state, part.statuses(), seconds),
        "tick": run(part.state, part.ticks(), seconds),
        "waiting": run(waiting.state, waiting.ticks(), seconds, policy=WITHOUT_MIGRATION),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", default="16,1000,8000")
    parser.add_argument("--seconds", type=float, default=3.0, help="for each figure")
    parser.add_argument("--json", type=Path, default=None)
    options = parser.parse_args()
    print(json.dumps(machine()), file=sys.stderr)
    table = Table("devices", "decision", "per second", "p50 µs", "p99 µs", title="Scheduler decisions")
    figures: dict[str, float] = {}
    for devices in map(int, options.devices.split(",")):
        for kind, took in measure(devices, options.seconds).items():
            rate, p50, p99 = len(took) / sum(took), percentile(took, 50) * 1e6, percentile(took, 99) * 1e6
            table.add_row(f"{devices:,}", kind, f"{rate:,.0f}", f"{p50:,.0f}", f"{p99:,.0f}")
            figures |= {f"{devices}.{kind}.per_second": rate, f"{devices}.{kind}.p50_us": p50, f"{devices}.{kind}.p99_us": p99}
    Console(width=100).print(table)
    write(options.json, figures)


if __name__ == "__main__":
    main()
