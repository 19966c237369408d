"""The plan of `thaw up` from options, environment and file; the demo's budget."""

from __future__ import annotations

import socket
import sys
from decimal import Decimal
from pathlib import Path

import pytest

from shared.contracts.models import ModelSpec
from shared.contracts.prices import Prices, TokenPrices
from shared.sizing import need_of
from thaw.cli.apply import differences
from thaw.cli.demo import budget_for_two, card_of
from thaw.config.load import MeshConfig, NodeConfig, SchedulerConfig
from thaw.demo.models import make_demo_model
from thaw.errors import CommandError
from thaw.launcher.home import Home, write_private
from thaw.launcher.plan import MeshPlan
from thaw.launcher.planning import Wanted, make_plan
from thaw.launcher.services import programs_of

GIB = 2**30


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Home:
    for name in ("THAW_GATEWAY_PORT", "THAW_GATEWAY_HOST", "THAW_NATS_URL", "THAW_DATABASE_URL", "THAW_ADMIN_KEY"):
        monkeypatch.delenv(name, raising=False)
    home = Home(tmp_path)
    home.create()
    return home


def plan(home: Home, wanted: Wanted, demo_budget: int | None = None) -> MeshPlan:
    return make_plan(home, wanted, 10 * GIB, demo_budget)


def test_options_override_environment_file_and_defaults(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    assert Wanted().port_or_default == 8080
    file = MeshConfig(port=9000, host="0.0.0.0")
    assert Wanted(mesh=file).port_or_default == 9000
    monkeypatch.setenv("THAW_GATEWAY_PORT", "9100")
    assert Wanted(mesh=file).port_or_default == 9100
    assert Wanted(mesh=file, port=9200).port_or_default == 9200
    assert plan(home, Wanted(mesh=file, port=9200)).gateway_url == "http://127.0.0.1:9200"
    secured = MeshConfig(environment={"THAW_TLS_CERTIFICATE": "/etc/cert.pem"})
    assert plan(home, Wanted(mesh=secured, port=9000)).gateway_url == "https://127.0.0.1:9000"
    monkeypatch.setenv("THAW_GATEWAY_PORT", "many")
    with pytest.raises(CommandError, match="THAW_GATEWAY_PORT"):
        _ = Wanted().port_or_default


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere a second socket cannot have the address")
def test_ports_of_a_plan_are_kept_for_its_servers(home: Home) -> None:
    made = plan(home, Wanted())
    for port in (made.nats_port, made.postgres_port):
        with socket.socket() as other, pytest.raises(OSError, match="in use"):
            other.bind(("127.0.0.1", port))
        socket.create_server(("127.0.0.1", port)).close()


def test_nodes_option_truncates_or_extends_the_nodes_of_the_file(home: Home) -> None:
    mesh = MeshConfig(nodes={"a": NodeConfig(devices={"cpu:0": GIB}), "node-0": NodeConfig()})
    assert Wanted().node_names == ("node-0",)
    assert Wanted(mesh=mesh).node_names == ("a", "node-0")
    assert Wanted(mesh=mesh, nodes=1).node_names == ("a",)
    assert Wanted(mesh=mesh, nodes=4).node_names == ("a", "node-0", "node-1", "node-2")


def test_several_nodes_divide_the_memory(home: Home) -> None:
    (one,) = plan(home, Wanted()).nodes
    assert one.devices == {}
    two = plan(home, Wanted(nodes=2)).nodes
    assert [n.devices for n in two] == [{"cpu:0": int(3.5 * GIB)}] * 2
    assert (one.dram, [n.dram for n in two]) == (None, [int(0.75 * GIB)] * 2)


def test_a_node_s_dram_budget_is_the_loader_s(home: Home) -> None:
    made = plan(home, Wanted(mesh=MeshConfig(nodes={"a": NodeConfig(dram=5), "b": NodeConfig(dram=0)})))
    budgets = {p.name: p.environment.get("THAW_DRAM_BYTES") for p in programs_of(home, made, None)}
    assert (budgets["loader.a"], budgets["loader.b"]) == ("5", "0")


def test_credentials_outlive_a_mesh(home: Home) -> None:
    first = plan(home, Wanted()).credentials
    assert plan(home, Wanted()).credentials == first
    assert len({first.nats_password, first.database_password, first.admin_key}) == 3
    assert home.credentials_file.stat().st_mode & 0o777 == 0o600


def test_secrets_are_in_no_command_line(home: Home) -> None:
    made = plan(home, Wanted(mesh=MeshConfig(api_keys=("sk-secret",))))
    secrets = {made.credentials.nats_password, made.credentials.database_password, made.credentials.admin_key, "sk-secret"}
    for program in programs_of(home, made, None):
        assert not any(secret in word for word in program.command for secret in secrets)
    assert "sk-secret" not in made.model_dump_json()


def test_demo_budget_holds_two_models_of_three(tmp_path: Path) -> None:
    specs = tuple(ModelSpec(name=f"m{i}", source=str(make_demo_model(tmp_path / f"m{i}", "test", seed=i))) for i in range(3))
    needs = [need_of(card_of(s)).total for s in specs]
    budget = budget_for_two(specs)
    assert sum(sorted(needs)[-2:]) <= budget < sum(needs)


def test_policy_of_the_environment_overrides_the_file(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("THAW_POLICY", raising=False)
    wanted = Wanted(scheduler=SchedulerConfig(policy="lru"))
    programs = {p.name: p for p in programs_of(home, plan(home, wanted), None)}
    assert programs["scheduler"].environment["THAW_POLICY"] == "lru"
    assert "THAW_POLICY" not in plan(home, Wanted()).environment
    monkeypatch.setenv("THAW_POLICY", "fifo")
    assert "THAW_POLICY" not in plan(home, wanted).environment


def test_prices_of_the_file_are_a_setting_and_others_need_a_restart(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("THAW_PRICES", raising=False)
    prices = Prices(currency="EUR", tokens=TokenPrices(prompt=Decimal("0.1")))
    running = plan(home, Wanted(prices=prices))
    assert Prices.model_validate_json(running.environment["THAW_PRICES"]) == prices
    write_private(home.plan_file, running.model_dump_json())
    assert differences(home, Wanted(prices=prices)) == []
    assert differences(home, Wanted(prices=prices.model_copy(update={"currency": "USD"}))) == ["prices"]


def test_another_policy_needs_a_restart(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("THAW_POLICY", raising=False)
    running = plan(home, Wanted(scheduler=SchedulerConfig(policy="lru")))
    write_private(home.plan_file, running.model_dump_json())
    assert differences(home, Wanted(scheduler=SchedulerConfig(policy="lru"))) == []
    assert differences(home, Wanted(scheduler=SchedulerConfig(policy="thaw"))) == ["scheduler.policy"]
    assert differences(home, Wanted()) == []


def test_settings_that_need_a_restart_are_reported(home: Home) -> None:
    file = MeshConfig(
        port=9000,
        admin_key="choose-one",
        api_keys=("sk-one",),
        nats_port=4333,
        environment={"THAW_REQUIRE_KEY": "true"},
        nodes={"a": NodeConfig(devices={"cpu:0": GIB}, dram=5)},
    )
    write_private(home.plan_file, plan(home, Wanted(mesh=file, scheduler=SchedulerConfig(policy="lru"))).model_dump_json())
    assert differences(home, Wanted(mesh=file)) == differences(home, Wanted()) == []
    changes: dict[str, dict[str, object]] = {
        "mesh.port": {"port": 9001},
        "mesh.nodes": {"nodes": {"a": NodeConfig(dram=6)}},
        "mesh.admin_key": {"admin_key": "another-one"},
        "mesh.api_keys": {"api_keys": ("sk-one", "sk-two")},
        "mesh.environment": {"environment": {}},
        "mesh.nats_port": {"nats_port": 4334},
        "mesh.postgres_port": {"postgres_port": 5433},
    }
    for key, change in changes.items():
        assert differences(home, Wanted(mesh=file.model_copy(update=change))) == [key]
