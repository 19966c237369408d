"""Make credentials: `python -m thaw.secrets DIRECTORY --node FOLDER=NAME …`.

The credentials are random, for a mesh in containers.

    nats/passwords.conf            passwords of all NATS users; kept from run to run
    nats/authorization.conf        users and permissions, included by compose/nats.conf; written by
                                   every run
    nats/nodes/NAME/               credentials of a node on another host (--remote-nodes), for the
                                   operator to copy
    postgres/password              password of the database's owner
    gateway/, scheduler/, migrator/, FOLDER/
                                   a THAW_SECRETS_DIR for each service and each node, with just what
                                   it needs

Existing passwords are kept, so a second start uses the credentials of the first. Each directory can
be a volume of its own: files that are derived from a password are written again if they are missing
or differ.
"""

from __future__ import annotations

import argparse
import re
import secrets
from collections.abc import Iterable, Mapping
from pathlib import Path

from shared.contracts import subjects
from shared.private import write_durably

SERVICES = ("gateway", "scheduler", "migrator")
PERMISSIONS = Path(__file__).with_name("permissions.conf")
_PASSWORD = re.compile(r'^([\w-]+)_PASSWORD: "([^"]+)"$', re.MULTILINE)
_NODE_NAME = re.compile(r"[a-z0-9][a-z0-9-]{0,62}")
_NODE_SECTION = "# --- a node ---\n"


def node_user(node: str) -> str:
    """Return the NATS user of a node."""
    return f"node-{node}"


def make_secrets(
    directory: Path,
    nodes: Mapping[str, str],
    *,
    remote_nodes: Iterable[str] = (),
    peers: bool = False,
    nats: str = "nats:4222",
    postgres: str = "postgres:5432",
) -> None:
    """Write the credentials of all services into `directory`.

    Args:
        nodes: Names of nodes by the folder that their credentials are written to.
        remote_nodes: Names of nodes on other hosts; their credentials are written below nats/nodes.
        peers: True if a node may hear the loaders of other nodes, to copy models from them.
        nats: host:port of NATS as the services see it.
        postgres: host:port of PostgreSQL as the services see it.

    Raises:
        OSError: `directory` cannot be written.
        ValueError: A node's name is not valid.
    """
    folders = {f"nats/nodes/{name}": name for name in remote_nodes} | dict(nodes)
    for name in folders.values():
        if not _NODE_NAME.fullmatch(name):
            raise ValueError(f"{name!r} is not a node's name: up to 63 lower-case letters, digits and dashes, no dash first")
    names = sorted(set(folders.values()))
    database_password = _keep(directory / "postgres" / "password", secrets.token_hex(24))
    passwords = _passwords(directory / "nats" / "passwords.conf", (*SERVICES, *map(node_user, names)))
    users = {service: service for service in SERVICES} | {folder: node_user(name) for folder, name in folders.items()}
    for folder, user in users.items():
        _write(directory / folder / "thaw_nats_url", f"nats://{user}:{passwords[user]}@{nats}")
    _write(directory / "nats" / "authorization.conf", authorization(passwords, names, peers=peers))
    _write(directory / "scheduler" / "thaw_database_url", f"postgresql+asyncpg://thaw:{database_password}@{postgres}/thaw")
    _keep(directory / "gateway" / "thaw_admin_key", f"thaw-admin-{secrets.token_urlsafe(24)}")


def authorization(passwords: Mapping[str, str], nodes: Iterable[str], *, peers: bool = False) -> str:
    """Return the body of nats-server's `authorization` block.

    It has a user for each service and each node.

    Args:
        passwords: By user, for `SERVICES` and the users of `nodes`.
        nodes: Names of nodes.
        peers: True if nodes may receive the messages of other nodes' loaders.
    """
    services, _, template = PERMISSIONS.read_text().partition(_NODE_SECTION)
    parts, users = [services], {service: service.upper() for service in SERVICES}
    for number, node in enumerate(nodes):
        users[node_user(node)] = f"NODE_{number}"
        values = {
            "number": str(number),
            "node": node,
            "token": subjects.token(node),
            "peers": "*" if peers else subjects.token(node),
        }
        parts.append(re.sub(r"@(\w+)@", lambda found, values=values: values[found[1]], template))  # type: ignore[misc]
    listed = "".join(
        f'  {{user: "{user}", password: "{passwords[user]}", permissions: ${permissions}}}\n' for user, permissions in users.items()
    )
    return "".join(parts) + f"users: [\n{listed}]\n"


def _passwords(path: Path, users: tuple[str, ...]) -> dict[str, str]:
    """Return passwords by user.

    Users of a newer version, or of a new node, get new passwords; existing passwords are kept.
    """
    there = path.read_text() if path.exists() else ""
    known = {user.lower() for user, _ in _PASSWORD.findall(there)}
    missing = "".join(f'{user.upper()}_PASSWORD: "{secrets.token_hex(24)}"\n' for user in users if user not in known)
    if missing:
        _write(path, there + missing)
    return {user.lower(): password for user, password in _PASSWORD.findall(there + missing)}


def _keep(path: Path, fresh: str) -> str:
    """The text of `path`, which is made from `fresh` if it is not there."""
    if not path.exists():
        _write(path, fresh)
    return path.read_text()


def _write(path: Path, text: str) -> None:
    """Write a file that survives a power cut: a database keeps the password of its first start."""
    path.parent.mkdir(parents=True, exist_ok=True)
    # The servers' images read these as users of their own; each volume is mounted into the one
    # service that it is for.
    write_durably(path, text.encode(), mode=0o644)


def _main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m thaw.secrets", description="Make the credentials of a containerised mesh.")
    parser.add_argument("directory", type=Path)
    parser.add_argument("--node", action="append", default=[], metavar="FOLDER=NAME", help="a node of this host")
    parser.add_argument("--remote-nodes", default="", metavar="NAME,…", help="nodes of other hosts")
    parser.add_argument("--peers", choices=["true", "false"], default="false", help="whether nodes copy models from each other")
    given = parser.parse_args(arguments)
    nodes = {folder: name for folder, _, name in (node.partition("=") for node in given.node)}
    remote = [name.strip() for name in given.remote_nodes.split(",") if name.strip()]
    try:
        make_secrets(given.directory, nodes, remote_nodes=remote, peers=given.peers == "true")
    except ValueError as e:
        parser.error(str(e))


if __name__ == "__main__":
    _main()
