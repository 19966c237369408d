"""Manage the state directory of a one-machine mesh, and its small private files."""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shared.private import UntrustedDirectory, require_private, require_safe_parents, write_durably
from thaw.errors import CommandError

SOCKET_PATH_LIMIT = 107
"""Most bytes of a Unix socket's path: `sun_path` of Linux has 108, with the closing zero."""
_LONGEST_SOCKET = "nodes/{node}/agent/zygote.sock"
"""The longest path of a socket that is bound by its full path. The loader's is longer, and is bound
by a shorter path to the same directory.
"""


@dataclass(frozen=True)
class Home:
    """The state directory, THAW_HOME. `create` makes it and its directories with mode 0700."""

    root: Path

    @classmethod
    def from_environment(cls) -> Home:
        """Return the state directory that THAW_HOME names, or ~/.thaw.

        Raises:
            CommandError: There is no such home directory, or no access to the path.
        """
        written = os.environ.get("THAW_HOME") or "~/.thaw"
        try:
            given = Path(written).expanduser().absolute()
            # A link is kept, so that `check` refuses it. Links above it may be the system's own,
            # such as /var/run.
            return cls(given if given.is_symlink() else given.resolve())
        except (OSError, RuntimeError) as e:  # no access, no home directory, or links in a circle
            raise CommandError(
                f"The state directory {written} cannot be found: {e.strerror if isinstance(e, OSError) else e}.",
                "Set THAW_HOME to a directory of yours.",
                code="state_directory",
            ) from e

    @property
    def run(self) -> Path:
        return self.root / "run"

    @property
    def logs(self) -> Path:
        return self.root / "logs"

    @property
    def models(self) -> Path:
        return self.root / "models"

    @property
    def nodes(self) -> Path:
        return self.root / "nodes"

    @property
    def supervisor_file(self) -> Path:
        """The file with the status of the supervisor and its services (`MeshStatus`)."""
        return self.run / "supervisor.json"

    @property
    def plan_file(self) -> Path:
        """The file with the supervisor's plan (`MeshPlan`), secrets included."""
        return self.run / "mesh.json"

    @property
    def endpoints_file(self) -> Path:
        return self.run / "endpoints.json"

    @property
    def credentials_file(self) -> Path:
        return self.run / "credentials.json"

    @property
    def service_variables_file(self) -> Path:
        """The file with the variables of `thaw service install`'s unit, secrets included."""
        return self.root / "service.env"

    @property
    def lock_file(self) -> Path:
        return self.run / "lock"

    @property
    def start_lock_file(self) -> Path:
        """The file that `thaw up` locks while it starts the mesh.

        The supervisor locks `lock_file` as long as it runs.
        """
        return self.run / "start.lock"

    def heartbeat_socket(self, service: str) -> Path:
        """The socket on which the supervisor receives the heartbeats of a service."""
        return self.run / f"{service}.beat"

    @property
    def digest(self) -> str:
        """A short hash of the path, which makes names outside the directory unique."""
        return hashlib.sha256(str(self.root).encode()).hexdigest()[:8]

    def log(self, service: str) -> Path:
        return self.logs / f"{service}.log"

    @property
    def existing(self) -> Path:
        """The state directory, or else the nearest path above it that exists."""
        return next(p for p in (self.root, *self.root.parents) if p.exists())

    def check(self, nodes: tuple[str, ...] = ("node-0",)) -> None:
        """Check that `create` can make the directories, without making any.

        Args:
            nodes: Names of the nodes, which are part of the paths of sockets.

        Raises:
            CommandError: The path is too long for Unix sockets, cannot be written, or another user
                could write to it.
        """
        longest = max(len(os.fsencode(self.root / _LONGEST_SOCKET.format(node=n))) for n in nodes)
        if longest > SOCKET_PATH_LIMIT:
            raise CommandError(
                f"The state directory's path is {longest - SOCKET_PATH_LIMIT} bytes too long for the Unix sockets in it: {self.root}",
                "Set THAW_HOME to a shorter path, e.g. THAW_HOME=~/t.",
                code="state_directory",
            )
        if not self.existing.is_dir() or not os.access(self.existing, os.W_OK | os.X_OK):
            raise self._make_unwritable_error("permission denied" if self.existing.is_dir() else f"{self.existing} is a file")
        try:
            self._require_ours()
        except OSError as e:
            raise self._make_untrusted_error(e) from e

    def _require_ours(self) -> None:
        """Raise `UntrustedDirectory` if another user can write to the state directory.

        A directory that another user could have made is refused, too.
        """
        if not os.path.lexists(self.root):
            require_safe_parents(self.root)
            return
        require_private(self.root, 0o755)
        for directory in (self.run, self.logs, self.nodes):
            if os.path.lexists(directory):
                require_private(directory, 0o700 if directory == self.run else 0o755)

    def _make_untrusted_error(self, why: OSError) -> CommandError:
        return CommandError(
            f"The state directory {self.root} cannot be trusted: {why}.",
            "Set THAW_HOME to a directory of your own that no other user can write (chmod 0700), and name it itself, not a link to it.",
            code="state_directory",
        )

    def _make_unwritable_error(self, why: str) -> CommandError:
        return CommandError(
            f"The state directory {self.root} cannot be written: {why}.",
            "Set THAW_HOME to a directory of yours, or correct the permissions of this one.",
            code="state_directory",
        )

    def create(self, nodes: tuple[str, ...] = ("node-0",)) -> None:
        """Make the directories.

        Args:
            nodes: As for `check`.

        Raises:
            CommandError: They cannot be made or used.
        """
        self.check(nodes)
        try:
            for directory in (self.root, self.run, self.logs, self.models, self.nodes):
                directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._require_ours()
            with tempfile.TemporaryFile(dir=self.run):
                pass
        except UntrustedDirectory as e:
            raise self._make_untrusted_error(e) from e
        except OSError as e:
            raise self._make_unwritable_error(str(e.strerror)) from e


def write_private(path: Path, text: str) -> None:
    """Replace a file with `text`, atomically and durably; only its owner can read it."""
    write_durably(path, text.encode())


def read_json(path: Path) -> dict[str, Any] | None:
    """Return the JSON object in a file; None if there is no such file, or no object in it."""
    try:
        value = json.loads(path.read_text())
    except (OSError, ValueError):
        return None
    return value if isinstance(value, dict) else None
