"""`thaw wake`, interrupted before the model is ready."""

from __future__ import annotations

from typing import Any

import pytest
from typer.testing import CliRunner

from shared.contracts.admin import ClusterView, ModelAsleep, NodeView
from shared.contracts.node import DeviceStatus, InstanceMemory, InstanceState, InstanceStatus
from shared.sizing import MIB
from tests.unit.cli.views import VIEW, instance
from thaw.cli import wake as verbs
from thaw.cli.app import app

GIB = 1024 * MIB


class Impatient:
    """An operator who presses Ctrl-C."""

    @classmethod
    def find(cls) -> Impatient:
        return cls()

    def wake(self, model: str) -> Any:
        raise KeyboardInterrupt


def test_an_interrupted_wait_prints_how_to_cancel_the_wake(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verbs, "Api", Impatient)
    result = CliRunner().invoke(app, ["wake", "coder"])
    assert result.exit_code == 130
    assert "`thaw sleep coder` calls it off" in result.output


def seen(*instances: InstanceStatus, kind: str = "cpu") -> ClusterView:
    device = DeviceStatus(device_id="cpu:0", kind=kind, budget_bytes=8 * GIB, reserved_bytes=0)
    node = NodeView(node="n", alive=True, devices=(device,), instances=instances)
    return ClusterView(scheduler="s", epoch=1, models=(VIEW,), nodes=(node,))


def holding(state: InstanceState, reserved: int, weights: int = GIB, instance_id: str = "i") -> InstanceStatus:
    memory = InstanceMemory(reserved=reserved, weights=weights)
    return instance(state).model_copy(update={"memory": memory, "instance_id": instance_id, "device_ids": ("cpu:0",)})


def test_suspended_model_is_shown_with_its_remaining_reservation() -> None:
    left = verbs.nothing_left(seen(holding(InstanceState.SUSPENDED, 65 * MIB)), "m")
    assert left == "m is suspended already: 65.0 MiB of its device stay reserved, which suspending could not free."
    assert verbs.nothing_left(seen(holding(InstanceState.ASLEEP, 0)), "m") == "m is suspended already: it holds no device memory."
    assert verbs.nothing_left(seen(), "m") == "m has no instance on a device: nothing to do."


def test_freed_memory_is_shown_beside_the_reservation() -> None:
    before = seen(holding(InstanceState.READY, 3 * GIB))
    asleep = ModelAsleep(instances=("i",), freed_bytes=512 * MIB)
    parked = verbs.departure(before, seen(holding(InstanceState.SUSPENDED, 100 * MIB)), asleep)
    assert parked.lines("m") == [
        "[green]✓[/] m is suspended: 1 instance; its reservation fell from 3.0 GiB to 100 MiB",
        "  [dim]512 MiB of the engine's own memory were read back as free, and 1.0 GiB of weights stay in host memory for the next start.[/]",
    ]
    stopped = verbs.departure(before, seen(holding(InstanceState.STOPPED, 0)), asleep)
    assert "m is stopped: 1 instance; its reservation fell from 3.0 GiB to 0 B" in stopped.lines("m")[0]
    on_gpu = verbs.departure(seen(holding(InstanceState.READY, 3 * GIB), kind="cuda"), seen(), asleep)
    assert on_gpu.host_weights == 0
    assert "stay in host memory" not in on_gpu.lines("m")[1]


def test_weights_shared_by_instances_count_once() -> None:
    both = [holding(InstanceState.READY, 3 * GIB, instance_id=name) for name in ("i", "j")]
    after = seen(holding(InstanceState.SUSPENDED, 100 * MIB))
    found = verbs.departure(seen(*both), after, ModelAsleep(instances=("i", "j"), freed_bytes=GIB))
    assert (found.host_weights, found.reserved_before, found.suspended) == (GIB, 6 * GIB, 1)
    assert "m is stopped (1 suspended): 2 instances" in found.lines("m")[0]
