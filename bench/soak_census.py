"""Count everything in a mesh that could grow.

That is its processes, shared memory, control groups, database, streams and files.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import asyncpg
import nats
import psutil
from nats.aio.client import Client
from nats.js.errors import NotFoundError

from shared.settings import NodeSettings
from tests.support.launcher import Thaw
from tests.support.mesh import listens
from thaw.cli.api import Api
from thaw.launcher.home import Home, read_json

Census = dict[str, float]
"""Metrics by name, `PLACE|METRIC`, e.g. `gateway|private_bytes`."""
SWAPPED = "engines of swapped models"
_TABLES = """
select schemaname || '.' || relname as name, pg_total_relation_size(relid) as bytes, n_live_tup as live, n_dead_tup as dead
from pg_stat_user_tables
"""
_CGROUPS = Path("/sys/fs/cgroup")


class Counter:
    """Counts what one mesh has.

    Args:
        steady: Models whose engines live as long as the mesh and are reported by themselves.
    """

    def __init__(self, mesh: Thaw, steady: tuple[str, ...]) -> None:
        self._mesh, self._steady = mesh, steady
        self._home = Home(mesh.home)
        self._nats: Client | None = None
        self.bounds: dict[str, float] = {}
        """The limits of each stream's own configuration: `stream NAME|max_messages`, `max_bytes`,
        `max_age_s`.
        """

    async def count(self) -> Census:
        """One census. A part that cannot be had (a server is away) is left out of it."""
        census: Census = {}
        census |= await asyncio.to_thread(self._count_here)
        for part in (self._database, self._streams):
            try:
                async with asyncio.timeout(60):
                    census |= await part()
            except (OSError, asyncpg.PostgresError, nats.errors.Error, TimeoutError) as e:
                census[f"census|failed {type(e).__name__}"] = 1.0
        return census

    async def close(self) -> None:
        if self._nats is not None:
            await self._nats.close()

    def _count_here(self) -> Census:
        return self._processes() | self._kernel() | self._files() | {"machine|load": os.getloadavg()[0]}

    def models_by_pid(self) -> dict[int, str]:
        nodes = Api.from_home(self._home).request("GET", "/admin/v1/cluster")["nodes"]
        return {int(pid): i["model"] for n in nodes for i in n["instances"] for pid in i["pids"]}

    def engines(self) -> set[int]:
        """Engine processes of the mesh, not the zygotes that they are forked from."""
        found = set()
        for process in self._mesh.processes():
            try:
                if "services.engine" in " ".join(process.cmdline()) and not listens(process):
                    found.add(process.pid)
            except psutil.Error:
                continue  # it ended meanwhile
        return found

    def _processes(self) -> Census:
        status = read_json(self._home.supervisor_file) or {}
        names = {s["process"]["pid"]: name for name, s in status.get("services", {}).items() if s["process"]}
        names[status["supervisor"]["pid"]] = "supervisor"
        models = self.models_by_pid()
        census: dict[str, float] = defaultdict(float)
        census["mesh|zombies"] = 0.0
        for process in self._list_processes(status["supervisor"]["pid"]):
            try:
                if process.status() == psutil.STATUS_ZOMBIE:
                    census["mesh|zombies"] += 1
                    continue
                name = names.get(process.pid) or self._name(process, models)
                for metric, value in measure(process.pid).items():
                    census[f"{name}|{metric}"] += value
            except (psutil.Error, OSError):
                continue  # it ended meanwhile
        for metric in ("private_bytes", "fds", "threads", "processes"):
            census[f"mesh|{metric}"] = sum(v for k, v in census.items() if k.endswith(f"|{metric}"))
        census["mesh|cpu_s"] = sum(v for k, v in census.items() if k.endswith("|cpu_s"))
        return dict(census)

    def _list_processes(self, supervisor: int) -> Iterable[psutil.Process]:
        """Return the supervisor's descendants, and other processes under its home.

        Zombies are included.
        """
        try:
            root = psutil.Process(supervisor)
            found = {p.pid: p for p in (root, *root.children(recursive=True))}
        except psutil.Error:
            found = {}
        return (found | {p.pid: p for p in self._mesh.processes()}).values()

    def _name(self, process: psutil.Process, models: dict[int, str]) -> str:
        command = " ".join(process.cmdline())
        if command.startswith("postgres:") or "/postgres " in command:
            return "postgres"
        if (model := models.get(process.pid)) is not None:
            return f"engine of {model}" if model in self._steady else SWAPPED
        if "services.engine" in command:
            return "zygotes" if listens(process) else SWAPPED
        return "others"

    def _kernel(self) -> Census:
        segments = self._mesh.segments()
        sizes = []
        for path in segments:
            try:
                sizes.append(path.stat().st_blocks * 512)
            except OSError:
                continue
        return {
            "/dev/shm|bytes": float(sum(sizes)),
            "/dev/shm|files": float(len(sizes)),
            "cgroups|groups": float(len(self.groups())),
        }

    def groups(self) -> list[Path]:
        """Control groups of the mesh's engines.

        Their names hold a digest of the home and the node, as those of segments do.
        """
        names = [p.name for p in self._home.nodes.iterdir()]
        prefixes = tuple(f"thaw-{NodeSettings(node=n, home=self._mesh.home).scope}" for n in names)
        return [Path(d) / n for d, below, _ in os.walk(_CGROUPS) for n in below if n.startswith(prefixes)]

    def _files(self) -> Census:
        census: dict[str, float] = {}
        for place in ("logs", "nats", "postgres", "nodes", "run"):
            size, count = disk_usage(self._mesh.home / place)
            census |= {f"directory {place}|bytes": size, f"directory {place}|files": count}
        for log in (self._mesh.home / "logs").glob("*.log"):
            census[f"log of {log.stem}|bytes"] = float(log.stat().st_size)
        engines = [disk_usage(p) for p in self._home.nodes.glob("*/logs")]
        return census | {"engine logs|bytes": sum(b for b, _ in engines), "engine logs|files": sum(n for _, n in engines)}

    async def _database(self) -> Census:
        url = self._mesh.endpoints["database_url"].replace("+asyncpg", "")
        connection = await asyncpg.connect(url)
        try:
            census: dict[str, float] = {}
            for row in await connection.fetch(_TABLES):
                rows = await connection.fetchval(f"select count(*) from {row['name']}")
                census[f"table {row['name']}|rows"] = float(rows)
                census[f"table {row['name']}|bytes"] = float(row["bytes"])
            census["postgres|connections"] = float(await connection.fetchval("select count(*) from pg_stat_activity"))
            census["postgres|database bytes"] = float(await connection.fetchval("select pg_database_size(current_database())"))
            census["postgres|wal bytes"] = float(await connection.fetchval("select coalesce(sum(size), 0) from pg_ls_waldir()"))
            return census
        finally:
            await connection.close()

    async def _streams(self) -> Census:
        if self._nats is None or self._nats.is_closed:
            self._nats = await nats.connect(self._mesh.endpoints["nats_url"])
        census: dict[str, float] = {}
        js = self._nats.jetstream()
        try:
            infos = await js.streams_info()
        except NotFoundError:
            infos = []
        for info in infos:
            name = f"stream {info.config.name}"
            census[f"{name}|messages"] = float(info.state.messages)
            census[f"{name}|bytes"] = float(info.state.bytes)
            census[f"{name}|consumers"] = float(info.state.consumer_count)
            limits = {"max_messages": info.config.max_msgs, "max_bytes": info.config.max_bytes, "max_age_s": info.config.max_age}
            self.bounds |= {f"{name}|{what}": float(limit) for what, limit in limits.items() if limit is not None and limit > 0}
        return census


def measure(pid: int) -> dict[str, float]:
    """Return the resources of a process.

    PSS counts shared pages by the share of each; private bytes are what its end would give back.

    Raises:
        OSError: there is no such process, or none of its memory is left.
    """
    kib: dict[str, float] = defaultdict(float)
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:]:
        name, value, *_ = line.split()
        kib[name.rstrip(":")] += float(value)
    process = psutil.Process(pid)
    times = process.cpu_times()
    return {
        "rss_bytes": kib["Rss"] * 1024,
        "pss_bytes": kib["Pss"] * 1024,
        "private_bytes": (kib["Private_Clean"] + kib["Private_Dirty"]) * 1024,
        "fds": float(process.num_fds()),
        "threads": float(process.num_threads()),
        "processes": 1.0,
        "cpu_s": times.user + times.system,
    }


def disk_usage(directory: Path) -> tuple[float, float]:
    """Bytes on disk, and files, below a directory."""
    size = count = 0
    for where, _, names in os.walk(directory):
        for name in names:
            try:
                size += (Path(where) / name).lstat().st_blocks * 512
            except OSError:
                continue
            count += 1
    return float(size), float(count)


def stamp_census(census: Census, began: float) -> dict[str, Any]:
    """A census as it is written down."""
    return {"at_s": time.monotonic() - began, "census": census}
