"""Random credentials for a containerised mesh, made once: `python -m thaw.secrets DIRECTORY`.

    nats_passwords.conf                     passwords of the NATS users, included by compose/nats.conf
    postgres_password                       of the database's owner
    gateway/, scheduler/, node/             a THAW_SECRETS_DIR for each service, with just what it needs

Files that are there already are kept, so that a second start finds the credentials of the first.
"""

from __future__ import annotations

import re
import secrets
import sys
from pathlib import Path

NATS_USERS = ("gateway", "scheduler", "node")
_PASSWORD = re.compile(r'^(\w+)_PASSWORD: "([^"]+)"$', re.MULTILINE)


def make_secrets(directory: Path, *, nats: str = "nats:4222", postgres: str = "postgres:5432") -> None:
    """Fill `directory`. `nats` and `postgres` are host:port as the services see them."""
    database_password = _keep(directory / "postgres_password", secrets.token_hex(24))
    fresh = "".join(f'{user.upper()}_PASSWORD: "{secrets.token_hex(24)}"\n' for user in NATS_USERS)
    passwords = {user.lower(): password for user, password in _PASSWORD.findall(_keep(directory / "nats_passwords.conf", fresh))}
    for user in NATS_USERS:
        _keep(directory / user / "thaw_nats_url", f"nats://{user}:{passwords[user]}@{nats}")
    _keep(directory / "scheduler" / "thaw_database_url", f"postgresql+asyncpg://thaw:{database_password}@{postgres}/thaw")
    _keep(directory / "gateway" / "thaw_admin_key", f"thaw-admin-{secrets.token_urlsafe(24)}")


def _keep(path: Path, fresh: str) -> str:
    """The text of `path`, which is made from `fresh` if it is not there."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if not path.exists():
        temporary = path.with_name(path.name + ".new")
        temporary.write_text(fresh)
        # The servers' images read these as users of their own; the volume is mounted into our containers only.
        temporary.chmod(0o644)
        temporary.replace(path)
    return path.read_text()


if __name__ == "__main__":
    if len(sys.argv) != 2:
        print("usage: python -m thaw.secrets DIRECTORY", file=sys.stderr)
        raise SystemExit(2)
    make_secrets(Path(sys.argv[1]))
