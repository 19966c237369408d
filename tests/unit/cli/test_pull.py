"""`thaw pull`: its output, its progress, and an interruption."""

from __future__ import annotations

import json
from typing import Any

import pytest
from typer.testing import CliRunner

from shared.contracts.admin import ClusterView, LoaderView, LoadView, ModelPulled, NodeView, PullOptions
from shared.sizing import MIB
from tests.unit.cli.test_ps import VIEW
from thaw.cli import pull as verbs
from thaw.cli.app import app
from thaw.errors import CommandError

PULLED = ModelPulled(name="coder", node="node-1", tier="ssd", tiers=("ssd", "dram"), nbytes=64 * MIB, took_ms=2500.0)


class Downloader:
    """A gateway that replies with `reply`, and remembers the last request."""

    reply: ModelPulled | BaseException = PULLED
    asked: tuple[str, PullOptions] | None = None

    @classmethod
    def find(cls) -> Downloader:
        return cls()

    def pull(self, model: str, options: PullOptions) -> Any:
        Downloader.asked = (model, options)
        if isinstance(self.reply, BaseException):
            raise self.reply
        return self.reply


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


def test_the_progress_is_that_of_the_model_on_the_node() -> None:
    load = LoadView(model=VIEW.card.name, total_bytes=10, loaded_bytes=4)
    other = LoadView(model="other", total_bytes=10, loaded_bytes=9)
    nodes = (
        NodeView(node="node-0", alive=True),
        NodeView(node="node-1", alive=True, loader=LoaderView(loads=(other, load))),
    )
    view = ClusterView(scheduler="s", epoch=1, models=(VIEW,), nodes=nodes)
    for name in (VIEW.card.name, *VIEW.card.spec.aliases):
        assert verbs.find_load(view, name, None) == load
    assert verbs.find_load(view, VIEW.card.name, "node-0") is None
    assert verbs.find_load(view, "unknown", None) is None
