"""Engines inherit no credentials of the node, unless the model requests them."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest

from services.nodeagent.engines.direct import DirectLauncher
from tests.integration.enginehost.spare_node import Node
from tests.support.hosted import Hosts, fake_card

SECRETS = {
    "HF_TOKEN": "hf_secret",
    "HUGGING_FACE_HUB_TOKEN": "hf_secret",
    "AWS_SECRET_ACCESS_KEY": "aws_secret",
    "GOOGLE_APPLICATION_CREDENTIALS": "/google_secret",
    "AZURE_STORAGE_KEY": "azure_secret",
    "OPENAI_API_KEY": "openai_secret",
    "HTTPS_PROXY": "http://me:proxy_secret@127.0.0.1:1",
    "THAW_ADMIN_KEY": "admin_secret",
    "THAW_DATABASE_URL": "postgresql://thaw:database_secret@127.0.0.1/thaw",
}


@pytest.fixture
def secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    """Set secrets in the environment of the nodeagent, here the test process."""
    for name, value in SECRETS.items():
        monkeypatch.setenv(name, value)


@pytest.mark.usefixtures("secrets")
async def test_engine_processes_have_no_credentials_of_the_node(hosts: Hosts) -> None:
    start = hosts.host(fake_card("--fork"))
    report = await hosts.settled(start.instance_id)
    assert report.state == "ready", report.error
    pids = hosts.marked(start.instance_id)
    assert len(pids) >= 2
    for pid in pids:
        reported = Path(f"/proc/{pid}/environ").read_text()
        assert "PATH=" in reported
        assert "secret" not in reported
        assert "THAW_NATS_URL" not in reported, "nor the mesh's"


@pytest.mark.usefixtures("secrets")
async def test_engine_receives_the_variables_that_its_model_names(hosts: Hosts) -> None:
    start = hosts.host(fake_card(env={"HF_TOKEN": "${HF_TOKEN}", "GIVEN": "${THAW_ADMIN_KEY}", "AWS_REGION": "here"}))
    report = await hosts.settled(start.instance_id)
    assert report.state == "ready", report.error
    env = (await hosts.request_route(start.instance_id, "/stats", "GET")).json["env"]
    assert env["HF_TOKEN"] == "hf_secret"
    assert env["AWS_REGION"] == "here"
    assert env["GIVEN"] == "", "Thaw's own are never given away"
    assert "HUGGING_FACE_HUB_TOKEN" not in env


@pytest.mark.usefixtures("secrets")
async def test_host_receives_only_the_credentials_that_its_model_names(hosts: Hosts, tmp_path: Path) -> None:
    launcher = DirectLauncher("services.enginehost", tmp_path / "specs", "host")
    start = hosts.spec(fake_card(env={"HF_TOKEN": "${HF_TOKEN}"}))
    host = psutil.Process(await launcher.launch(start))
    try:
        report = await hosts.settled(start.instance_id)
        assert report.state == "ready", report.error
        found = host.environ()
        assert found["HF_TOKEN"] == "hf_secret"
        assert not found.keys() & (SECRETS.keys() - {"HF_TOKEN"})
    finally:
        host.terminate()
        await launcher.exit_status(host.pid, 20.0)


@pytest.mark.usefixtures("secrets")
async def test_spare_interpreter_has_no_credentials(hosts: Hosts, tmp_path: Path) -> None:
    node = Node(hosts, tmp_path)
    try:
        waiting = psutil.Process(await node.waits())
        host = waiting.parent()
        assert host is not None
        for process in (waiting, host):
            assert "secret" not in "".join(process.environ().values())
    finally:
        await node.close()
