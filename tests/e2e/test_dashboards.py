"""Dashboards and alert rules, evaluated by a real Prometheus that scrapes a real mesh."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import yaml

from shared.ports import free_port
from tests.support.launcher import ROOT, Thaw, until

SHARED = True
OBSERVABILITY = ROOT / "compose" / "observability"
DASHBOARD = json.loads((OBSERVABILITY / "grafana" / "dashboards" / "thaw.json").read_text())
PANELS = {panel["title"]: [t["expr"] for t in panel["targets"]] for panel in DASHBOARD["panels"]}
WITHOUT_DATA = {
    "Requests that met their objective": "no model of the mesh has an objective",
    "Pages of devices with memory of their own": "its device has none",
    "Share of weights that devices had already": "its device has none",
    "Hand-offs of running requests": "no request was moved",
    "Instances that left for starts, by model that started": "no instance was evicted",
    "Clearing for starts, and restarts of preempted models": "no instance was evicted",
}
pytestmark = pytest.mark.skipif(shutil.which("prometheus") is None, reason="no Prometheus is installed: apt-get install prometheus")


class Prometheus:
    """Debian's Prometheus with the rules of compose/observability, scraping a mesh every second."""

    def __init__(self, folder: Path, targets: dict[str, str]) -> None:
        config = yaml.safe_load((OBSERVABILITY / "prometheus.yml").read_text())
        assert {job["job_name"] for job in config["scrape_configs"]} == targets.keys()
        for job in config["scrape_configs"]:
            job["static_configs"] = [{"targets": [targets[job["job_name"]]]}]
        config["global"] = {"scrape_interval": "1s", "evaluation_interval": "1s"}
        config["rule_files"] = [str(OBSERVABILITY / "alerts.yml")]
        (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
        self.url = f"http://127.0.0.1:{free_port()}"
        self._log = (folder / "log").open("w")
        self.process = subprocess.Popen(
            [
                "prometheus",
                f"--config.file={folder / 'prometheus.yml'}",
                f"--storage.tsdb.path={folder / 'data'}",
                f"--web.listen-address={self.url.removeprefix('http://')}",
            ],
            stdout=self._log,
            stderr=self._log,
        )
        self._http = httpx.Client(base_url=f"{self.url}/api/v1", timeout=30)

    def read(self, path: str, **parameters: str) -> Any:
        """Return the data of a request to its API."""
        answer = self._http.get(path, params=parameters)
        assert answer.is_success, answer.text
        return answer.json()["data"]

    def query(self, expression: str) -> list[Any]:
        """Evaluate an expression of a panel; NaN counts as no value."""
        found = self.read("/query", query=expression.replace("$__rate_interval", "5m"))["result"]
        return [r for r in found if r["value"][1] != "NaN"]

    def are_targets_up(self) -> bool:
        """True once each target has been scraped.

        Prometheus refuses requests until it has started.
        """
        try:
            is_started = self._http.get(f"{self.url}/-/ready").is_success
        except httpx.TransportError:
            return False
        return is_started and len(self.query("up == 1")) == 2

    def close(self) -> None:
        self._http.close()
        self.process.terminate()
        self.process.wait(60)
        self._log.close()


@pytest.fixture(scope="module")
def prometheus(mesh: Thaw, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    targets = {"gateway": f"127.0.0.1:{mesh.port}", "scheduler": f"127.0.0.1:{mesh.environment['THAW_SCHEDULER_METRICS_PORT']}"}
    server = Prometheus(tmp_path_factory.mktemp("prometheus"), targets)
    try:
        until(server.are_targets_up, what="both targets are scraped")
        yield server
    finally:
        server.close()


def test_every_panel_has_data(prometheus: Prometheus, client: openai.OpenAI, admin: httpx.Client) -> None:
    """Every panel shows data, apart from those about what this mesh does not do."""

    def start_cold() -> None:
        """Cause what the panels show: a cold start, and a rejected request."""
        admin.post("/models/one/sleep").raise_for_status()
        assert admin.get("/cluster", headers={"authorization": "Bearer wrong"}).status_code == 401
        client.chat.completions.create(model="one", messages=[{"role": "user", "content": "Hi"}], max_tokens=4)

    def has_data(expression: str) -> bool:
        if not prometheus.query(expression):
            start_cold()  # a rate needs growth between two scrapes
        return bool(prometheus.query(expression))

    assert PANELS.keys() >= WITHOUT_DATA.keys()
    for title in PANELS.keys() - WITHOUT_DATA.keys():
        for expression in PANELS[title]:
            until(partial(has_data, expression), 60, f"{title} has data: {expression}")
    for title in WITHOUT_DATA:
        for expression in PANELS[title]:
            prometheus.query(expression)


def test_rules_are_evaluated_and_none_fires(prometheus: Prometheus) -> None:
    def rules() -> list[Any]:
        found: list[Any] = [rule for group in prometheus.read("/rules")["groups"] for rule in group["rules"]]
        return found

    until(lambda: all(rule["health"] != "unknown" for rule in rules()), what="every rule was evaluated")
    assert {rule["name"]: rule.get("lastError", "") for rule in rules() if rule["health"] != "ok"} == {}
    assert [rule["name"] for rule in rules() if rule["state"] == "firing"] == []


def test_metrics_that_rules_and_panels_name_exist(prometheus: Prometheus) -> None:
    """Metrics without data in this mesh are known all the same: their names are in the code."""
    known = set(prometheus.read("/label/__name__/values"))
    later = {
        "thaw_requests_objective_total": "thaw.requests.objective",
        "thaw_device_memory_bytes": "thaw.device.memory",
        "thaw_device_violations": "thaw.device.violations",
        "thaw_device_reused_bytes_total": 'f"thaw.device.{name}"',
        "thaw_device_copied_bytes_total": 'f"thaw.device.{name}"',
        "thaw_requests_handed_over_total": "thaw.requests.handed_over",
        "thaw_plan_victims_total": "thaw.plan.victims",
        "thaw_plan_clearing_seconds_total": "thaw.plan.clearing",
        "thaw_plan_restarts_seconds_total": "thaw.plan.restarts",
    }
    code = "".join((ROOT / "services" / s).read_text() for s in ("gateway/telemetry/metrics.py", "scheduler/metrics.py"))
    rules = [rule["query"] for group in prometheus.read("/rules")["groups"] for rule in group["rules"]]
    for expression in (*rules, *(e for expressions in PANELS.values() for e in expressions)):
        for name in _metrics_of(expression):
            assert name in known or later[name] in code, name


def _metrics_of(expression: str) -> set[str]:
    words = set()
    for word in expression.replace("(", " ").replace(")", " ").replace("{", " ").replace("[", " ").split():
        if word.startswith(("thaw_", "gen_ai_")) and word.endswith(("_total", "_bucket", "_sum", "_count", "_bytes", "_nodes")):
            words.add(word)
    return words


def test_alerts_fire_as_described() -> None:
    done = subprocess.run(
        ["promtool", "test", "rules", "alerts_test.yml"], cwd=OBSERVABILITY, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_alert_rule_has_a_case_in_which_it_fires() -> None:
    rules = {r["alert"] for g in yaml.safe_load((OBSERVABILITY / "alerts.yml").read_text())["groups"] for r in g["rules"]}
    tests = yaml.safe_load((OBSERVABILITY / "alerts_test.yml").read_text())["tests"]
    assert {case["alertname"] for test in tests for case in test["alert_rule_test"] if case["exp_alerts"]} == rules
