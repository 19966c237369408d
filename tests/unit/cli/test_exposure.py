"""Reports of `thaw up` and `thaw doctor` on access to the endpoint."""

from __future__ import annotations

import pytest

from shared.addresses import is_loopback
from shared.contracts.keys import ApiKey, KeyList
from shared.diagnosis import examine_access
from thaw.cli.exposure import of_wanted
from thaw.config.load import MeshConfig
from thaw.launcher.planning import Wanted

ALICE = KeyList(keys=(ApiKey(name="alice", created=1),))
OPS = KeyList(keys=(ApiKey(name="ops", scope="admin", created=1),))


@pytest.fixture(autouse=True)
def no_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("THAW_GATEWAY_HOST", "THAW_REQUIRE_KEY", "THAW_API_KEYS", "THAW_API_KEYS_FILE", "THAW_API_KEY"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.8.8", "::1", "[::1]", "localhost"])
def test_only_this_machine_reaches_loopback(host: str) -> None:
    assert is_loopback(host)
    assert examine_access(host, KeyList()).level == "ok"


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "", "10.0.0.7", "gpu-box.example"])
def test_exposed_endpoint_warns_until_there_is_a_key(host: str) -> None:
    for keys in (KeyList(), OPS):
        opened = examine_access(host, keys)
        assert opened.level == "warn"
        assert "OPEN" in opened.text
        refused = examine_access(host, keys.model_copy(update={"required": True}))
        assert (refused.level, "OPEN" in refused.text) == ("warn", False)
        assert "thaw keys add" in refused.remedy
    assert examine_access(host, ALICE).level == examine_access(host, KeyList(configured=1)).level == "ok"


def test_exposure_of_a_planned_mesh_follows_from_its_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    assert of_wanted(Wanted()).level == "ok"
    assert "OPEN" not in of_wanted(Wanted(host="0.0.0.0")).text
    assert "OPEN" in of_wanted(Wanted(host="0.0.0.0", mesh=MeshConfig(environment={"THAW_REQUIRE_KEY": "false"}))).text
    monkeypatch.setenv("THAW_REQUIRE_KEY", "false")
    monkeypatch.setenv("THAW_GATEWAY_HOST", "0.0.0.0")
    assert "OPEN" in of_wanted(Wanted()).text
    assert of_wanted(Wanted(mesh=MeshConfig(api_keys=("sk-1",)))).level == "ok"
