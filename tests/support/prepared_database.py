"""Give a test's mesh the database that its first `thaw up` would create.

`initdb` and the migrations take most of a CPU second, and `initdb` waits until the disk has a
thousand files. A copy of a database that is made once in each test process takes a tenth. It lacks
the templates of other databases, which are 600 of the files, and which no mesh creates. The
launcher then sets the mesh's password, as for any database that it finds. Meshes that start inside
`forking.executed` create their own, as those of users do.
"""

from __future__ import annotations

import asyncio
import shutil
import signal
import subprocess
import tempfile
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from sqlalchemy import text

from services.scheduler.adapters.database import connect, migrate
from shared.ports import free_port
from thaw.launcher.home import Home
from thaw.launcher.plan import MeshPlan, credentials_of
from thaw.launcher.probes import until_ready
from thaw.launcher.servers import locate_postgres, prepare_postgres

_READY_WITHIN_S = 120.0
_END_WITHIN_S = 60.0
_directory: Path | None = None
"""The state directory whose database is copied."""
_making = threading.Lock()


def provide(root: Path) -> None:
    """Put an empty database with the newest schema into the state directory `root`, once."""
    global _directory
    data = locate_postgres(Home(root)).data
    if data.exists():
        return
    with _making:
        if _directory is None:
            _directory = _make()
    draft = data.with_name(f"{data.name}.copied")
    subprocess.run(["cp", "-a", "--", str(locate_postgres(Home(_directory)).data), str(draft)], check=True)
    draft.rename(data)


def remove() -> None:
    """Remove the database that was copied."""
    global _directory
    if _directory is not None:
        shutil.rmtree(_directory)
        _directory = None


def _make() -> Path:
    directory = Path(tempfile.mkdtemp(prefix="thaw-prepared-", dir="/tmp")).resolve()
    directory.chmod(0o755)  # root's server may run as another user
    home = Home(directory)
    home.create()
    postgres = locate_postgres(home)
    plan = MeshPlan(credentials=credentials_of(home), nats_port=1, postgres_port=free_port())
    prepare_postgres(postgres, plan)
    command = postgres.server_command(plan)
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as server:
        try:
            with ThreadPoolExecutor(1) as thread:  # the caller may have an event loop
                thread.submit(asyncio.run, _migrate(plan)).result()
        finally:
            server.send_signal(signal.SIGINT)
            server.wait(_END_WITHIN_S)
    return directory


async def _migrate(plan: MeshPlan) -> None:
    async with asyncio.timeout(_READY_WITHIN_S):
        await until_ready("postgres", plan.postgres_port)
    engine = connect(plan.effective_database_url)
    try:
        await migrate(engine)
        async with engine.connect() as connection:
            alone = await connection.execution_options(isolation_level="AUTOCOMMIT")
            for name in ("template0", "template1"):
                await alone.execute(text(f"ALTER DATABASE {name} IS_TEMPLATE false"))
                await alone.execute(text(f"DROP DATABASE {name}"))
    finally:
        await engine.dispose()
