"""`thaw ps` and `thaw --help` start fast.

They import neither pydantic nor httpx. Their output equals that of the message classes.
"""

from __future__ import annotations

import io
import json
import subprocess
import sys
from http.server import BaseHTTPRequestHandler, HTTPServer
from threading import Thread

import pytest
from rich.console import Console

from shared.contracts.admin import ClusterView, MigrationsViewed, ModelView, NodeView
from shared.contracts.base import Frozen
from shared.contracts.node import DeviceStatus, InstanceState, InstanceStatus, Timing
from tests.unit.cli.migrations import DONE
from tests.unit.cli.views import VIEW, instance
from thaw.cli.gateway import Gateway
from thaw.cli.listing import show_migrations, summary
from thaw.cli.plain import to_plain
from thaw.cli.ps import facts_of, show_devices, show_models
from thaw.errors import CommandError

_HEAVY = ("pydantic", "httpx", "yaml", "psutil", "asyncio")
_PROGRAM = """
import sys
from thaw.cli.app import main
status = main(sys.argv[1:])
print("imported", *[m for m in {heavy!r} if m in sys.modules], file=sys.stderr)
sys.exit(status)
"""


def timed(state: InstanceState) -> InstanceStatus:
    return instance(state).model_copy(update={"started": Timing(at=1.0, took_ms=20.0)})


def cluster() -> ClusterView:
    device = DeviceStatus(device_id="cpu:0", kind="cpu", budget_bytes=2**30, reserved_bytes=2**29)
    states = (InstanceState.READY, InstanceState.LOADING, InstanceState.SUSPENDED, InstanceState.STOPPED)
    node = NodeView(node="n", alive=True, cordoned=True, devices=(device,), instances=tuple(map(timed, states)))
    failed = ModelView(card=VIEW.card.model_copy(update={"spec": VIEW.card.spec.model_copy(update={"name": "x"})}), error="no file")
    return ClusterView(scheduler="s", epoch=1, models=(VIEW, failed), nodes=(node,))


def as_json(message: Frozen) -> object:
    return to_plain(json.loads(message.model_dump_json()))


def shown(view: ClusterView, migrations: list[object]) -> str:
    file = io.StringIO()
    out = Console(file=file, width=160)
    show_models(out, view, migrations)  # type: ignore[arg-type]  # JSON in the form of messages, or messages
    show_devices(out, view)
    show_migrations(out, migrations)  # type: ignore[arg-type]
    return file.getvalue()


def test_json_is_shown_as_the_messages_are() -> None:
    going = DONE.model_copy(update={"state": "preparing"})
    viewed = MigrationsViewed(migrations=(DONE, going))
    light = as_json(viewed).migrations  # type: ignore[attr-defined]
    assert shown(as_json(cluster()), light) == shown(cluster(), list(viewed.migrations))  # type: ignore[arg-type]
    assert summary(light) == summary(viewed.migrations)
    for node, same in zip(cluster().nodes, as_json(cluster()).nodes, strict=True):  # type: ignore[attr-defined]
        assert [facts_of(node, i) for i in node.instances] == [facts_of(same, i) for i in same.instances]


def test_field_missing_from_an_older_gateway_is_none() -> None:
    assert to_plain({"a": [{"b": 1}]}).a[0].c is None


class _Answers(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        found = MigrationsViewed() if "migrations" in self.path else cluster()
        body = found.model_dump_json().encode()
        self.send_response(200 if self.headers["authorization"] == "Bearer secret" else 401)
        self.end_headers()
        self.wfile.write(body if self.headers["authorization"] == "Bearer secret" else b'{"error": {"message": "no", "code": "x"}}')

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def url() -> object:
    with HTTPServer(("127.0.0.1", 0), _Answers) as server:
        thread = Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


@pytest.mark.parametrize("arguments", [("ps",), ("ps", "--json")])
def test_ps_imports_no_heavy_modules(url: str, arguments: tuple[str, ...]) -> None:
    program = [sys.executable, "-c", _PROGRAM.format(heavy=_HEAVY), *arguments]
    environment = {"THAW_URL": url, "THAW_ADMIN_KEY": "secret", "PATH": "/usr/bin:/bin"}
    done = subprocess.run(program, env=environment, capture_output=True, text=True, timeout=60, check=True)
    assert done.stderr == "imported\n"
    assert "i-ready" in done.stdout


def test_help_imports_no_heavy_modules() -> None:
    done = subprocess.run(
        [sys.executable, "-c", _PROGRAM.format(heavy=_HEAVY), "--help"], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stderr == "imported\n"
    assert "simulate" in done.stdout


def test_errors_of_the_gateway(url: str) -> None:
    with pytest.raises(CommandError) as caught:
        Gateway(url, "wrong").request("GET", "/admin/v1/cluster")
    assert (caught.value.what, caught.value.code) == ("no", "x")
    with pytest.raises(CommandError) as caught:
        Gateway("http://127.0.0.1:1").request("GET", "/admin/v1/cluster")
    assert caught.value.code == "no_gateway"
    assert "127.0.0.1:1" in caught.value.what
