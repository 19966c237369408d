"""Ask systemd, through `systemctl`, about a unit of the system or of this user."""

from __future__ import annotations

import shutil
import subprocess
from dataclasses import dataclass

from thaw.errors import CommandError

_WITHIN_S = 30
_ENDED = ("inactive", "failed", "unknown")


@dataclass(frozen=True)
class Systemd:
    """A manager of units.

    Attributes:
        is_system: The manager of the system, not of this user.
    """

    is_system: bool

    @property
    def command(self) -> str:
        """The command as users type it."""
        return "systemctl" if self.is_system else "systemctl --user"

    def is_reachable(self) -> bool:
        """Return whether the manager answers. It does not in most containers."""
        return shutil.which("systemctl") is not None and self._run("show-environment").returncode == 0

    def is_active(self, unit: str) -> bool:
        """Return whether the unit runs, starts or stops."""
        return self._run("is-active", unit).stdout.strip() not in _ENDED

    def disable(self, unit: str, stop_s: float) -> None:
        """Stop the unit, and do not start it at boot or login any more.

        Args:
            stop_s: Seconds that the unit may take to stop.

        Raises:
            CommandError: systemd refuses, or the unit still runs after this time.
        """
        done = self._run("disable", "--now", unit, timeout_s=stop_s + _WITHIN_S)
        if done.returncode != 0:
            why = (done.stderr.strip() or f"status {done.returncode}").splitlines()[-1]
            raise CommandError(
                f"`{self.command} disable --now {unit}` failed: {why}.",
                "Run it as root for a unit of the system." if self.is_system else f"`{self.command} status {unit}` says more.",
            )

    def forget(self, unit: str) -> None:
        """Read the units again after the unit's file was removed, and drop its failure."""
        self._run("daemon-reload")
        self._run("reset-failed", unit)

    def _run(self, *arguments: str, timeout_s: float = _WITHIN_S) -> subprocess.CompletedProcess[str]:
        command = [*self.command.split(), *arguments]
        try:
            return subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, check=False)
        except subprocess.TimeoutExpired as e:
            raise CommandError(f"`{' '.join(command)}` did not end within {timeout_s:.0f} s.", "Repeat the command.") from e
