"""Descriptions of migrations for users."""

from __future__ import annotations

import io
import json

import pytest
from rich.console import Console
from typer.testing import CliRunner

from shared.contracts.admin import ClusterView
from shared.contracts.base import ErrorBody
from shared.contracts.migration import MovedRequest
from tests.unit.cli.migrations import DONE
from thaw.cli import migrate as verbs
from thaw.cli.app import app
from thaw.cli.listing import show_migrations, summary
from thaw.cli.migrate import concerning, describe, show_moves


def shown(show: object, *arguments: object) -> str:
    out = io.StringIO()
    show(Console(file=out, width=140), *arguments)  # type: ignore[operator]  # one of the functions above
    return out.getvalue()


def test_migration_outcome_is_one_line() -> None:
    assert "i-1 from node-0 to node-1 (i-2): done; 1 of 2 requests moved, pause 31 ms, 0.81 s in all" in describe(DONE)
    failed = DONE.model_copy(
        update={"state": "failed", "error": ErrorBody(code="unreachable", message="nothing [there]"), "request_id": "q"}
    )
    assert "request q from node-0" in describe(failed)
    assert "nothing \\[there]" in describe(failed)
    given_up = DONE.model_copy(update={"state": "given_up", "requests": (MovedRequest(request_id="q-1", reason="it was over"),)})
    assert describe(given_up).endswith("it was over")


def test_an_unknown_instance_is_not_called_a_request(monkeypatch: pytest.MonkeyPatch) -> None:
    class Empty:
        @classmethod
        def find(cls) -> Empty:
            return cls()

        def cluster(self) -> ClusterView:
            return ClusterView(scheduler="s", epoch=1)

    monkeypatch.setattr(verbs, "Api", Empty)
    result = CliRunner().invoke(app, ["migrate", "i-5", "--json"])
    assert result.exit_code == 1
    assert json.loads(result.output)["error"]["message"] == "No instance 'i-5' is running now."


def test_running_migrations_are_listed_and_finished_ones_summarized() -> None:
    assert shown(show_migrations, []) == ""
    over = [DONE, DONE.model_copy(update={"state": "given_up", "requests": (), "migration_id": "m-3"})]
    assert "1 done, 1 given up; 1 requests moved with 90 tokens, the longest pause 31 ms." in shown(show_migrations, over)
    assert summary(over) == {"outcomes": {"done": 1, "given_up": 1}, "requests": 1, "tokens": 90, "longest_pause_ms": 31.0}
    text = shown(show_migrations, [DONE, DONE.model_copy(update={"state": "preparing", "migration_id": "m-2"})])
    assert "m-2" in text
    assert "m-1" not in text
    assert "1 of 2" in text


def test_migrations_are_found_by_request_id() -> None:
    other = DONE.model_copy(update={"migration_id": "m-0", "created": 0.5, "requests": (MovedRequest(request_id="q-2"),)})
    unrelated = DONE.model_copy(update={"requests": (MovedRequest(request_id="qq-1"),)})
    found = concerning([DONE, other, unrelated], "q")
    assert [r.migration_id for r in found] == ["m-0", "m-1"]
    text = shown(show_moves, [DONE], "q")
    assert "node-0 → node-1: moved, pause 31 ms" in text
    assert "round 1: 300 tokens in 41 ms, 7 more meanwhile" in text
    assert "200 tokens" not in text
    assert "trace" not in text
    traced = DONE.model_copy(update={"traceparent": f"00-{'a' * 32}-{'b' * 16}-01"})
    assert f"trace {'a' * 32}" in shown(show_moves, [traced], "q")


def test_migration_of_a_request_uses_the_clients_request_id() -> None:
    error = ErrorBody(code="not_found", message="no request t-1 is running")
    record = DONE.model_copy(update={"state": "failed", "error": error, "request_id": "t-1"})
    line = describe(record, "req_abc")
    assert "request req_abc from node-0" in line
    assert "no request req_abc is running" in line
    assert "t-1" not in line
