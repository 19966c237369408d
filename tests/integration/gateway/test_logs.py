"""Logs of nodes through the admin API: who may read them, and what is asked of the nodeagent."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from services.gateway.authorization import hash_key
from shared.contracts import subjects
from shared.contracts.base import Message
from shared.contracts.logs import LOG_REQUEST, LogFile, LogRead, LogRequest, LogsListed, ReadLog
from shared.errors import NotFound
from tests.integration.gateway.api_keys import ADMIN
from tests.integration.gateway.conftest import CARDS, Served, ServeFn, until_listed
from tests.support.fake_engine import FakeNode

AT = "/admin/v1/nodes/far/logs"


class Agent:
    """Answers requests for logs as the nodeagent of the node `far`."""

    def __init__(self) -> None:
        self.asked: list[LogRequest] = []

    async def answer(self, request: LogRequest) -> Message:
        self.asked.append(request)
        if isinstance(request, ReadLog):
            if request.name != "a b.engine":
                raise NotFound(f"far has no log {request.name}")
            return LogRead(node="far", name=request.name, lines=("<b>one</b>",), position=11)
        return LogsListed(node="far", logs=(LogFile(name="a b.engine", nbytes=11),))


@pytest.fixture
async def agent(node: FakeNode) -> Agent:
    agent = Agent()
    await node.mesh.respond(subjects.node_logs("far"), LOG_REQUEST, agent.answer).start()
    return agent


@pytest.fixture
async def served(agent: Agent, serve: ServeFn) -> AsyncIterator[Served]:
    async with serve(admin_key="root", api_keys=hash_key("user-key")) as served:
        yield served


async def test_admin_key_lists_and_reads_logs(served: Served, agent: Agent) -> None:
    listed = await served.http.get(AT, headers=ADMIN)
    assert [log["name"] for log in listed.json()["logs"]] == ["a b.engine"]
    read = await served.http.get(f"{AT}/a%20b.engine?lines=7&after=3", headers=ADMIN)
    assert read.json()["lines"] == ["<b>one</b>"]
    assert read.headers["cache-control"] == "no-store"
    asked = agent.asked[-1]
    assert isinstance(asked, ReadLog)
    assert (asked.name, asked.lines, asked.after) == ("a b.engine", 7, 3)


async def test_a_name_that_no_log_has_is_not_found(served: Served, agent: Agent) -> None:
    for name in ("other.engine", "x" * 2_000, "%00", "..%2f..%2fetc%2fpasswd"):
        assert (await served.http.get(f"{AT}/{name}", headers=ADMIN)).status_code == 404, name


async def test_other_keys_read_no_log(served: Served, agent: Agent) -> None:
    body = {"name": "viewer", "scope": "read-only", "sha256": hash_key("view-key")}
    assert (await served.http.post("/admin/v1/keys", json=body, headers=ADMIN)).status_code == 200
    for key, status in (("view-key", 403), ("user-key", 401), ("wrong", 401)):
        for path in (AT, f"{AT}/x"):
            answer = await served.http.get(path, headers={"authorization": f"Bearer {key}"})
            assert answer.status_code == status, (key, path)
    assert agent.asked == []


async def test_admin_api_without_a_key_serves_no_logs(agent: Agent, serve: ServeFn) -> None:
    async with serve() as served:
        await until_listed(served, CARDS)
        answer = await served.http.get(AT)
        assert (answer.status_code, "THAW_ADMIN_KEY" in answer.json()["error"]["message"]) == (403, True)
    assert agent.asked == []


@pytest.mark.parametrize(
    ("path", "status", "code"),
    [
        (f"{AT}/none", 404, "not_found"),
        ("/admin/v1/nodes/nowhere/logs", 503, "unreachable"),
        (f"{AT}/x?lines=0", 400, "invalid_request"),
        (f"{AT}/x?lines=2001", 400, "invalid_request"),
        (f"{AT}/x?after=-1", 400, "invalid_request"),
        (f"{AT}/x?after=1e3", 400, "invalid_request"),
    ],
)
async def test_refusals_have_a_code(served: Served, path: str, status: int, code: str) -> None:
    answer = await served.http.get(path, headers=ADMIN)
    assert (answer.status_code, answer.json()["error"]["code"]) == (status, code)
