"""Faults during a migration, except for a killed engine, migrator or scheduler (test_moving.py).

All processes are real. After each test no request, KV cache entry, lease or memory is left over.
"""

from __future__ import annotations

import contextlib
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import pytest

from shared.contracts.migration import MigrationRecord
from tests.support.launcher import ROOT, until
from tests.support.mesh import held, kill
from tests.support.moving import Roomy, Stream, body
from tests.support.moving_steps import Order, Staged, stopped
from tests.support.paced_zygote import Pace
from tests.support.sizes import size

NODES = ("node-0", "node-1", "node-2")
TOKENS, STEP_S = size(200, 300), 0.5
"""Of a stream that still runs when all processes are stopped at the wanted step, within 100 s:
engines are slow until then.
"""
LONG = body("one", seed=3, max_tokens=TOKENS, ignore_eos=True)
GREEDY = body("one", max_tokens=TOKENS, ignore_eos=True)


@pytest.fixture(scope="module")
def mesh(pace: Pace) -> Iterator[Roomy]:
    """Start three nodes, each with an instance of `one`, and register the model `two`.

    Both have the same architecture and different weights.
    """
    thaw = Roomy(**pace.environment)
    try:
        thaw.begin(
            3, names=("one", "two"), room=2.5, positions=4096, max_model_len=2560, max_concurrency=8, placement={"spread": True}
        )
        thaw.json("wake", "one")
        thaw.everywhere("one")
        yield thaw
    finally:
        thaw.close()


@pytest.fixture(scope="module")
def undisturbed(mesh: Roomy) -> Stream:
    return Stream(mesh.url, LONG).start().result()


@pytest.fixture(autouse=True)
def nothing_is_left(mesh: Roomy) -> Iterator[None]:
    until(lambda: all(mesh.on("one", n) for n in NODES), what="an instance on each node")
    yield
    mesh.assert_settled()


@pytest.fixture
def slow(mesh: Roomy, pace: Pace, undisturbed: Stream) -> Iterator[contextlib.ExitStack]:
    """Slow the engines down until the test closes this, or ends."""
    with contextlib.ExitStack() as found:
        found.enter_context(pace.slowed(STEP_S))
        yield found


def start_stream(mesh: Roomy, **headers: str) -> tuple[Stream, str, str]:
    """Start a stream; return it with the instance and the node that serve it."""
    stream = Stream(mesh.url, LONG, headers=headers).start()
    assert stream.opened.wait(120)
    source, node, _ = mesh.serving("one")
    return stream, source, node


def other_node(node: str, *nodes: str) -> str:
    """Return the first node that is none of these."""
    return next(n for n in NODES if n not in (node, *nodes))


def engine_pid_on(mesh: Roomy, node: str) -> int:
    (instance,) = mesh.on("one", node)
    return mesh.pid_of(instance)


def test_the_request_finishes_during_a_round(mesh: Roomy, undisturbed: Stream, slow: contextlib.ExitStack) -> None:
    stream, source, node = start_stream(mesh)
    to = other_node(node)
    with Staged(mesh).at("round", source, to, engine_pid_on(mesh, to)) as order:
        slow.close()
        stream.result().assert_same(undisturbed)
    assert [r["outcome"] for r in order.record()["requests"]] == ["finished"]


@pytest.mark.usefixtures("slow")
def test_client_disconnect_during_a_round_ends_the_migration(mesh: Roomy, undisturbed: Stream) -> None:
    stream, source, node = start_stream(mesh)
    to = other_node(node)
    with Staged(mesh).at("round", source, to, engine_pid_on(mesh, to)) as order:
        stream.leave()
        stream.thread.join(120)
        until(lambda: not count_active(mesh, source), what="the source has stopped")
    assert [r["outcome"] for r in order.record()["requests"]] == ["finished"]
    assert len(stream.tokens) < len(undisturbed.tokens)


def count_active(mesh: Roomy, instance_id: str) -> int:
    found = [i for n in mesh.cluster()["nodes"] for i in n["instances"] if i["instance_id"] == instance_id]
    return int(found[0]["load"]["active"]) if found else 0


@pytest.mark.parametrize("step", ["round", "asked"])
def test_nats_drops_for_two_seconds(mesh: Roomy, undisturbed: Stream, slow: contextlib.ExitStack, step: Any) -> None:
    """NATS is unreachable for two seconds.

    The test stops its supervisor meanwhile, which would restart it at once.
    """
    stream, source, node = start_stream(mesh)
    to = other_node(node)
    with held(mesh.pid("supervisor")), Staged(mesh).at(step, source, to, engine_pid_on(mesh, to)) as order:
        old = mesh.pid("nats")
        kill(old)
        time.sleep(2.0)  # the condition under test
    slow.close()
    stream.result().assert_same(undisturbed)
    mesh.await_replaced("nats", old)
    order.join(60)


@pytest.fixture
def second_migrator(mesh: Roomy) -> Iterator[int]:
    """Start a second migrator, so that two migrations run at the same time."""
    environment = mesh.environment | {"THAW_NATS_URL": mesh.endpoints["nats_url"], "THAW_MIGRATOR_NAME": "second"}
    with (mesh.home / "second.log").open("wb") as log:
        process = subprocess.Popen([sys.executable, "-m", "services.migrator"], env=environment, cwd=ROOT, stdout=log, stderr=log)
    yield process.pid
    process.terminate()
    process.wait(120)


def test_two_migrations_of_one_request_leave_one_response(
    mesh: Roomy, undisturbed: Stream, slow: contextlib.ExitStack, second_migrator: int
) -> None:
    stream, _, node = start_stream(mesh)
    first, second = other_node(node), other_node(node, other_node(node))
    staged = Staged(mesh)
    with stopped(mesh.pid("migrator")), stopped(second_migrator):
        orders = [Order(mesh, request_id=stream.request_id, node=to) for to in (first, second)]
        until(lambda: len(staged.new()) == 2, what="both are ordered")
    records = [o.record() for o in orders]
    slow.close()
    stream.result().assert_same(undisturbed)
    assert "done" in {r["state"] for r in records}, records
    assert all(m["outcome"] in ("moved", "elsewhere", "finished", "failed") for r in records for m in r["requests"])


def test_opposite_concurrent_migrations_complete(
    mesh: Roomy, undisturbed: Stream, slow: contextlib.ExitStack, second_migrator: int
) -> None:
    """The scheduler refuses the second of two opposite migration orders.

    If both orders are written anyway, both requests reach their destinations.
    """
    stream, source, node = start_stream(mesh)
    crossing = Stream(mesh.url, GREEDY).start()
    assert crossing.opened.wait(120)
    there: list[str] = []

    def two_serve() -> bool:
        busy = [n["node"] for n in mesh.cluster()["nodes"] for i in n["instances"] if i["load"]["active"]]
        there[:] = [n for n in busy if n != node]
        return len(busy) == 2

    until(two_serve, what="each is on a node of its own")
    (to,) = there
    (destination,) = mesh.on("one", to)
    staged = Staged(mesh)
    with stopped(mesh.pid("migrator")), stopped(second_migrator):
        first = Order(mesh, request_id=stream.request_id, node=to)
        until(lambda: len(staged.new()) == 1, what="the first is ordered")
        back = Order(mesh, request_id=crossing.request_id, node=node)
        back.join(120)
        assert back.refused["code"] == "conflict", back.answer
        (record,) = staged.new()
        mesh.write(
            record.model_copy(
                update={
                    "migration_id": f"{record.migration_id}-back",
                    "source_instance": destination,
                    "source_node": to,
                    "instance_id": source,
                    "node": node,
                    "request_id": crossing.request_id,
                }
            )
        )
    assert first.record()["state"] == "done"
    until(lambda: all(r.over for r in staged.new()), what="the other one has ended too")
    slow.close()
    stream.result().assert_same(undisturbed)
    crossing.result().assert_same(Stream(mesh.url, GREEDY).start().result())


def test_destination_of_another_revision_refuses_the_request(mesh: Roomy, undisturbed: Stream, slow: contextlib.ExitStack) -> None:
    """A destination of another revision refuses; the request stays at its source.

    The scheduler never orders such a migration.
    """
    mesh.json("wake", "two")
    stream, source, node = start_stream(mesh)
    wrong, on = mesh.place("two")
    staged = Staged(mesh)
    revision = next(m["card"]["info"]["revision"] for m in mesh.cluster()["models"] if m["card"]["spec"]["name"] == "one")
    mesh.write(
        MigrationRecord(
            migration_id="m-wrong",
            token=1 << 60,
            model="one",
            revision=revision,
            source_instance=source,
            source_node=node,
            instance_id=wrong,
            node=on,
            created=time.time(),
        )
    )
    until(lambda: staged.new()[0].over, what="it has ended")
    (record,) = staged.new()
    assert record.state == "failed"
    assert [m.outcome for m in record.requests] == ["failed"]
    assert "revision" in record.requests[0].reason
    assert mesh.serving("one")[0] == source
    slow.close()
    stream.result().assert_same(undisturbed)
    mesh.json("sleep", "two")


def test_instance_of_a_changed_model_is_not_migrated(mesh: Roomy, undisturbed: Stream, slow: contextlib.ExitStack) -> None:
    """Instances of an older generation finish their requests without migration."""
    stream, source, node = start_stream(mesh)
    mesh.change("one", max_concurrency=4)
    error = mesh.error("migrate", source, "--to", other_node(node))
    assert error["code"] == "conflict"
    assert "was changed" in error["message"]
    slow.close()
    stream.result().assert_same(undisturbed)


@pytest.mark.parametrize("step", ["round", "handing_over"])
def test_the_gateway_dies_and_the_client_retries(mesh: Roomy, undisturbed: Stream, slow: contextlib.ExitStack, step: Any) -> None:
    """A client retries with its Idempotency-Key and gets the one response.

    The response continued while the gateway was down.
    """
    stream, source, node = start_stream(mesh, **{"idempotency-key": f"moving-{step}"})
    to = other_node(node)
    with Staged(mesh).at(step, source, to, engine_pid_on(mesh, to)):
        old = mesh.kill("gateway")
    slow.close()
    stream.thread.join(120)
    assert stream.error
    mesh.await_replaced("gateway", old)
    Stream(mesh.url, LONG, headers=stream.headers).start().result().assert_same(undisturbed)
