"""A run of a real mesh, recorded and replayed by the simulator with what was measured in it: mean TTFT within 15 %."""

from __future__ import annotations

import json
from pathlib import Path

import openai

from bench.fidelity import NAMES, compared, recorded
from shared.contracts.traces import RequestTrace
from tests.support.launcher import Thaw

# Two of three models fit: a start for each new name that is not among the last two.
ORDER = (0, 1, 0, 2, 2, 1, 0, 0, 1, 2, 1, 1)


def test_a_recorded_run_is_replayed(mesh: Thaw, client: openai.OpenAI, tmp_path: Path) -> None:
    for name in NAMES:  # the first start of all has the zygote's own in it
        ask(client, name)
    for name in NAMES:
        mesh.json("sleep", name)
    for n in ORDER:
        ask(client, NAMES[n])
    export = tmp_path / "run.jsonl"
    assert mesh.json("trace", "--export", str(export))["requests"] >= len(ORDER)
    lines = sorted(export.read_text().splitlines(), key=lambda line: RequestTrace.model_validate_json(line).received)
    export.write_text("\n".join(lines[-len(ORDER) :]) + "\n")
    found = compared(*recorded(mesh.url, mesh.endpoints["admin_key"], export), export)
    assert found["requests"] == len(ORDER)
    assert abs(found["ttft_mean_s"]["by_median"]["error"]) <= 0.15, json.dumps(found)


def ask(client: openai.OpenAI, model: str) -> None:
    stream = client.chat.completions.create(
        model=model, messages=[{"role": "user", "content": "winter"}], max_tokens=4, temperature=0, stream=True
    )
    assert list(stream)
