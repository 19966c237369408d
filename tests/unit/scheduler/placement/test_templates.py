"""Suspended engines that serve other models of their template key, as placement options."""

from __future__ import annotations

from typing import Any

import pytest

from services.scheduler.domain.effects import SendResume, SendStart, SendStop
from services.scheduler.domain.estimates.start_times import CHANGING
from services.scheduler.domain.policy import Policy
from services.scheduler.domain.state.measurements import estimate_key
from shared.contracts.node import InstanceState
from shared.contracts.phases import Phase, PhaseSpan
from shared.contracts.plans import PlanRecord
from tests.support.fake_node import MIB
from tests.unit.scheduler.fake_agents import Running
from tests.unit.scheduler.world import World

GIB = 1 << 30
VLLM: dict[str, Any] = {"engine": "vllm", "engine_args": {"load_format": "thaw"}, "memory": GIB, "shape": "s1"}
COLD_S = 20.0


def plan_of(w: World, model: str) -> PlanRecord:
    plan = w.state.last_plan_of(model)
    assert plan is not None
    return plan


def suspended(w: World, name: str, resume_ms: float = 300.0, **options: Any) -> Running:
    """Start a model, which takes `COLD_S`, and suspend it."""
    w.model(name, **{**VLLM, **options})
    w.demand(name)
    running = w.of(name)[-1]
    for _ in range(int(COLD_S)):
        w.tick(1.0)
        w.demand(name)
    span = PhaseSpan(phase=Phase.INIT, start_ms=-COLD_S * 1e3, duration_ms=COLD_S * 1e3, process="enginehost")
    running.phases = (span,)
    w.get_ready(name)
    w.demand(name, 0)
    running.completed = 1
    w.can_suspend(running, left=200 * MIB, resume_ms=resume_ms)
    w.sleep(name)
    w.finish_stops()
    assert running.state is InstanceState.SUSPENDED
    return running


@pytest.fixture
def w() -> World:
    world = World()
    world.node("n1", 4 * GIB)
    return world


def test_model_that_never_ran_takes_a_suspended_engine_of_its_key(w: World) -> None:
    template = suspended(w, "first").command.instance_id
    w.model("second", **VLLM)
    w.demand("second")
    plan = plan_of(w, "second")
    assert plan.way == "template"
    assert plan.chosen is not None
    assert (plan.chosen.ready_by, plan.chosen.template) == ("template", template)
    assert plan.chosen.predicted["restore"] == 300.0
    assert plan.chosen.predicted["load"] > 0
    assert f"{template} on n1/cpu:0 has its template key" in plan.reason
    (start,) = w.starts("second")
    assert start.command.template == template
    cold = next(c for c in plan.candidates if c.ready_by == "load")
    assert cold.predicted_ms is not None
    assert cold.predicted_ms > COLD_S * 1e3, "a model of its key is known to start this slowly"
    w.get_ready("second")
    assert [i.model for i in w.state.instances.values()] == ["second"], "the other instance has ended"
    assert not w.sent(SendStop), "without a stop command"
    assert w.state.by_template == {}


def test_cold_starts_are_learned_for_all_models_of_the_key(w: World) -> None:
    """The engine's present model never started cold itself, and the one that did is removed."""
    suspended(w, "first")
    w.model("second", **VLLM)
    w.demand("second")
    running = w.of("second")[-1]
    w.get_ready("second")
    w.demand("second", 0)
    running.completed = 1
    w.can_suspend(running, left=200 * MIB, resume_ms=300.0)
    w.sleep("second")
    w.finish_stops()
    w.remove("first")
    w.model("third", **VLLM)
    w.demand("third")
    plan = plan_of(w, "third")
    cold = next(c for c in plan.candidates if c.ready_by == "load")
    assert cold.predicted_ms is not None
    assert cold.predicted_ms > COLD_S * 1e3
    assert plan.way == "template"


def test_seconds_of_a_change_are_learned_by_node(w: World) -> None:
    suspended(w, "first")
    w.model("second", **VLLM)
    w.demand("second")
    running = w.of("second")[-1]
    running.phases = (
        PhaseSpan(phase=Phase.CONTAINER, start_ms=-2000, duration_ms=400, process="nodeagent"),
        PhaseSpan(phase=Phase.LOAD, start_ms=-1600, duration_ms=1500, process="enginehost"),
        PhaseSpan(phase=Phase.PROFILE, start_ms=-100, duration_ms=100, process="enginehost"),
    )
    w.get_ready("second")
    learned = w.state.estimates[estimate_key("", "n1")].parameters[CHANGING].value
    assert 500 < learned <= 1700, "of 2000 ms, less the 300 of waking it"
    assert estimate_key("second", "n1") not in w.state.estimates, "it says nothing of a cold start"


@pytest.mark.parametrize(
    "options",
    [{"shape": "s2"}, {"shape": ""}, {"max_concurrency": 2}, {"engine_args": {}}, {"engine": "builtin", "engine_args": {}}],
)
def test_model_of_another_key_starts_as_before(w: World, options: dict[str, Any]) -> None:
    suspended(w, "first")
    w.model("second", **{**VLLM, **options})
    w.demand("second")
    assert plan_of(w, "second").way == "load"
    assert w.starts("second")[0].command.template is None


def test_suspended_model_resumes_its_own_engine(w: World) -> None:
    suspended(w, "first")
    w.demand("first")
    assert plan_of(w, "first").way == "restore"
    assert len(w.sent(SendResume)) == 1


def test_engine_is_taken_once(w: World) -> None:
    suspended(w, "first")
    for name in ("second", "third"):
        w.model(name, **VLLM)
        w.demand(name)
    assert [e.command.template is not None for e in w.sent(SendStart)[1:]] == [True, False]


def test_mesh_without_the_capability_starts_as_before() -> None:
    w = World(policy=Policy(capabilities=Policy().capabilities - {"template"}))
    w.node("n1", 4 * GIB)
    suspended(w, "first")
    w.model("second", **VLLM)
    w.demand("second")
    assert plan_of(w, "second").way == "load"


def test_model_whose_engine_was_taken_takes_one_back(w: World) -> None:
    suspended(w, "first")
    w.model("second", **VLLM)
    w.demand("second")
    w.get_ready("second")
    w.demand("second", 0)
    running = w.of("second")[-1]
    running.completed = 1
    w.can_suspend(running, left=200 * MIB)
    w.sleep("second")
    w.finish_stops()
    w.demand("first")
    assert plan_of(w, "first").way == "template"


@pytest.mark.parametrize("is_full", [False, True], ids=["slower", "on a full device"])
def test_best_of_many_engines_is_taken(is_full: bool) -> None:
    """There are more than are considered for one model; the best one was suspended last."""
    w = World()
    for node in ("n1", "n2"):
        w.node(node, 16 * GIB)
    others = [f"other-{n}" for n in range(12)]
    for name, node in (*((name, "n1") for name in others), ("best", "n2")):
        w.model(name, placement={"devices": (f"{node}/*",)}, **VLLM)
        w.demand(name)
    for name in (*others, "best"):
        running = w.of(name)[-1]
        span = PhaseSpan(phase=Phase.INIT, start_ms=-COLD_S * 1e3, duration_ms=COLD_S * 1e3, process="enginehost")
        running.phases, running.completed = (span,), 1
        w.get_ready(name)
        w.demand(name, 0)
        w.can_suspend(running, left=200 * MIB, resume_ms=300.0 if name == "best" or is_full else 3000.0)
        w.sleep(name)
        w.finish_stops()
    if is_full:
        w.model("large", memory=13 * GIB, placement={"devices": ("n1/*",)}, pin=True)
        w.demand("large")
        w.get_ready("large")
    best = running.command.instance_id
    w.model("new", **VLLM)
    w.demand("new")
    plan = plan_of(w, "new")
    assert plan.chosen is not None
    assert (plan.way, plan.chosen.node, plan.chosen.template) == ("template", "n2", best)
