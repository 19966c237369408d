"""Random credentials for a containerised mesh, made once: `python -m thaw.secrets DIRECTORY`.

    nats/passwords.conf                     passwords of the NATS users, included by compose/nats.conf
    postgres/password                       of the database's owner
    gateway/, scheduler/, node/, migrator/  a THAW_SECRETS_DIR for each service, with just what it needs

Passwords that are there already are kept, so that a second start finds the credentials of the first. Each directory can be a volume of
its own: what is made from a password is made again if it is missing or differs.
"""

from __future__ import annotations

import re
import secrets
import sys
from pathlib import Path

NATS_USERS = ("gateway", "scheduler", "node", "migrator")
_PASSWORD = re.compile(r'^(\w+)_PASSWORD: "([^"]+)"$', re.MULTILINE)


def make_secrets(directory: Path, *, nats: str = "nats:4222", postgres: str = "postgres:5432") -> None:
    """Fill `directory`. `nats` and `postgres` are host:port as the services see them. Raises OSError if it cannot be written."""
    database_password = _keep(directory / "postgres" / "password", secrets.token_hex(24))
    passwords = _passwords(directory / "nats" / "passwords.conf")
    for user in NATS_USERS:
        _write(directory / user / "thaw_nats_url", f"nats://{user}:{passwords[user]}@{nats}")
    _write(directory / "scheduler" / "thaw_database_url", f"postgresql+asyncpg://thaw:{database_password}@{postgres}/thaw")
    _keep(directory / "gateway" / "thaw_admin_key", f"thaw-admin-{secrets.token_urlsafe(24)}")


def _passwords(path: Path) -> dict[str, str]:
    """By user. Users that came with a newer version get theirs; the others keep what they have."""
    there = path.read_text() if path.exists() else ""
    known = {user.lower() for user, _ in _PASSWORD.findall(there)}
    missing = "".join(f'{user.upper()}_PASSWORD: "{secrets.token_hex(24)}"\n' for user in NATS_USERS if user not in known)
    if missing:
        _write(path, there + missing)
    return {user.lower(): password for user, password in _PASSWORD.findall(there + missing)}


def _keep(path: Path, fresh: str) -> str:
    """The text of `path`, which is made from `fresh` if it is not there."""
    if not path.exists():
        _write(path, fresh)
    return path.read_text()


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(path.name + ".new")
    temporary.write_text(text)
    # The servers' images read these as users of their own; each volume is mounted into the one service that it is for.
    temporary.chmod(0o644)
    temporary.replace(path)


if __name__ == "__main__":
    if len(sys.argv) != 2:
        print("usage: python -m thaw.secrets DIRECTORY", file=sys.stderr)
        raise SystemExit(2)
    make_secrets(Path(sys.argv[1]))
