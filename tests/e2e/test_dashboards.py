"""Dashboards and alert rules, evaluated by a real Prometheus that scrapes a real mesh.

Two nodes have room for one model each, and one of them has a device with separate memory. Models
are evicted, preempted and moved there, so that every panel has data; tests/e2e/test_suspend.py has
the panels of suspensions.
"""

from __future__ import annotations

import re
import subprocess
import time
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest
import yaml

from shared.contracts.models import ModelSpec
from shared.contracts.phases import Phase
from shared.sizing import need_of
from tests.support.launcher import ROOT, running, until
from tests.support.moving import Roomy, Stream, body
from tests.support.otlp import OtlpReceiver
from tests.support.paced_zygote import Pace
from tests.support.prometheus import DASHBOARD, OBSERVABILITY, PANELS, SUSPENSION_PANELS, Prometheus, needs_prometheus
from thaw.cli.demo import card_of
from thaw.demo.models import make_demo_model

pytestmark = needs_prometheus
MODELS = ("one", "two", "three")
TTFT = "gen_ai_server_time_to_first_token_seconds"


@pytest.fixture(scope="module")
def receiver() -> Iterator[OtlpReceiver]:
    receiver = OtlpReceiver()
    yield receiver
    receiver.close()


@pytest.fixture(scope="module")
def mesh(receiver: OtlpReceiver, pace: Pace) -> Iterator[Roomy]:
    mesh = Roomy(
        THAW_OTLP_ENDPOINT=receiver.grpc_url,
        OTEL_BSP_SCHEDULE_DELAY="200",
        THAW_PREEMPT_AFTER="0.5",
        THAW_MIN_ACTIVE="0.2",
        THAW_VERIFY="true",
        **pace.environment,
    )
    mesh.keep_port("THAW_SCHEDULER_METRICS_PORT")
    sources = {name: str(make_demo_model(mesh.home / "models" / name, "test", seed=i)) for i, name in enumerate(MODELS)}
    room = int(1.5 * need_of(card_of(ModelSpec(name="one", source=sources["one"]))).total)
    nodes = {"node-0": {"cpu:0": room, "cpu:1": {"size": "300MiB", "memory": "separate"}}, "node-1": {"cpu:0": room}}
    models = [
        {"name": "one", "source": sources["one"], "slo": {"ttft": "60s"}, "placement": {"devices": ["cpu:0"]}},
        {"name": "two", "source": sources["two"], "placement": {"devices": ["node-0/cpu:0"]}},
        {"name": "three", "source": sources["three"], "placement": {"devices": ["node-0/cpu:0"]}},
        {"name": "apart", "source": sources["one"], "placement": {"devices": ["cpu:1"]}},
    ]
    with running(mesh, nodes, models):
        yield mesh


@pytest.fixture(scope="module")
def prometheus(mesh: Roomy, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    server = Prometheus(tmp_path_factory.mktemp("prometheus"), mesh)
    try:
        yield server
    finally:
        server.close()


class Traffic:
    """Causes once what the panels show: a start for each reason, and requests of each kind."""

    def __init__(self, mesh: Roomy, client: openai.OpenAI, admin: httpx.Client, pace: Pace) -> None:
        self._mesh = mesh
        self._client = client
        self._admin = admin
        self._pace = pace

    def __call__(self) -> None:
        assert self._admin.get("/cluster", headers={"authorization": "Bearer wrong"}).status_code == 401
        self._start_again("apart")
        self._move_a_request()
        self._preempt_by("two", "three")

    def _ask(self, model: str) -> None:
        self._client.chat.completions.create(model=model, messages=[{"role": "user", "content": "Hi"}], max_tokens=4)

    def _start_again(self, model: str) -> None:
        self._admin.post(f"/models/{model}/sleep").raise_for_status()
        self._ask(model)
        self._ask(model)

    def _move_a_request(self) -> None:
        with self._pace.slowed(0.2):
            stream = self._stream("one", tokens=150)
            self._mesh.move_away(stream.request_id)
        assert stream.result().error == ""

    def _preempt_by(self, model: str, victim: str) -> None:
        """A model takes the one device of both while the victim serves, which then starts again."""
        with self._pace.slowed(0.2):
            stream = self._stream(victim, tokens=100)
            self._mesh.serving(victim)
            self._ask(model)
        assert stream.result().error == ""
        self._ask(victim)

    def _stream(self, model: str, tokens: int) -> Stream:
        stream = Stream(self._mesh.url, body(model, max_tokens=tokens, ignore_eos=True)).start()
        assert stream.opened.wait(120)
        return stream


@pytest.fixture(scope="module")
def traffic(mesh: Roomy, pace: Pace) -> Iterator[Traffic]:
    headers = {"authorization": f"Bearer {mesh.endpoints['admin_key']}"}
    with (
        openai.OpenAI(base_url=f"{mesh.url}/v1", api_key="none", timeout=120, max_retries=2) as client,
        httpx.Client(base_url=f"{mesh.url}/admin/v1", headers=headers, timeout=120) as admin,
    ):
        yield Traffic(mesh, client, admin, pace)


def test_every_panel_has_data(prometheus: Prometheus, traffic: Traffic) -> None:
    prometheus.await_data(PANELS.keys() - SUSPENSION_PANELS, traffic)
    for title in SUSPENSION_PANELS:
        for expression in PANELS[title]:
            prometheus.query(expression)


def test_phases_of_times_to_the_first_token_add_up_to_them(prometheus: Prometheus, traffic: Traffic) -> None:
    traffic()

    def total(metric: str) -> dict[tuple[str, str], float]:
        found = prometheus.query(f"sum by (gen_ai_request_model, thaw_cold) ({metric}_sum)")
        return {(r["metric"]["gen_ai_request_model"], r["metric"]["thaw_cold"]): float(r["value"][1]) for r in found}

    def is_read() -> bool:
        whole = total(TTFT)
        return whole.keys() >= expected and total("thaw_ttft_phase_seconds") == pytest.approx(whole)

    expected = {("apart", "true"), ("apart", "false"), ("one", "true"), ("two", "true")}
    until(is_read, what=lambda: f"cold and warm requests: {total(TTFT)}, {total('thaw_ttft_phase_seconds')}")
    phases = prometheus.query('count by (thaw_phase) (thaw_ttft_phase_seconds_count{thaw_cold="true"})')
    named = {r["metric"]["thaw_phase"] for r in phases}
    assert {Phase.CONTAINER, Phase.PREFILL} <= named <= set(Phase)


def test_exemplars_name_traces_that_were_exported(prometheus: Prometheus, traffic: Traffic, receiver: OtlpReceiver) -> None:
    traffic()
    found: list[dict[str, Any]] = []

    def are_stored() -> bool:
        now = time.time()
        times = {"start": str(now - 3600), "end": str(now + 60)}
        found[:] = prometheus.read("/query_exemplars", query=f"{TTFT}_bucket", **times)
        return {series["seriesLabels"]["thaw_cold"] for series in found} == {"true", "false"}

    until(are_stored, what="exemplars of cold and warm requests")
    [destination] = datasource("prometheus")["jsonData"]["exemplarTraceIdDestinations"]
    exemplars = [(series["seriesLabels"], e) for series in found for e in series["exemplars"]]
    for labels, exemplar in exemplars:
        assert float(exemplar["value"]) <= float(labels["le"])
        if labels["gen_ai_operation_name"] == "chat":
            trace_id = exemplar["labels"][destination["name"]]
            receiver.wait_for(f"chat {labels['gen_ai_request_model']}", lambda s, t=trace_id: s.trace_id.hex() == t)  # type: ignore[misc]


def datasource(uid: str) -> dict[str, Any]:
    """Return one of Grafana's data sources."""
    path = OBSERVABILITY / "grafana" / "provisioning" / "datasources" / "prometheus.yml"
    [found] = [d for d in yaml.safe_load(path.read_text())["datasources"] if d["uid"] == uid]
    return dict(found)


def test_exemplars_are_links_to_jaeger_as_browsers_reach_it() -> None:
    """Grafana replaces variables of its environment, and `$$` by `$`."""
    [destination] = datasource("prometheus")["jsonData"]["exemplarTraceIdDestinations"]
    environment = yaml.safe_load((ROOT / "compose" / "compose.yaml").read_text())["services"]["grafana"]["environment"]
    url = re.sub(r"\$(\$|\w+)", lambda found: "$" if found[1] == "$" else environment[found[1]], destination["url"])
    assert url == "${THAW_JAEGER_URL:-http://127.0.0.1:16686}/trace/${__value.raw}"
    shown = [panel["title"] for panel in DASHBOARD["panels"] if all(target.get("exemplar") for target in panel["targets"])]
    assert shown == [title for title in PANELS if title.startswith("Time to the first token")]


def test_panels_are_narrowed_to_the_chosen_models() -> None:
    """Every panel with a line for each model heeds the dashboard's variable."""
    [variable] = DASHBOARD["templating"]["list"]
    assert (variable["name"], variable["allValue"]) == ("model", ".*")
    by_model = [e for expressions in PANELS.values() for e in expressions if "by (" in e and "gen_ai_request_model" in e]
    assert len(by_model) > 15
    assert [e for e in by_model if 'gen_ai_request_model=~"$model"' not in e] == []


def test_panels_have_ids_and_places_of_their_own() -> None:
    panels = DASHBOARD["panels"]
    assert len({panel["id"] for panel in panels}) == len({panel["title"] for panel in panels}) == len(panels)
    assert len({(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in panels}) == len(panels)


def test_rules_are_evaluated_and_none_fires(prometheus: Prometheus) -> None:
    def rules() -> list[Any]:
        found: list[Any] = [rule for group in prometheus.read("/rules")["groups"] for rule in group["rules"]]
        return found

    until(lambda: all(rule["health"] != "unknown" for rule in rules()), what="every rule was evaluated")
    assert {rule["name"]: rule.get("lastError", "") for rule in rules() if rule["health"] != "ok"} == {}
    assert [rule["name"] for rule in rules() if rule["state"] == "firing"] == []


def test_metrics_that_rules_and_panels_name_exist(prometheus: Prometheus, traffic: Traffic) -> None:
    """Those of suspensions, which need swap, are in the code."""
    code = (ROOT / "services" / "scheduler" / "metrics.py").read_text()
    later = {
        "thaw_suspend_seconds": '"thaw.suspend"',
        "thaw_resume_seconds": '"thaw.resume"',
        "thaw_suspended_bytes": '"thaw.suspended"',
    }
    assert [name for name in later.values() if name not in code] == []
    rules = [rule["query"] for group in prometheus.read("/rules")["groups"] for rule in group["rules"]]
    named = {name for e in (*rules, *(e for queries in PANELS.values() for e in queries)) for name in metrics_of(e)}
    assert len(named) > 40
    unknown: set[str] = set()

    def are_known() -> bool:
        unknown.clear()
        missing = named - set(prometheus.read("/label/__name__/values"))
        unknown.update({name.removesuffix("_bucket").removesuffix("_count") for name in missing} - later.keys())
        if unknown:
            traffic()
        return not unknown

    until(are_known, what=lambda: f"Prometheus knows {sorted(unknown)}")


def metrics_of(expression: str) -> list[str]:
    """Return the names of metrics in an expression, without those of labels."""
    without_labels = re.sub(r"\b(?:by|ignoring|without) ?\([^)]*\)|\{[^}]*\}", "", expression)
    return re.findall(r"\b(?:thaw|gen_ai)_\w+", without_labels)


def test_alerts_fire_as_described() -> None:
    done = subprocess.run(
        ["promtool", "test", "rules", "alerts_test.yml"],
        cwd=OBSERVABILITY,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_alert_rule_has_a_case_in_which_it_fires() -> None:
    rules = {r["alert"] for g in yaml.safe_load((OBSERVABILITY / "alerts.yml").read_text())["groups"] for r in g["rules"]}
    tests = yaml.safe_load((OBSERVABILITY / "alerts_test.yml").read_text())["tests"]
    assert {case["alertname"] for test in tests for case in test["alert_rule_test"] if case["exp_alerts"]} == rules
