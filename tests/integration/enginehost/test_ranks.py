"""Hosts of a vLLM on several nodes: how they find each other, and their common end."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from services.enginehost.ranks.connection import LINE_BYTES
from services.enginehost.ranks.head import RankHead
from services.enginehost.ranks.member import RankMember, join
from shared.contracts import subjects
from shared.contracts.base import Done
from shared.contracts.engine import DrainEngine, EngineReport
from shared.contracts.stages import Stage, StageListening, split_layers
from shared.errors import EngineFailed
from shared.messaging import Mesh
from tests.support.hosted import MIB, Hosts, fake_program, hosted_card

SECRET = "s" * 32


def place(group: str, index: int = 0, secret: str = SECRET, count: int = 2) -> Stage:
    return Stage(group_id=group, index=index, count=count, layers=split_layers(4, count)[index], secret=secret)


@pytest.fixture
async def head(mesh: Mesh, request: pytest.FixtureRequest) -> AsyncIterator[RankHead]:
    head = RankHead(mesh, place(f"g{abs(hash(request.node.nodeid))}", count=3), "127.0.0.1")
    await head.open()
    yield head
    await head.close()


async def join_within(head: RankHead, mesh: Mesh, index: int = 1, secret: str = SECRET) -> RankMember:
    async with asyncio.timeout(60):
        return await join(mesh, place(head._stage.group_id, index, secret, 3))


async def test_members_find_the_head_and_learn_when_it_serves_and_stops(head: RankHead, mesh: Mesh) -> None:
    early = await join_within(head, mesh, 1)
    assert (early.host, early.port) == ("127.0.0.1", head.port)
    assert not early.ready.is_set()
    head.announce_ready()
    late = await join_within(head, mesh, 2)
    async with asyncio.timeout(60):
        await early.ready.wait()
        await late.ready.wait()
        await head.close()
        await early.closed.wait()
        await late.closed.wait()
    assert not early.lost.done()
    assert not head.lost.done()
    await early.close()
    await late.close()


async def test_end_of_a_member_is_seen_by_the_head(head: RankHead, mesh: Mesh) -> None:
    member = await join_within(head, mesh)
    await member.close()
    async with asyncio.timeout(60):
        assert "rank 1" in (await head.lost).message


async def test_end_of_the_head_without_a_word_is_seen_by_members(head: RankHead, mesh: Mesh) -> None:
    member = await join_within(head, mesh)
    for writer in head._members.values():
        writer.transport.abort()
    async with asyncio.timeout(60):
        assert "first rank" in (await member.lost).message
    await member.close()


async def address_of(head: RankHead, mesh: Mesh) -> StageListening:
    found: asyncio.Future[StageListening] = asyncio.get_running_loop().create_future()

    async def hear(message: Any) -> None:
        if not found.done():
            found.set_result(StageListening.model_validate_json(message.data))

    subscription = await mesh.nc.subscribe(subjects.stage_group(head._stage.group_id), cb=hear)
    async with asyncio.timeout(60):
        listening = await found
    await subscription.unsubscribe()
    return listening


@pytest.mark.parametrize(
    "answer",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        b"[]\n",
        b"x" * (2 * LINE_BYTES),
        json.dumps({"index": 1, "nonce": "00" * 32, "proof": "00" * 32}).encode() + b"\n",
        json.dumps({"index": 7, "nonce": "00" * 32, "proof": "00" * 32}).encode() + b"\n",
        json.dumps({"index": 1, "nonce": "zz", "proof": None}).encode() + b"\n",
        b"",
    ],
)
async def test_caller_without_a_proof_is_refused_and_learns_nothing(head: RankHead, mesh: Mesh, answer: bytes) -> None:
    listening = await address_of(head, mesh)
    reader, writer = await asyncio.open_connection(listening.host, listening.port)
    async with asyncio.timeout(60):
        assert json.loads(await reader.readline()).keys() == {"nonce"}
        writer.write(answer)
        if not answer:
            writer.write_eof()
        with contextlib.suppress(ConnectionResetError):  # it had not read all
            assert await reader.read() == b""
    writer.close()
    assert not head.lost.done(), "a stranger cannot end the group"
    await (await join_within(head, mesh)).close()


async def test_head_without_the_secret_gets_no_member(head: RankHead, mesh: Mesh) -> None:
    joining = asyncio.create_task(join_within(head, mesh, secret="x" * 32))
    member = await join_within(head, mesh)
    assert not joining.done()
    joining.cancel()
    await member.close()


async def test_address_that_is_not_of_this_node_is_an_error(mesh: Mesh) -> None:
    with pytest.raises(EngineFailed, match="THAW_STAGE_HOST"):
        await RankHead(mesh, place("g"), "192.0.2.1").open()


class Group:
    """The hosts of two ranks, on two nodes."""

    def __init__(self, hosts: Hosts, directory: Path, *options: str) -> None:
        """Create a group.

        Args:
            hosts: The first node.
            directory: For the engines' program.
            options: Options of the engines (tests/support/fake_openai.py).
        """
        self.nodes = (hosts, Hosts(hosts.mesh, f"{hosts.node}-b", hosts.nats_url, directory))
        self.instances: list[str] = []
        self._program = fake_program(directory, "vllm", *options)

    async def start(self) -> None:
        await self.nodes[1].start()
        card = hosted_card("engine://demo", "vllm", memory=MIB, stages=2, engine_args={"tensor_parallel_size": 2})
        for index, hosts in enumerate(self.nodes):
            spec = hosts.spec(card, THAW_VLLM_PYTHON=self._program)
            spec = spec.model_copy(update={"stage": place(self.nodes[0].node, index)})
            hosts.spawn(spec, "services.enginehost")
            self.instances.append(spec.instance_id)

    async def reported(self, index: int, *states: str) -> EngineReport:
        return await self.nodes[index].reported(self.instances[index], lambda r: r.state in states)


@pytest.fixture
async def group(hosts: Hosts, tmp_path: Path, request: pytest.FixtureRequest) -> AsyncIterator[Group]:
    group = Group(hosts, tmp_path, *getattr(request, "param", ()))
    await group.start()
    yield group
    group.nodes[1].close()


async def test_ranks_serve_as_one_engine_and_stop_with_the_first(group: Group) -> None:
    reports = [await group.reported(index, "ready", "failed") for index in range(2)]
    assert [r.state for r in reports] == ["ready", "ready"], [r.error for r in reports]
    answer = await group.nodes[0].request(group.instances[0], "chat", messages=[], max_tokens=2)
    assert answer.json["choices"][0]["message"]["content"] == "t0 t1 "
    drain = DrainEngine(only_if_idle=False, reason="test")
    await group.nodes[0].mesh.request(subjects.engine_control(group.instances[0]), drain, Done)
    for index, hosts in enumerate(group.nodes):
        assert (await group.reported(index, "stopped", "failed")).state == "stopped"
        await hosts.left_nothing(group.instances[index])


@pytest.mark.parametrize("killed", [0, 1])
async def test_death_of_an_engine_is_a_failure_of_all_ranks(group: Group, killed: int) -> None:
    reports = [await group.reported(index, "ready", "failed") for index in range(2)]
    hosted = reports[killed].hosted
    assert hosted is not None
    os.kill(hosted.pids[0], signal.SIGKILL)
    for index, hosts in enumerate(group.nodes):
        assert (await group.reported(index, "stopped", "failed")).state == "failed"
        await hosts.left_nothing(group.instances[index])


@pytest.mark.parametrize("killed", [0, 1])
async def test_death_of_a_host_ends_the_other_one_and_both_engines(group: Group, killed: int) -> None:
    reports = [await group.reported(index, "ready", "failed") for index in range(2)]
    os.kill(reports[killed].pid, signal.SIGKILL)
    failed = await group.reported(1 - killed, "failed")
    assert failed.error is not None
    assert "so the group ends" in failed.error.message
    for hosts, instance in zip(group.nodes, group.instances, strict=True):
        await hosts.left_nothing(instance)


async def test_first_rank_that_dies_during_the_start_ends_the_others_start(group: Group) -> None:
    first = await group.reported(0, "loading", "starting", "ready")
    later = await group.nodes[1].reported(group.instances[1], lambda r: r.progress > 0 or r.state == "ready")
    assert later.state != "failed"
    os.kill(first.pid, signal.SIGKILL)
    assert (await group.reported(1, "failed")).error is not None
    await group.nodes[1].left_nothing(group.instances[1])


@pytest.mark.parametrize("group", [("--ready-after", "600")], indirect=True)
async def test_ranks_stop_together_while_they_start(group: Group) -> None:
    for hosts, instance in zip(group.nodes, group.instances, strict=True):
        assert (await hosts.reported(instance, lambda r: r.progress > 0 or r.state == "failed")).state == "loading"
    drain = DrainEngine(only_if_idle=False, reason="test")
    await group.nodes[0].mesh.request(subjects.engine_control(group.instances[0]), drain, Done)
    for index, hosts in enumerate(group.nodes):
        assert (await group.reported(index, "stopped", "failed")).state == "stopped"
        await hosts.left_nothing(group.instances[index])
