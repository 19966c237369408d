"""`thaw logs` of nodes behind a gateway that THAW_URL names."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from shared.contracts.admin import ClusterView, NodeView
from shared.contracts.logs import LogFile, LogRead, LogsListed
from thaw.cli import logs, remote_logs
from thaw.cli.api import Api
from thaw.cli.app import main
from thaw.cli.remote_logs import MOST_FAILURES, RemoteLog, find_remote
from thaw.errors import CommandError

NODES = tuple(NodeView(node=name, alive=name != "n-2") for name in ("n-0", "n-1", "n-2"))
LOGS = ("zygote", "loader.{}", "i-1a2b.{}.engine")


class Logs(Api):
    """A gateway with two nodes that answer and one that does not."""

    def __init__(self) -> None:
        super().__init__("http://gateway")
        self.content = "one\ntwo\nthr"

    def cluster(self) -> ClusterView:
        return ClusterView(scheduler="s", epoch=1, nodes=NODES)

    def node_logs(self, node: str) -> LogsListed:
        return LogsListed(node=node, logs=tuple(LogFile(name=name.format(node), nbytes=1) for name in LOGS))

    def read_log(self, node: str, name: str, lines: int, after: int | None = None) -> LogRead:
        text, _, rest = self.content[after or 0 :].rpartition("\n")
        position = len(self.content) - len(rest)
        found = tuple(text.split("\n")) if text else ()
        return LogRead(node=node, name=name, lines=found[-lines:], rest=rest, position=position)


class Restarting(Logs):
    """A gateway whose first answers are errors."""

    def __init__(self, errors: list[CommandError]) -> None:
        super().__init__()
        self._errors = errors

    def read_log(self, node: str, name: str, lines: int, after: int | None = None) -> LogRead:
        if self._errors:
            raise self._errors.pop()
        return super().read_log(node, name, lines, after)


def test_names_select_logs_as_on_this_machine() -> None:
    api = Logs()
    assert list(find_remote(api, "zygote")) == ["zygote.n-0", "zygote.n-1"]
    assert list(find_remote(api, "loader.n-1")) == ["loader.n-1"]
    assert list(find_remote(api, "i-1a2b.n-0")) == ["i-1a2b.n-0.engine"]
    assert list(find_remote(api, "engine")) == ["i-1a2b.n-0.engine", "i-1a2b.n-1.engine"]
    with pytest.raises(CommandError) as caught:
        find_remote(api, "gateway")
    assert "n-2" in caught.value.what
    assert "loader.n-0" in caught.value.remedy


def test_refusal_of_the_gateway_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: Logs, node: str) -> LogsListed:
        raise CommandError("An admin API without a key serves no logs.", code="permission_denied")

    monkeypatch.setattr(Logs, "node_logs", refuse)
    with pytest.raises(CommandError, match="serves no logs"):
        find_remote(Logs(), "loader")


def test_follow_mode_prints_each_line_once_and_whole() -> None:
    api, log = Logs(), RemoteLog("n-0", "zygote")
    assert list(log.read(api, 1)) == ["two"]
    assert list(log.read(api, 10)) == []
    api.content += "ee\nfour\n"
    assert list(log.read(api, 10)) == ["three", "four"]


def test_follow_mode_survives_a_gateway_that_restarts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lines that were written meanwhile follow, each once."""
    errors = ("`thaw ps` lists the nodes", "No gateway answers", "No gateway answers.")  # a gateway's have no full stop
    api = Restarting([CommandError(what, code="no_gateway") for what in errors])
    log, reported = RemoteLog("n-0", "zygote", position=0), list[str]()

    def poll(now: int) -> list[str]:
        monkeypatch.setattr(remote_logs, "time", SimpleNamespace(monotonic=lambda: now))
        return log.follow(api, 10, reported.append)

    found = [poll(now) for now in range(20)]
    assert reported == [f"n-0: {what.rstrip('.')}. Trying again in {s} s." for what, s in zip(errors[::-1], (1, 2, 4), strict=True)]
    assert [now for now, lines in enumerate(found) if lines] == [7]
    assert found[7] == ["one", "two"]
    assert log.failures == 0


@pytest.mark.parametrize(("code", "attempts"), [("unreachable", MOST_FAILURES), ("permission_denied", 1), ("not_found", 1)])
def test_follow_mode_ends_after_some_failures_in_a_row(monkeypatch: pytest.MonkeyPatch, code: str, attempts: int) -> None:
    seconds = itertools.count(step=60)
    monkeypatch.setattr(remote_logs, "time", SimpleNamespace(monotonic=lambda: next(seconds)))
    refusals = [CommandError("No nodeagent of n-0 answers.", code=code)] * 100
    api, log = Restarting(refusals), RemoteLog("n-0", "zygote", position=0)
    for _ in range(attempts - 1):
        assert log.follow(api, 10, lambda _: None) == []
    with pytest.raises(CommandError, match="No nodeagent"):
        log.follow(api, 10, lambda _: None)
    assert 100 - len(refusals) == attempts


def test_failed_poll_is_reported_on_the_standard_error_stream(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    polls = 0

    def stop_after_two_polls(_: float) -> None:
        nonlocal polls
        polls += 1
        if polls == 2:
            raise KeyboardInterrupt

    class OnceUnreachable(Logs):
        def read_log(self, node: str, name: str, lines: int, after: int | None = None) -> LogRead:
            if after is not None:
                raise CommandError("No gateway answers.", code="no_gateway")
            return super().read_log(node, name, lines, after)

    monkeypatch.setenv("THAW_URL", "http://gateway")
    monkeypatch.setenv("THAW_HOME", str(tmp_path / "none"))
    monkeypatch.setattr(Api, "find", lambda _: OnceUnreachable())
    monkeypatch.setattr(logs, "time", SimpleNamespace(sleep=stop_after_two_polls))
    assert main(["logs", "loader.n-0", "-f"]) == 0
    shown = capsys.readouterr()
    assert "one" in shown.out
    assert "Trying again" in shown.err
    assert "Trying again" not in shown.out


def test_lines_of_other_logs_are_shown_before_one_ends_the_command(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    class OneRemoved(Logs):
        def read_log(self, node: str, name: str, lines: int, after: int | None = None) -> LogRead:
            if after is not None and node == "n-1":
                raise CommandError("n-1 has no such log", code="not_found")
            found = super().read_log(node, name, lines, after)
            self.content = self.content + "ee\nfour\n" if node == "n-1" else self.content
            return found

    monkeypatch.setenv("THAW_URL", "http://gateway")
    monkeypatch.setenv("THAW_HOME", str(tmp_path / "none"))
    monkeypatch.setattr(Api, "find", lambda _: OneRemoved())
    assert main(["logs", "zygote", "-f"]) != 0
    assert "four" in capsys.readouterr().out


def test_document_has_the_logs_by_name(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("THAW_URL", "http://gateway")
    monkeypatch.setenv("THAW_HOME", str(tmp_path / "none"))
    monkeypatch.setattr(Api, "find", lambda _: Logs())
    assert main(["logs", "loader", "--json"]) == 0
    shown = [{"message": line} for line in ("one", "two", "thr")]
    assert json.loads(capsys.readouterr().out)["logs"] == {"loader.n-0": shown, "loader.n-1": shown}
