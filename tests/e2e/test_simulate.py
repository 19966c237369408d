"""A run of a real mesh, recorded and replayed by the simulator with what was measured in it: as many starts (but one), mean TTFT within 15 %."""

from __future__ import annotations

import json
from pathlib import Path

import openai

from bench.fidelity import FIRST, exported, recorded
from bench.fidelity_replay import NAMES, compared
from tests.support.launcher import Thaw
from thaw.demo.models import make_demo_model

# Two of three models fit: a start for each new name that is not among the last two.
ORDER = (0, 1, 0, 2, 2, 1, 0, 0, 1, 2, 1, 1, 0, 2, 0, 1)


def test_a_recorded_run_is_replayed(mesh: Thaw, client: openai.OpenAI, tmp_path: Path) -> None:
    # The first start of all has the zygote's own in it: another model's, of which the scheduler knows nothing any more afterwards.
    mesh.json("models", "add", FIRST, str(make_demo_model(tmp_path / FIRST, "test", seed=9)))
    ask(client, FIRST)
    mesh.json("sleep", FIRST)
    mesh.json("models", "rm", FIRST)
    for n in ORDER:
        ask(client, NAMES[n])
    export = tmp_path / "run.jsonl"
    assert mesh.json("trace", "--export", str(export))["requests"] >= len(ORDER)
    exported(export)
    found = compared(*recorded(mesh.url, mesh.endpoints["admin_key"], export), export)
    told = json.dumps(found, indent=1)
    assert found["requests"] == len(ORDER), told
    mesh_starts, replayed = found["starts"]["mesh"], found["starts"]["simulator"]
    assert len(mesh_starts) == found["cold"]["mesh"], told  # nobody joined a start: each request waited for the answer before
    # The scheduler weighs who leaves by what starts have taken so far: where two are alike, one slow start may decide otherwise.
    assert abs(len(mesh_starts) - len(replayed)) <= 1, told
    assert mesh_starts[:3] == replayed[:3] == [NAMES[n] for n in ORDER[:2]] + [NAMES[2]], told
    assert abs(found["ttft_mean_s"]["error"]) <= 0.15, told


def ask(client: openai.OpenAI, model: str) -> None:
    stream = client.chat.completions.create(
        model=model, messages=[{"role": "user", "content": "winter"}], max_tokens=4, temperature=0, stream=True
    )
    assert list(stream)
