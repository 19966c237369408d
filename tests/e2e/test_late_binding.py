"""Shared models on a node with three separate devices, through `thaw up` and HTTP."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import psutil
import pytest

from tests.support.launcher import Thaw, running, until
from tests.support.moving import Stream, body
from tests.support.paced_zygote import Pace
from tests.support.sizes import size
from thaw.demo.models import make_demo_model

NAMES = tuple("abcdef")
DEVICES = ("cpu:0", "cpu:1", "cpu:2")


@pytest.fixture(scope="module")
def mesh(pace: Pace) -> Iterator[Thaw]:
    thaw = Thaw(THAW_DRAM_BYTES="0", THAW_VERIFY="true", **pace.environment)
    sources = {name: make_demo_model(thaw.home / "models" / name, "test", seed) for seed, name in enumerate(NAMES)}
    for source in sources.values():
        config = json.loads((source / "config.json").read_text())
        (source / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 1024}))
    nodes = {"node-0": {d: {"size": "700MiB", "memory": "separate"} for d in DEVICES}}
    models = [{"name": name, "source": str(source)} for name, source in sources.items()]
    with running(thaw, nodes, models, isolation="shared", max_concurrency=4) as found:
        yield found


def text(mesh: Thaw, model: str) -> str:
    stream = Stream(mesh.url, body(model, max_tokens=12)).start().result()
    assert stream.done, stream.error
    return stream.text


def device_of(mesh: Thaw, model: str) -> str:
    [device_id] = mesh.instance(model)["device_ids"]
    return str(device_id)


def assert_booked_once(mesh: Thaw) -> None:
    """Assert that the scheduler's bookings are those of the node."""

    def agrees() -> bool:
        [node] = mesh.cluster()["nodes"]
        used = {d for i in node["instances"] if i["state"] == "ready" for d in i["device_ids"]}
        booked = {d["device_id"] for d in node["devices"] if d["reserved_bytes"] > d.get("executor_bytes", 0)}
        return used == booked and all(d["reserved_bytes"] <= d["budget_bytes"] for d in node["devices"])

    until(agrees, what="bookings follow the devices of the instances")


def test_a_burst_of_models_is_spread_and_a_busy_device_is_left_alone(mesh: Thaw, pace: Pace) -> None:
    with ThreadPoolExecutor(3) as pool:
        expected = dict(zip("abc", pool.map(lambda name: text(mesh, name), "abc"), strict=True))
    assert len({device_of(mesh, name) for name in "abc"}) > 1, "they were not all bound to one device"
    assert_booked_once(mesh)
    with pace.slowed(0.3):
        long = Stream(mesh.url, body("a", max_tokens=size(300, 900), ignore_eos=True)).start()
        assert long.opened.wait(120)
        expected["d"] = text(mesh, "d")
        assert not long.done
    assert long.result().done
    mesh.json("sleep", "d")
    assert text(mesh, "d") == expected["d"], "wherever it is bound"
    assert {name: text(mesh, name) for name in expected} == expected
    assert_booked_once(mesh)
    plan = mesh.plan("d")
    assert plan["chosen"]["device_ids"] == [device_of(mesh, "d")]


def test_requests_survive_the_end_of_an_executor_and_of_the_nodeagent_during_starts(mesh: Thaw) -> None:
    expected = {name: text(mesh, name) for name in NAMES}
    for name in NAMES:
        mesh.json("sleep", name)
    with ThreadPoolExecutor(len(NAMES)) as pool:
        answers = pool.map(lambda name: text(mesh, name), NAMES)
        old = mesh.kill("nodeagent.node-0")
        assert dict(zip(NAMES, answers, strict=True)) == expected
    mesh.await_replaced("nodeagent.node-0", old)
    # A start that the killed agent had begun may have failed after its model answered elsewhere.
    assert {name: text(mesh, name) for name in NAMES} == expected
    assert_booked_once(mesh)
    pids = {pid for name in NAMES for pid in mesh.instance(name)["pids"]}
    for name in NAMES:
        mesh.json("sleep", name)
    with ThreadPoolExecutor(len(NAMES)) as pool:
        answers = pool.map(lambda name: text(mesh, name), NAMES)
        for pid in pids:
            with suppress(psutil.NoSuchProcess):
                psutil.Process(pid).kill()
        assert dict(zip(NAMES, answers, strict=True)) == expected
    assert_booked_once(mesh)
