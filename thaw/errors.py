"""Define the command line's errors: what happened, and what to do about it."""

from __future__ import annotations

from typing import Any


class CommandError(Exception):
    """Failure of a command: what happened (`what`) and what to do (`remedy`).

    The command exits with status 1.
    """

    def __init__(self, what: str, remedy: str = "", *, code: str = "failed", details: list[dict[str, Any]] | None = None) -> None:
        self.what = what
        self.remedy = remedy
        self.code = code
        self.details = details or []
        super().__init__(f"{what} {remedy}".strip())

    def lines(self) -> list[str]:
        """Further lines for people; none by default."""
        return []

    def body(self) -> dict[str, Any]:
        """The error as `--json` prints it."""
        body: dict[str, Any] = {"code": self.code, "message": self.what, "remedy": self.remedy}
        if self.details:
            body["details"] = self.details
        return {"error": body}


class NotRunning(CommandError):
    """No mesh runs on this machine under the state directory."""

    def __init__(self, home: object) -> None:
        super().__init__(f"No mesh is running under {home}.", "Start one with `thaw up`, or set THAW_URL.", code="not_running")
