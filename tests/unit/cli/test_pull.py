"""`thaw pull`: its output, its progress, an interruption, the list, and a cancellation."""

from __future__ import annotations

import json
import time
from typing import Any, Literal

import pytest
from typer.testing import CliRunner

from shared.contracts.admin import ClusterView, ModelPulled, PullOptions, PullsCancelled, PullTarget, PullView
from shared.sizing import MIB
from tests.unit.cli.views import VIEW
from thaw.cli import pull as verbs
from thaw.cli.app import app
from thaw.errors import CommandError

PULLED = ModelPulled(name="coder", node="node-1", tier="ssd", tiers=("ssd", "dram"), nbytes=64 * MIB, took_ms=2500.0)


def running(model: str = "coder", node: str = "node-1", tier: Literal["ssd", "dram"] = "ssd", **more: Any) -> PullView:
    fields = {"state": "running", "since": 0.0, "loaded_bytes": 16 * MIB, "total_bytes": 64 * MIB} | more
    return PullView.model_validate({"model": model, "node": node, "tier": tier} | fields)


class Downloader:
    """A gateway that replies with `reply`, and remembers the last request."""

    reply: ModelPulled | BaseException = PULLED
    asked: tuple[str, PullOptions] | None = None
    pulls: tuple[PullView, ...] = ()
    cancelled: tuple[str, str | None, str | None] | None = None

    @classmethod
    def find(cls) -> Downloader:
        return cls()

    def pull(self, model: str, options: PullOptions) -> Any:
        Downloader.asked = (model, options)
        if isinstance(self.reply, BaseException):
            raise self.reply
        return self.reply

    def brief_cluster(self) -> ClusterView:
        return ClusterView(scheduler="s", epoch=1, models=(VIEW,), pulls=self.pulls)

    def cancel_pulls(self, model: str, node: str | None, tier: str | None) -> PullsCancelled:
        Downloader.cancelled = (model, node, tier)
        found = tuple(PullTarget(node=p.node, tier=p.tier) for p in self.pulls if p.model == model)
        return PullsCancelled(name=model, cancelled=found)


@pytest.fixture(autouse=True)
def gateway(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verbs, "Api", Downloader)


def replying(monkeypatch: pytest.MonkeyPatch, reply: ModelPulled | BaseException) -> None:
    monkeypatch.setattr(Downloader, "reply", reply)


def test_output_names_the_place_the_bytes_and_the_time() -> None:
    result = CliRunner().invoke(app, ["pull", "coder"])
    assert result.exit_code == 0, result.output
    assert "coder is in the disk cache and in host memory of node-1: 64.0 MiB, after 2.5 s" in result.output
    assert Downloader.asked == ("coder", PullOptions(node=None, tier="ssd"))


def test_weights_that_were_there_are_not_downloaded(monkeypatch: pytest.MonkeyPatch) -> None:
    replying(monkeypatch, PULLED.model_copy(update={"was_there": True, "took_ms": 0.0, "tiers": ("ssd",)}))
    result = CliRunner().invoke(app, ["pull", "coder"])
    assert "coder is in the disk cache of node-1: 64.0 MiB, was there already" in result.output


def test_json_and_options() -> None:
    result = CliRunner().invoke(app, ["pull", "coder", "--node", "node-1", "--to", "dram", "--json"])
    assert Downloader.asked == ("coder", PullOptions(node="node-1", tier="dram"))
    assert json.loads(result.output) == {
        "model": "coder",
        "node": "node-1",
        "tier": "ssd",
        "tiers": ["ssd", "dram"],
        "bytes": 64 * MIB,
        "seconds": 2.5,
        "was_there": False,
    }
    assert CliRunner().invoke(app, ["pull", "coder", "--to", "tape"]).exit_code == 2


def test_an_error_is_printed_and_an_interruption_says_that_the_pull_continues(monkeypatch: pytest.MonkeyPatch) -> None:
    replying(monkeypatch, CommandError("No node 'x'."))
    assert CliRunner().invoke(app, ["pull", "coder"]).exit_code == 1
    replying(monkeypatch, KeyboardInterrupt())
    result = CliRunner().invoke(app, ["pull", "coder"])
    assert result.exit_code == 130
    assert "the same command waits for it again" in result.output
    assert "thaw pull coder --cancel" in result.output


def test_the_progress_is_that_of_the_pull_itself() -> None:
    name = VIEW.card.name
    pulls = (running(name, "node-0", "dram"), running(name, "node-1"), running("other"))
    view = ClusterView(scheduler="s", epoch=1, models=(VIEW,), pulls=pulls)
    for known in (name, *VIEW.card.spec.aliases):
        assert verbs.find_pulls(view, known, None, None) == [*pulls[:2]]
    assert verbs.find_pulls(view, name, None, "ssd") == [pulls[1]]
    assert verbs.find_pulls(view, name, "node-1", "dram") == []
    assert verbs.find_pulls(view, "unknown", None, None) == []
    assert verbs.find_pulls(view, None, "node-1", None) == [*pulls[1:]]


def test_pulls_in_progress_are_listed_with_their_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    waiting = running("chat", "node-0", "dram", state="waiting", reason="node-0 loads weights for instances first", loaded_bytes=0)
    started = running(since=time.time() - 7200, bytes_per_second=8.0 * MIB)
    monkeypatch.setattr(Downloader, "pulls", (started, waiting))
    result = CliRunner().invoke(app, ["pull", "--list"])
    assert result.exit_code == 0, result.output
    header, first, second = (" ".join(line.split()) for line in result.output.splitlines())
    assert header == "MODEL NODE TO SINCE LOADED RATE STATE"
    assert first == "coder node-1 ssd 2.0 h ago 16.0 MiB of 64.0 MiB 8.0 MiB/s running"
    assert "0 B of 64.0 MiB waiting: node-0 loads weights for instances first" in second
    result = CliRunner().invoke(app, ["pull", "--list", "--node", "node-0", "--json"])
    assert json.loads(result.output) == {"pulls": [waiting.model_dump(mode="json")]}
    assert "No pull is in progress." in CliRunner().invoke(app, ["pull", "unknown", "--list"]).output


def asked() -> tuple[str, str | None, str | None] | None:
    """Return the latest cancellation."""
    return Downloader.cancelled


def test_a_pull_is_cancelled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Downloader, "pulls", (running(),))
    result = CliRunner().invoke(app, ["pull", "coder", "--cancel"])
    assert asked() == ("coder", None, None)
    assert "the pull of coder to the disk cache of node-1 is cancelled" in result.output
    result = CliRunner().invoke(app, ["pull", "coder", "--cancel", "--node", "node-1", "--to", "ssd", "--json"])
    assert asked() == ("coder", "node-1", "ssd")
    assert json.loads(result.output) == {"model": "coder", "cancelled": [{"node": "node-1", "tier": "ssd"}]}


def test_no_pull_in_progress_is_an_answer() -> None:
    result = CliRunner().invoke(app, ["pull", "coder", "--cancel"])
    assert (result.exit_code, "nothing to do" in result.output) == (0, True)
    result = CliRunner().invoke(app, ["pull", "coder", "--cancel", "--json"])
    assert json.loads(result.output) == {"model": "coder", "cancelled": []}


@pytest.mark.parametrize("arguments", [(), ("--cancel",), ("coder", "--cancel", "--list")])
def test_missing_and_contradicting_arguments_are_bad_usage(arguments: tuple[str, ...]) -> None:
    assert CliRunner().invoke(app, ["pull", *arguments]).exit_code == 2
