"""Debian's Prometheus with the rules and the dashboard of compose/observability."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from tests.support.launcher import ROOT, Thaw, until
from tests.support.servers import kept_port

OBSERVABILITY = ROOT / "compose" / "observability"
DASHBOARD = json.loads((OBSERVABILITY / "grafana" / "dashboards" / "thaw.json").read_text())
PANELS: dict[str, list[str]] = {panel["title"]: [t["expr"] for t in panel["targets"]] for panel in DASHBOARD["panels"]}
SUSPENSION_PANELS = frozenset(title for title, expressions in PANELS.items() if any("thaw_suspend" in e for e in expressions))
"""Panels whose data need swap; tests/e2e/test_suspend.py has them."""
needs_prometheus = pytest.mark.skipif(
    shutil.which("prometheus") is None, reason="no Prometheus is installed: apt-get install prometheus"
)


class Prometheus:
    """A Prometheus as compose.yaml starts it, which scrapes a mesh every second."""

    def __init__(self, folder: Path, mesh: Thaw) -> None:
        targets = {"gateway": f"127.0.0.1:{mesh.port}", "scheduler": f"127.0.0.1:{mesh.environment['THAW_SCHEDULER_METRICS_PORT']}"}
        config = yaml.safe_load((OBSERVABILITY / "prometheus.yml").read_text())
        assert {job["job_name"] for job in config["scrape_configs"]} == targets.keys()
        for job in config["scrape_configs"]:
            job["static_configs"] = [{"targets": [targets[job["job_name"]]]}]
        config["global"] = {"scrape_interval": "1s", "evaluation_interval": "1s"}
        config["rule_files"] = [str(OBSERVABILITY / "alerts.yml")]
        (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
        command = yaml.safe_load((ROOT / "compose" / "compose.yaml").read_text())["services"]["prometheus"]["command"]
        self._kept = kept_port()
        self.url = f"http://127.0.0.1:{self._kept.getsockname()[1]}"
        self._log = (folder / "log").open("w")
        self.process = subprocess.Popen(
            [
                "prometheus",
                f"--config.file={folder / 'prometheus.yml'}",
                f"--storage.tsdb.path={folder / 'data'}",
                f"--web.listen-address={self.url.removeprefix('http://')}",
                *(option for option in command if option.startswith("--enable-feature=")),
            ],
            stdout=self._log,
            stderr=self._log,
        )
        self._http = httpx.Client(base_url=f"{self.url}/api/v1", timeout=120)
        until(self._are_targets_up, what="both targets are scraped")

    def read(self, path: str, **parameters: str) -> Any:
        """Return the data of a request to its API."""
        answer = self._http.get(path, params=parameters)
        assert answer.is_success, answer.text
        return answer.json()["data"]

    def query(self, expression: str) -> list[Any]:
        """Evaluate an expression of a panel, for all models; NaN counts as no value."""
        found = self.read("/query", query=evaluated(expression))["result"]
        return [r for r in found if r["value"][1] != "NaN"]

    def await_data(self, titles: Iterable[str], cause: Callable[[], object], within_s: float = 300.0) -> None:
        """Wait until every query of these panels has data, and call `cause` until then.

        A rate needs growth between two scrapes: what happened before the first one is not enough.
        """
        missing = [(title, expression) for title in titles for expression in PANELS[title]]

        def is_complete() -> bool:
            missing[:] = [(title, expression) for title, expression in missing if not self.query(expression)]
            if missing:
                cause()
            return not missing

        until(is_complete, within_s, what=lambda: f"panels have data; these have none: {missing}")

    def _are_targets_up(self) -> bool:
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
        self._kept.close()
        self._log.close()


def evaluated(expression: str) -> str:
    """Return an expression of the dashboard with Grafana's variables replaced."""
    return expression.replace("$__rate_interval", "5m").replace("$model", ".*")
