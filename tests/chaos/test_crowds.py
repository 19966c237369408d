"""Many concurrent requests, for one cold model and for more models than fit."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import httpx
import openai

from tests.support.mesh import MODELS, Victim
from tests.support.outcomes import Asked, ask

AT_ONCE = 200
LOADS_AT_MOST = 8


def test_two_hundred_requests_for_one_cold_model_cause_one_load(mesh: Victim, client: openai.OpenAI) -> None:
    mesh.make_cold("one")
    before = mesh.engine_logs()
    asked = [Asked(mesh.url, "one", stream=bool(i % 2), tokens=4) for i in range(AT_ONCE)]
    outcomes = [a.outcome() for a in asked]
    assert {o.kind for o in outcomes} == {"answered"}
    assert len({o.text for o in outcomes}) == 1
    assert len(mesh.engine_logs() - before) == 1
    plan = mesh.plan("one")
    assert plan["outcome"] == "ready"
    assert [i["plan_id"] for i in mesh.instances("one")] == [plan["plan_id"]]


def test_fifty_requests_over_too_many_models_are_answered_without_thrashing(mesh: Victim, client: openai.OpenAI) -> None:
    expected = {model: ask(client, model, 30) for model in MODELS}
    before = mesh.engine_logs()
    with ThreadPoolExecutor(50) as pool, httpx.Client(timeout=120):
        models = [MODELS[i % len(MODELS)] for i in range(50)]
        answers = list(pool.map(lambda model: Asked(mesh.url, model, tokens=30).outcome(), models))
    assert [(o.kind, o.text) for o in answers] == [("answered", expected[m]) for m in models]
    loads = mesh.engine_logs() - before
    assert 1 <= len(loads) <= LOADS_AT_MOST
    (device,) = mesh.cluster()["nodes"][0]["devices"]
    assert device["reserved_bytes"] <= device["budget_bytes"]
