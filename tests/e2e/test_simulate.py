"""A run of a real mesh, recorded and replayed by the simulator with what was measured in it: the same starts in the same order, mean TTFT within
15 %."""

from __future__ import annotations

import json
import time
from pathlib import Path

import httpx
import openai

from bench.fidelity import FIRST, exported, recorded
from bench.fidelity_replay import NAMES, compared
from tests.support.launcher import Thaw, until
from thaw.demo.models import make_demo_model

POLICY = "lru"
"""Who leaves depends on nothing that is measured: the replay must start the same models in the same order."""
# Two of three models fit: a start for each new name that is not among the last two.
ORDER = (0, 1, 0, 2, 2, 1, 0, 0, 1, 2, 1, 1, 0, 2, 0, 1)
STARTS = 9
PAUSE_S = 0.3


def test_a_recorded_run_is_replayed(mesh: Thaw, client: openai.OpenAI, admin: httpx.Client, tmp_path: Path) -> None:
    # The first start of all has the zygote's own in it: another model's, of which the scheduler knows nothing any more afterwards.
    mesh.json("models", "add", FIRST, str(make_demo_model(tmp_path / FIRST, "test", seed=9)))
    ask(client, FIRST)
    mesh.json("sleep", FIRST)
    mesh.json("models", "rm", FIRST)
    for n in ORDER:
        before = completed(admin)
        ask(client, NAMES[n])
        # The scheduler hears of it within a tenth of a second: who asks sooner may have the wrong one leave. The pause is for the replay, where
        # the same start takes longer or shorter.
        until(lambda: any(before.get(i, 0) < done for i, done in completed(admin).items()), what=f"request {n} being heard of")  # noqa: B023
        time.sleep(PAUSE_S)
    export = tmp_path / "run.jsonl"
    assert mesh.json("trace", "--export", str(export))["requests"] >= len(ORDER)
    exported(export)
    found = compared(*recorded(mesh.url, mesh.endpoints["admin_key"], export), export, policy=POLICY)
    told = json.dumps(found, indent=1)
    assert found["requests"] == len(ORDER), told
    # Nobody joined a start: each request waited for the answer before.
    assert len(found["starts"]["mesh"]) == found["cold"]["mesh"] == STARTS, told
    assert found["start_by_start"]["starts"] == found["starts"]["mesh"], told
    assert len(found["starts"]["simulator"]) == len(found["starts"]["mesh"]), told
    assert abs(found["ttft_mean_s"]["error"]) <= 0.15, told


def completed(admin: httpx.Client) -> dict[str, int]:
    """Requests by instance, as far as the scheduler has heard, of those that have nothing to do."""
    instances = [i for node in admin.get("/cluster").json()["nodes"] for i in node["instances"]]
    return {i["instance_id"]: i["load"]["completed"] for i in instances if not i["load"]["active"]}


def ask(client: openai.OpenAI, model: str) -> None:
    stream = client.chat.completions.create(
        model=model, messages=[{"role": "user", "content": "winter"}], max_tokens=4, temperature=0, stream=True
    )
    assert list(stream)
