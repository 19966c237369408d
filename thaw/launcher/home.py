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
"""Bytes of a Unix socket's path (sun_path of Linux is 108 with its closing zero)."""
_LONGEST_SOCKET = "nodes/{node}/agent/zygote.sock"


@dataclass(frozen=True)
class Home:
    """THAW_HOME. Directories are made 0700 by `create`."""

    root: Path

    @classmethod
    def from_environment(cls) -> Home:
        given = Path(os.environ.get("THAW_HOME") or "~/.thaw").expanduser().absolute()
        # A link there is refused by `check`; one further up may be the system's own, as /var/run.
        return cls(given if given.is_symlink() else given.resolve())

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
        """The file with the running supervisor and its services
        (`thaw.launcher.status.MeshStatus`).
        """
        return self.run / "supervisor.json"

    @property
    def plan_file(self) -> Path:
        """The file with the supervisor's plan (`thaw.launcher.plan.MeshPlan`), secrets included."""
        return self.run / "mesh.json"

    @property
    def endpoints_file(self) -> Path:
        return self.run / "endpoints.json"

    @property
    def credentials_file(self) -> Path:
        return self.run / "credentials.json"

    @property
    def lock_file(self) -> Path:
        return self.run / "lock"

    @property
    def start_lock_file(self) -> Path:
        """The file that a `thaw up` locks while it starts the mesh.

        The supervisor holds `lock_file` as long as it lives.
        """
        return self.run / "start.lock"

    def heartbeat_socket(self, service: str) -> Path:
        """The socket on which the supervisor receives the heartbeats of a service."""
        return self.run / f"{service}.beat"

    @property
    def digest(self) -> str:
        return hashlib.sha256(str(self.root).encode()).hexdigest()[:8]

    def log(self, service: str) -> Path:
        return self.logs / f"{service}.log"

    @property
    def existing(self) -> Path:
        """The state directory, or the nearest directory above it that is there."""
        return next(p for p in (self.root, *self.root.parents) if p.exists())

    def check(self, nodes: tuple[str, ...] = ("node-0",)) -> None:
        """Raises `CommandError` where `create` would, without making anything."""
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
        """Make the directories; raises `CommandError` where they cannot be used."""
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
    """Replace `path` at once and durably with `text`, readable by its owner only."""
    write_durably(path, text.encode())


def read_json(path: Path) -> dict[str, Any] | None:
    """The object in `path`; None if the file is not there or not JSON."""
    try:
        value = json.loads(path.read_text())
    except (OSError, ValueError):
        return None
    return value if isinstance(value, dict) else None
