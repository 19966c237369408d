"""Find leftovers of a mesh: processes without their supervisor, and shared memory."""

from __future__ import annotations

import contextlib
import signal
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shared.contracts.segment import segment_prefix
from thaw.launcher.home import Home
from thaw.launcher.processes import Identity, descendants, end, find_marked, identify
from thaw.launcher.servers import postgres_directories
from thaw.launcher.status import read_status

SHM = Path("/dev/shm")
_ENOUGH_S = 3.0


@dataclass(frozen=True)
class Leftovers:
    processes: tuple[Identity, ...] = ()
    segments: tuple[Path, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.processes or self.segments)


def nodes_of(home: Home) -> set[str]:
    """Every node that has ever had state here, node-0 included."""
    found = {"node-0"}
    with contextlib.suppress(OSError):
        found |= {d.name for d in home.nodes.iterdir() if d.is_dir()}
    return found


def find_leftovers(home: Home) -> Leftovers:
    """Return living processes and shared memory of the mesh under `home`.

    Its supervisor and the caller are not included.
    """
    return Leftovers(tuple(_processes(home)), tuple(find_segments(home)))


def find_segments(home: Home) -> list[Path]:
    if not SHM.is_dir():
        return []
    prefixes = tuple(segment_prefix(home.root, node) for node in nodes_of(home))
    return sorted(p for p in SHM.iterdir() if p.name.startswith(prefixes))


def _processes(home: Home) -> list[Identity]:
    status = read_status(home)
    supervisor = status.supervisor if status else None
    found = {p.pid: p for p in find_marked(home.root)}
    roots = [p for p in (status.processes() if status else []) if p.is_alive()]
    if (postmaster := running_postgres(home)) is not None:  # PostgreSQL overwrites its environment with its process titles
        roots.append(postmaster)
    for root in [*roots, *found.values()]:
        for process in (root, *descendants(root)):
            found[process.pid] = process
    if supervisor is not None:
        found.pop(supervisor.pid, None)
    return list(found.values())


def running_postgres(home: Home) -> Identity | None:
    """Return the PostgreSQL server that holds our data directory.

    None unless its pid file names a living postgres.
    """
    for data in postgres_directories(home):
        try:
            pid = int((data / "postmaster.pid").read_text().split("\n", 1)[0])
            command = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        except (OSError, ValueError):
            continue
        if str(data).encode() in command:
            return identify(pid)
    return None


def sweep(home: Home) -> Leftovers:
    """End every leftover process, servers last, and remove the shared memory.

    Returns what there was.
    """
    before = find_leftovers(home)
    servers = [p for p in before.processes if _is_server(p)]
    children = {c.pid for s in servers for c in descendants(s)}
    server_pids = {s.pid for s in servers}
    end([p for p in before.processes if p.pid not in children | server_pids], _ENOUGH_S)
    end(servers, _ENOUGH_S, signal.SIGINT)
    end([p for p in before.processes if p.is_alive()], 0.0)
    for segment in find_segments(home):
        with contextlib.suppress(FileNotFoundError):
            segment.unlink()
    return before


def _is_server(process: Identity) -> bool:
    try:
        program = Path(f"/proc/{process.pid}/cmdline").read_bytes().split(b"\0", 1)[0]
    except OSError:
        return False
    return Path(program.decode(errors="replace")).name in ("postgres", "nats-server")


def describe(leftovers: Leftovers) -> dict[str, Any]:
    return {"processes": [p.pid for p in leftovers.processes], "segments": [s.name for s in leftovers.segments]}


def forget(home: Home) -> None:
    """Remove the files that say a mesh runs here."""
    for path in (home.supervisor_file, home.endpoints_file, *home.run.glob("*.beat")):
        path.unlink(missing_ok=True)
