"""Run the mesh of a campaign: two nodes, two gateways, two schedulers, a balancer.

`thaw up` starts the nodes; the second gateway and scheduler are those that an operator adds on
another host. A supervisor in this module restarts them when they end, as systemd would. `thaw up`
restarts a supervisor that was killed, as an operator's unit would do.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import httpx
import psutil

from bench.chaos.balancer import Balancer
from bench.chaos.load import CALLERS, PROBE, Served, secret_of
from services.gateway.authorization import hash_key
from services.nodeagent.suspend.cgroups import hierarchies
from shared.contracts.models import ModelSpec
from shared.contracts.node import InstanceState
from shared.settings import NodeSettings
from shared.sizing import need_of
from tests.support import paced_zygote
from tests.support.adapters import write_adapter
from tests.support.launcher import ROOT, Thaw
from tests.support.mesh import listens, mapped_bytes
from tests.support.real_engines import WHOLE, directory
from tests.support.servers import kept_port
from thaw.cli.demo import card_of
from thaw.demo.models import make_demo_model

NODES = ("node-0", "node-1")
HOSTED_BYTES = 512 * 1024 * 1024
_LIMITS = {
    "requests_per_minute": 10**6,
    "tokens_per_minute": 10**9,
    "concurrent_requests": 1000,
    "tokens_per_day": 10**12,
    "tokens_per_month": 10**12,
    "device_seconds_per_month": 10**9,
}
_BUILTIN = {"one": "test", "two": "test", "three": "test", "five": "5m"}
_MAKE_GGUF = ROOT / "tests" / "integration" / "engines_real" / "make_gguf.py"


class Keeper:
    """A process beside the supervisor's, started again when it ends."""

    def __init__(self, name: str, service: str, environment: dict[str, str], log: Path) -> None:
        self.name = name
        self.process: subprocess.Popen[bytes] | None = None
        self._command = [sys.executable, "-m", f"services.{service}"]
        self._environment = environment
        self._log = log
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"keeper {name}", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._stopped.is_set():
            with self._log.open("ab") as output:
                self.process = subprocess.Popen(
                    self._command, env=self._environment, stdin=subprocess.DEVNULL, stdout=output, stderr=output, cwd=ROOT
                )
            self.process.wait()
            self._stopped.wait(0.3)

    def close(self) -> None:
        self._stopped.set()
        if self.process is not None and self.process.poll() is None:
            self.process.terminate()
        self._thread.join(45)
        if self.process is not None and self.process.poll() is None:
            self.process.kill()
            self._thread.join(10)


class Bed(Thaw):
    """`hosted`: what runs the model `llama`, as named in the report."""

    def __init__(self, long: tuple[int, ...] = (16, 100, 400), **environment: str) -> None:
        """Prepare the mesh.

        Args:
            long: Tokens of a response of the builtin engine, one of these.
        """
        super().__init__(**environment)
        self._long = long
        self.hosted = "none"
        self.needs: dict[str, int] = {}
        self.keepers: dict[str, Keeper] = {}

    def begin(self, *, hosted: bool = True) -> None:
        self.environment["THAW_DRAM_BYTES"] = "0"  # memory that no instance holds is a booking fault
        self.hosted, model = self._hosted_model() if hosted else ("none", None)
        specs = {n: self._demo(n, size, i) for i, (n, size) in enumerate(_BUILTIN.items())}
        adapter = write_adapter(self.home / "adapters" / "style", Path(specs["one"].source))
        self.needs = {n: need_of(card_of(s)).total for n, s in specs.items()} | {"llama": HOSTED_BYTES}
        need = max(self.needs[n] for n in specs)
        budgets = {NODES[0]: (HOSTED_BYTES if model else 0) + need + need // 2, NODES[1]: 2 * need + need // 2}
        models: list[dict[str, Any]] = [{"name": n, "source": s.source} for n, s in specs.items()]
        models[0]["adapters"] = {"style": str(adapter)}
        document = {
            "mesh": {"port": self.port, "nodes": {n: {"cpu:0": b} for n, b in budgets.items()}},
            "defaults": {"keep_alive": -1},
            "models": [*models, *([model] if model else [])],
        }
        (self.home / "thaw.yaml").write_text(json.dumps(document))
        self.start_mesh()
        self._second_kept = kept_port()
        self.second_port = int(self._second_kept.getsockname()[1])
        self.keepers = {
            "gateway": self._keep("gateway", THAW_GATEWAY_PORT=str(self.second_port)),
            "scheduler": self._keep("scheduler", THAW_DATABASE_URL=self.endpoints["database_url"]),
        }
        self.balancer = Balancer({"gateway.1": self.port, "gateway.2": self.second_port})
        self._http = httpx.Client(trust_env=False, timeout=20)
        self._admin = {"authorization": f"Bearer {self.endpoints['admin_key']}"}
        for caller in (*CALLERS, PROBE):
            self._add_key(caller, {} if caller == PROBE else _LIMITS)

    @property
    def gateway_ports(self) -> tuple[int, int]:
        return self.port, self.second_port

    def _add_key(self, name: str, limits: dict[str, int]) -> None:
        body = {"name": name, "sha256": hash_key(secret_of(name)), **limits}
        self._http.post(f"http://127.0.0.1:{self.port}/admin/v1/keys", json=body, headers=self._admin).raise_for_status()

    def list_served(self) -> tuple[Served, ...]:
        """Return the models that clients request."""
        long, short = self._long, (8, 24)
        found = [
            Served("one", 4, long),
            Served("one:style", 1.5, long),
            Served("two", 2, long),
            Served("three", 1.5, long),
            Served("five", 1.5, (16, 80), near_ties=True),
        ]
        if self.hosted != "none":
            found.append(Served("llama", 1.5, short, engine="hosted", resumes=False, near_ties=True))
        return tuple(found)

    def start_mesh(self) -> None:
        """Start the mesh, or its supervisor alone where everything else lives."""
        self.json("up", "--detach", "--config", str(self.home / "thaw.yaml"))

    def shut_down(self) -> dict[str, list[str]]:
        """End everything in order; what is left that should not be there."""
        self._end_own()
        done = self.run("down", "--json")
        swept = json.loads(done.stdout)["left_behind"] if done.returncode == 0 else {"processes": [done.stderr[-300:]]}
        return {
            "processes": [*map(str, swept["processes"]), *(f"{p.pid} {_command(p)}" for p in self.processes())],
            "segments": [*swept.get("segments", []), *(p.name for p in self.segments())],
            "cgroups": self.cgroups(),
        }

    def _end_own(self) -> None:
        """The keepers' processes and the balancer."""
        for keeper in self.keepers.values():
            keeper.close()
        if self.keepers:
            self.keepers = {}
            self.balancer.close()
            self._http.close()
            self._second_kept.close()

    def copy_logs(self, to: Path) -> None:
        for log in self.logs():
            target = to / log.relative_to(self.home)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(log, target)

    def close(self) -> None:
        self._end_own()
        try:
            super().close()
        except AssertionError:
            if sys.exc_info()[0] is None:
                raise

    def _demo(self, name: str, size: str, seed: int) -> ModelSpec:
        return ModelSpec(name=name, source=str(make_demo_model(self.home / "models" / name, size, seed=seed)))

    def _hosted_model(self) -> tuple[str, dict[str, Any]]:
        """Return llama.cpp where `make engines` has installed it, else a stand-in.

        The stand-in answers as an OpenAI server.
        """
        place = directory() / "llamacpp"
        if not (place / WHOLE).exists():
            command = [sys.executable, "-m", "tests.support.fake_openai", "--port", "{port}"]
            model = {"source": "engine://llama", "command": command, "max_model_len": 512}
            return "a stand-in server", {"name": "llama", "engine": "openai", "memory": HOSTED_BYTES, **model}
        python = str(place / "bin" / "python")
        self.environment["THAW_LLAMACPP_PYTHON"] = python
        source = make_demo_model(self.home / "models" / "gguf-source", "5m", seed=9)
        gguf = self.home / "models" / "llama.gguf"
        subprocess.run([python, str(_MAKE_GGUF), str(source), str(gguf)], check=True, stdout=subprocess.DEVNULL)
        return "llama.cpp", {
            "name": "llama",
            "engine": "llamacpp",
            "source": str(gguf),
            "memory": HOSTED_BYTES,
            "max_model_len": 512,
        }

    def _keep(self, service: str, **more: str) -> Keeper:
        own = {"THAW_NATS_URL": self.endpoints["nats_url"], "THAW_ADMIN_KEY": self.endpoints["admin_key"], "PYTHONUNBUFFERED": "1"}
        return Keeper(f"{service}.2", service, self.environment | own | more, self.home / "logs" / f"{service}.2.log")

    # What there is.

    def cluster(self) -> dict[str, Any]:
        """Raises `httpx.HTTPError` while no gateway or scheduler answers."""
        return self._view("cluster")

    def read_usage(self) -> list[dict[str, Any]]:
        """Return all rows of the ledger, by key, model and adapter; raises as `cluster`."""
        rows: list[dict[str, Any]] = self._view("usage", by="key,model,adapter", since="0")["rows"]
        return rows

    def read_spending(self, port: int) -> dict[str, Any]:
        """Return what the gateway at `port` counts against the keys' budgets.

        Raises as `cluster`.
        """
        spending: dict[str, Any] = self._view("keys", f"http://127.0.0.1:{port}")["spending"]
        return spending

    def _view(self, what: str, base: str = "", **query: str) -> dict[str, Any]:
        answer = self._http.get(f"{base or self.balancer.url}/admin/v1/{what}", params=query, headers=self._admin)
        answer.raise_for_status()
        found: dict[str, Any] = answer.json()
        return found

    def list_live(self) -> list[dict[str, Any]]:
        """Instances that hold memory."""
        return [i for n in self.cluster()["nodes"] for i in n["instances"] if InstanceState(i["state"]).holds_memory]

    def cgroups(self) -> list[str]:
        """Control groups of engines of this mesh."""
        scopes = [NodeSettings(home=self.home, node=n).scope for n in NODES]
        return [str(p) for _, root in hierarchies() for s in scopes for p in root.glob(f"thaw-{s}*")]

    def victims(self, kind: str) -> list[psutil.Process]:
        """Living processes of a kind, in a stable order."""
        return sorted(self._victims(kind), key=lambda p: p.pid)

    def _victims(self, kind: str) -> list[psutil.Process]:
        if kind == "supervisor":
            return self._find_existing([self.pid("supervisor")])
        if kind in ("nats", "postgres", "migrator"):
            return self._find_existing([self.service_pid(kind)])
        if kind in ("nodeagent", "loader"):
            return self._find_existing([self.service_pid(f"{kind}.{n}") for n in NODES])
        if kind in ("gateway", "scheduler"):
            kept = self.keepers[kind].process
            return self._find_existing([self.service_pid(kind), kept.pid if kept and kept.poll() is None else None])
        own = [(p, _command(p)) for p in self.processes()]
        if kind == "engine host":
            return [p for p, c in own if "services.enginehost" in c]
        if kind == "hosted engine":
            return [p for p, c in own if "llama_cpp.server" in c or "tests.support.fake_openai" in c]
        engines = [p for p, c in own if "services.engine " in f"{c} " or "services.engine.zygote" in c or paced_zygote.MODULE in c]
        return [p for p in engines if listens(p) == (kind == "zygote")]

    def name_of(self, kind: str, process: psutil.Process) -> str:
        """Return the name of a process.

        `gateway.1` is the supervisor's, `gateway.2` the other; other kinds have their own name.
        """
        if kind in self.keepers:
            kept = self.keepers[kind].process
            return f"{kind}.{2 if kept and kept.pid == process.pid else 1}"
        return kind

    def service_pid(self, service: str) -> int | None:
        """The pid of a supervised service that runs."""
        with contextlib.suppress(KeyError, TypeError, OSError, ValueError):
            return self.pid(service)
        return None

    @staticmethod
    def _find_existing(pids: list[int | None]) -> list[psutil.Process]:
        found = []
        for pid in pids:
            with contextlib.suppress(psutil.Error):
                if pid is not None and (process := psutil.Process(pid)).status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
        return found

    # What must hold.

    def find_overbooked(self, cluster: dict[str, Any]) -> list[str]:
        """Devices whose budget was granted twice.

        What an engine has grown to beyond its need is booked to it too, and may exceed the budget
        for a while; it was not granted, and does not count here.
        """
        faults = []
        for node in cluster["nodes"]:
            live = [i for i in node["instances"] if InstanceState(i["state"]).holds_memory]
            grown = sum(max(0, i["memory"]["reserved"] - self.needs.get(i["model"], 0)) for i in live)
            granted = sum(device["reserved_bytes"] for device in node["devices"]) - grown
            budget = sum(device["budget_bytes"] for device in node["devices"])
            if granted > budget:
                faults.append(
                    f"{node['node']}: {granted} bytes granted of {budget}: {[(i['model'], i['state'], i['memory']['reserved']) for i in live]}"
                )
        return faults

    def find_booking_faults(self) -> list[str]:
        """Once the load is still: memory booked must be memory used, on every node."""
        try:
            cluster = self.cluster()
        except (httpx.HTTPError, ValueError) as e:
            return [f"no view of the cluster: {e!r}"[:300]]
        alive = [n for n in cluster["nodes"] if n["alive"]]
        faults = [] if len(alive) == len(NODES) else [f"{len(alive)} nodes are alive"]
        pids: set[int] = set()
        for node in alive:
            live = [i for i in node["instances"] if InstanceState(i["state"]).holds_memory]
            pids |= {p for i in live for p in i["pids"]}
            faults += [f"{i['instance_id']} of {i['model']} is still {i['state']}" for i in live if i["state"] != "ready"]
            booked = sum(i["memory"]["reserved"] for i in live)
            faults += [
                f"{node['node']}: {d['reserved_bytes']} bytes reserved, {booked} by live instances"
                for d in node["devices"]
                if d["reserved_bytes"] != booked
            ]
        faults += self.find_overbooked(cluster)
        engines = {p.pid for kind in ("engine", "engine host") for p in self.victims(kind)}
        if extra := engines - pids:
            faults.append(f"processes {sorted(extra)} belong to no live instance")
        hosted = {child.pid for host in self.victims("engine host") for child in _children(host)}
        # A relay to the port of an engine that cannot listen on a Unix socket outlives its parent.
        if missing := {pid for pid in pids - engines - hosted if _RELAY not in _description(pid)}:
            faults.append(f"no engines, but processes of live instances: {[_description(pid) for pid in sorted(missing)]}")
        present, mapped = self.shared_bytes(), mapped_bytes(engines)
        if mapped != present:
            faults.append(f"{present} bytes of shared memory, {mapped} mapped by live instances")
        return faults

    def settle(self, within_s: float) -> list[str]:
        """Booking faults that remain after `within_s` without load."""
        deadline = time.monotonic() + within_s
        while (faults := self.find_booking_faults()) and time.monotonic() < deadline:
            time.sleep(0.25)
        return faults


_RELAY = "services/enginehost/runtimes/relay.py"


def _children(process: psutil.Process) -> list[psutil.Process]:
    try:
        return process.children(recursive=True)
    except psutil.NoSuchProcess:
        return []


def _description(pid: int) -> str:
    try:
        process = psutil.Process(pid)
        return f"{pid}, child of {process.ppid()}, {process.status()}: {_command(process)}"
    except psutil.NoSuchProcess:
        return f"{pid}, which has ended"


def _command(process: psutil.Process) -> str:
    with contextlib.suppress(psutil.Error):
        return " ".join(process.cmdline())
    return ""
