"""`thaw ps`: a model's state in one word."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from shared.contracts.admin import ClusterView, LoaderView, NodeView
from shared.contracts.loader import DeviceMemory, KvOnDevice, LinkStatus, ModelUnits
from shared.contracts.node import DeviceStatus, InstanceState, Suspension, Timing
from tests.unit.cli.migrations import DONE
from tests.unit.cli.views import VIEW, instance
from thaw.cli.ps import facts_of, show_devices, show_memory, show_models, state_of


@pytest.mark.parametrize(
    ("states", "waiting", "error", "word"),
    [
        ((), 0, None, "cold"),
        ((), 2, None, "waiting"),
        ((), 0, "broken", "failed"),
        ((InstanceState.LOADING,), 1, None, "loading"),
        ((InstanceState.LOADING, InstanceState.READY), 0, "older", "ready"),
        ((InstanceState.DRAINING,), 0, None, "draining"),
        ((InstanceState.PREPARING, InstanceState.LOADING), 0, None, "loading"),
        ((InstanceState.SUSPENDED,), 0, None, "suspended"),
        ((InstanceState.SUSPENDED, InstanceState.LOADING), 0, None, "loading"),
        ((InstanceState.RESUMING, InstanceState.SUSPENDED), 0, None, "resuming"),
    ],
)
def test_the_state_of_a_model(states: tuple[InstanceState, ...], waiting: int, error: str | None, word: str) -> None:
    node = NodeView(node="n", alive=True)
    view = VIEW.model_copy(update={"waiting": waiting, "error": error})
    assert state_of(view, [(node, instance(s)) for s in states]) == word


def test_tables_list_instances_with_memory_and_full_errors() -> None:
    device = DeviceStatus(device_id="cpu:0", kind="cpu", budget_bytes=2**30, reserved_bytes=2**29)
    instances = (instance(InstanceState.READY), instance(InstanceState.STOPPED))
    node = NodeView(node="n", alive=True, cordoned=True, devices=(device,), instances=instances)
    lost = NodeView(node="gone", alive=False, devices=(device,), instances=(instance(InstanceState.LOADING),))
    cluster = ClusterView(scheduler="s", epoch=1, models=(VIEW.model_copy(update={"error": "no [such] file"}),), nodes=(node, lost))
    file = io.StringIO()
    out = Console(file=file, width=140)
    show_models(out, cluster)
    show_devices(out, cluster)
    text = file.getvalue()
    assert "i-ready" in text
    assert "i-stopped" not in text
    assert "i-loading" not in text
    assert "m: no [such] file" in text
    assert "n cordoned" in text
    assert "gone lost" in text
    assert "512 MiB" in text


@pytest.mark.parametrize(("state", "is_served"), [(InstanceState.READY, True), (InstanceState.LOADING, False)])
def test_a_failed_start_is_no_failure_of_a_model_that_is_served(state: InstanceState, is_served: bool) -> None:
    node = NodeView(node="n", alive=True, instances=(instance(state),))
    file = io.StringIO()
    show_models(
        Console(file=file, width=140),
        ClusterView(scheduler="s", epoch=1, models=(VIEW.model_copy(update={"error": "boom"}),), nodes=(node,)),
    )
    assert ("m: boom (another instance serves)" in file.getvalue()) is is_served
    assert "m: boom" in file.getvalue()


def test_instances_of_a_running_migration_are_marked() -> None:
    node = NodeView(node="n", alive=True, instances=(instance(InstanceState.READY), instance(InstanceState.DRAINING)))
    there = DONE.model_copy(
        update={"state": "preparing", "source_instance": "i-draining", "instance_id": "i-ready", "source_node": "n", "node": "k"}
    )
    cluster = ClusterView(scheduler="s", epoch=1, models=(VIEW,), nodes=(node,))
    for migrations, marks in (([there], ("ready ← n", "draining → k")), ([DONE], ("ready ", "draining "))):
        file = io.StringIO()
        show_models(Console(file=file, width=160), cluster, migrations)
        assert all(mark in file.getvalue() for mark in marks)
        assert ("←" in file.getvalue()) is (migrations == [there])


def test_suspended_instance_is_shown_with_its_snapshot_size() -> None:
    parked = instance(InstanceState.SUSPENDED).model_copy(
        update={
            "suspension": Suspension(way="cpu", freed_bytes=2**30, snapshot_bytes=2**28, resumes=2),
            "started": Timing(at=1.0, took_ms=20_000.0),
            "suspended": Timing(at=2.0, took_ms=70.0),
        }
    )
    node = NodeView(node="n", alive=True, instances=(parked,))
    file = io.StringIO()
    show_models(Console(file=file, width=160), ClusterView(scheduler="s", epoch=1, models=(VIEW,), nodes=(node,)))
    assert "suspended 256 MiB" in file.getvalue()
    facts = facts_of(node, parked)
    assert facts["freed_by_last_suspend_bytes"] == 2**30
    assert facts["engine"] == "builtin"
    assert facts["last_start"] == {"at": 1.0, "took_ms": 20_000.0}
    assert facts["last_resume"] is None


LINKS = (
    LinkStatus(link="p2p:cpu:2>cpu:1", bytes_per_second=2.0**33, is_paced=True),
    LinkStatus(link="p2p:cpu:3>cpu:1", bytes_per_second=2.0**30),
    LinkStatus(link="p2p:cpu:1>cpu:2", bytes_per_second=2.0**33, is_paced=True),
)


def test_the_memory_of_a_separate_device_is_drawn() -> None:
    units = ModelUnits(model="base", weights_id="w", mapped_bytes=2**28, reusable_bytes=0, shared_bytes=2**27)
    memory = DeviceMemory(
        device_id="cpu:1",
        total_bytes=2**30,
        free_bytes=2**28,
        mapped_bytes=2**28,
        reusable_bytes=2**28,
        lent_bytes=2**28,
        copied_bytes=2**29,
        models=(units,),
        kv=(
            KvOnDevice(instance_id="i", model="base", floor_bytes=2**20, lent_bytes=2**27, wanted_bytes=3 * 2**26),
            KvOnDevice(instance_id="j", model="gone", floor_bytes=2**21, lent_bytes=0),
        ),
        paced_bytes_per_second=2.0**31,
    )
    node = NodeView(node="n", alive=True, loader=LoaderView(memory=(memory,), links=LINKS))
    file = io.StringIO()
    show_memory(Console(file=file, width=160), ClusterView(scheduler="s", epoch=1, models=(), nodes=(node,)))
    text = file.getvalue()
    assert "n cpu:1 1.0 GiB " + "█" * 10 + "▒" * 10 + "▚" * 5 + "▓" * 5 + "░" * 10 in text
    assert "256 MiB mapped, 256 MiB reusable, 128 MiB KV, 128 MiB of an earlier loader, 256 MiB free; copied 512 MiB" in text
    rows = [" ".join(line.split()) for line in text.splitlines()]
    assert "base 256 MiB 0 B 128 MiB 128 MiB 1.0 MiB 192 MiB" in rows
    assert "gone 0 B 0 B 0 B 0 B 2.0 MiB 0 B" in rows
    assert "paced to 2.0 GiB/s from host memory" in text
    assert "from cpu:2 8.0 GiB/s (paced)" in text
    assert "from cpu:3 1.0 GiB/s\n" in text
    file = io.StringIO()
    show_memory(Console(file=file, width=160), ClusterView(scheduler="s", epoch=1, models=(), nodes=()))
    assert "No device has memory of its own" in file.getvalue()


@pytest.mark.parametrize(("used", "explained"), [(2**20, False), (2**29, False), (2**30, True)])
def test_more_in_use_than_reserved_is_explained(used: int, explained: bool) -> None:
    device = DeviceStatus(device_id="cpu:0", kind="cpu", budget_bytes=2**31, reserved_bytes=2**29, used_bytes=used)
    file = io.StringIO()
    node = NodeView(node="n", alive=True, devices=(device,))
    show_devices(Console(file=file, width=140), ClusterView(scheduler="s", epoch=1, models=(), nodes=(node,)))
    assert ("weights that suspended instances keep" in " ".join(file.getvalue().split())) is explained
