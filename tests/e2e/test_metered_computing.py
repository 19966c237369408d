"""The ledger's device time is the time that the engine was busy, by its own meter."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import openai
import pytest

from tests.support.launcher import Thaw, until
from tests.support.paced_zygote import Pace

PACED = True
MODEL = "one"
KEY = "metered"
REQUESTS = 12


def read_ledger(admin: httpx.Client) -> tuple[int, float]:
    """Return the requests of the key, and the seconds that devices computed for them."""
    found = admin.get("/usage", params={"by": "key", "model": MODEL}).raise_for_status().json()["rows"]
    rows = [r for r in found if r["key"] == KEY]
    return sum(r["counts"]["requests"] for r in rows), sum(r["counts"]["compute_cpu_us"] for r in rows) / 1e6


def read_load(admin: httpx.Client) -> dict[str, Any]:
    """Return the load of the model's instance, with its id."""
    nodes = admin.get("/cluster").raise_for_status().json()["nodes"]
    (found,) = [i for node in nodes for i in node["instances"] if i["model"] == MODEL and i["state"] == "ready"]
    return {**found["load"], "instance_id": found["instance_id"]}


@pytest.fixture(scope="module")
def keyed(mesh: Thaw) -> Iterator[openai.OpenAI]:
    """Return a client with a key of its own.

    The mesh is not shared with other modules, because it requires a key from now on.
    """
    key = mesh.json("keys", "add", KEY)["key"]
    with openai.OpenAI(base_url=f"{mesh.url}/v1", api_key=key, timeout=120, max_retries=2) as client:
        yield client


def test_device_time_of_the_ledger_is_the_time_that_the_engine_was_busy(admin: httpx.Client, keyed: openai.OpenAI) -> None:
    def ask(tokens: int) -> None:
        message: Any = {"role": "user", "content": "word " * tokens}
        keyed.chat.completions.create(model=MODEL, messages=[message], max_tokens=tokens, extra_body={"ignore_eos": True})

    admin.post(f"/models/{MODEL}/wake").raise_for_status()
    until(lambda: not read_load(admin)["active"], what="the engine is idle")
    before = read_load(admin)
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(ask, [40 + 17 * n for n in range(REQUESTS)]))
    until(lambda: read_load(admin)["completed"] >= before["completed"] + REQUESTS, what="the engine has reported the requests")
    until(lambda: read_ledger(admin)[0] == REQUESTS, what="the ledger has the requests")
    after = read_load(admin)
    assert (after["instance_id"], after["completed"]) == (before["instance_id"], before["completed"] + REQUESTS)
    metered = after["busy_s"] - before["busy_s"]
    assert metered > 0
    assert read_ledger(admin)[1] == pytest.approx(metered, rel=0.01)


def list_instances(admin: httpx.Client) -> list[dict[str, Any]]:
    nodes = admin.get("/cluster").raise_for_status().json()["nodes"]
    return [i for node in nodes for i in node["instances"] if i["model"] == MODEL]


def read_all(admin: httpx.Client) -> tuple[float, float]:
    """Return the device seconds of all keys, and those that are for no request."""
    rows = admin.get("/usage", params={"by": "key", "model": MODEL}).raise_for_status().json()["rows"]
    counts = [r["counts"] for r in rows]
    return sum(c["compute_cpu_us"] for c in counts) / 1e6, sum(c["background_s"] for c in counts)


def test_abandoned_work_is_in_the_ledger_as_well(admin: httpx.Client, keyed: openai.OpenAI) -> None:
    """Computing is charged to the key, or else to the owner of the model."""
    message: Any = {"role": "user", "content": "word " * 200}
    before_s = read_load(admin)["busy_s"]
    for _ in range(3):
        stream = keyed.chat.completions.create(
            model=MODEL, messages=[message], max_tokens=400, stream=True, extra_body={"ignore_eos": True}
        )
        next(iter(stream))
        stream.close()

    def is_in_the_ledger() -> bool:
        """Return whether the ledger agrees with the engine's report, which may be older."""
        load = read_load(admin)
        computed_s, background_s = read_all(admin)
        reported = not load["active"] and load["busy_s"] > before_s
        return reported and background_s > 0 and computed_s == pytest.approx(load["busy_s"], rel=0.01)

    until(is_in_the_ledger, what="the ledger has what the engine computed, and what was for no request")


def test_a_killed_engine_is_metered_to_its_last_step(admin: httpx.Client, keyed: openai.OpenAI, pace: Pace) -> None:
    """Its last report lacks what it computed since."""
    message: Any = {"role": "user", "content": "word " * 200}
    (engine,) = [i for i in list_instances(admin) if i["state"] == "ready"]
    with pace.slowed(0.05):  # the response has not ended when its engine is killed
        stream = keyed.chat.completions.create(
            model=MODEL, messages=[message], max_tokens=300, stream=True, extra_body={"ignore_eos": True}
        )
        chunks = iter(stream)
        for _ in range(100):
            next(chunks)
        os.kill(engine["pids"][0], signal.SIGKILL)
    assert sum(1 for _ in chunks) > 0, "another engine continues"

    def find_killed() -> list[dict[str, Any]]:
        return [i for i in list_instances(admin) if i["instance_id"] == engine["instance_id"] and i["ended_pid"]]

    until(lambda: bool(find_killed()), what="the nodeagent has found the engine killed")
    (load,) = [i["load"] for i in find_killed()]
    assert load["busy_s"] > engine["load"]["busy_s"]
    background_s = sum(work["seconds"] for work in load["background"])
    assert load["charged_s"] + background_s == pytest.approx(load["busy_s"], rel=0.01)

    # It may respond before its node has reported it ready.
    until(lambda: any(i["state"] == "ready" for i in list_instances(admin)), what="the other engine is reported")

    def is_in_the_ledger() -> bool:
        return read_all(admin)[0] == pytest.approx(load["busy_s"] + read_load(admin)["busy_s"], rel=0.002)

    until(is_in_the_ledger, what="the ledger has what both engines computed")
