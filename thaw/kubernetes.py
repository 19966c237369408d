"""Make the Secrets of a mesh on Kubernetes.

`python -m thaw.kubernetes DIRECTORY NODE… | kubectl apply -f -` keeps all credentials in
DIRECTORY (`thaw.secrets`), so that a later run with other nodes changes only theirs, and prints a
Secret for each pod of deploy/kubernetes and of the chart deploy/helm/thaw:

    thaw-nats        authorization.conf: users and permissions
    thaw-postgres    password of the database's owner
    thaw-gateway, thaw-scheduler, thaw-migrator
                     what the service reads from THAW_SECRETS_DIR
    thaw-nodes       for each Kubernetes node NODE.thaw_node, its name in the mesh, and
                     NODE.thaw_nats_url, the URL of its own NATS user
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from thaw.secrets import SERVICES, make_secrets

NAMESPACE = "thaw"


def mesh_name(node: str) -> str:
    """Return the name in the mesh of a Kubernetes node, whose name may have dots."""
    return node.replace(".", "-")


def secrets(
    directory: Path,
    nodes: Sequence[str],
    *,
    nats: str = "nats:4222",
    postgres: str = "postgres:5432",
    peers: bool = False,
    namespace: str = NAMESPACE,
) -> list[dict[str, Any]]:
    """Return the Secrets of a mesh, whose credentials are kept in `directory`.

    Args:
        nodes: Names of the Kubernetes nodes that run a loader and a nodeagent.
        nats: host:port of NATS as the pods see it.
        postgres: host:port of PostgreSQL as the pods see it.
        peers: True if nodes may copy models from each other.
        namespace: Namespace of the Secrets.

    Raises:
        OSError: `directory` cannot be written.
        ValueError: A node's name is not valid, two have the same name in the mesh, or other users
            may read the directory.
    """
    names = {node: mesh_name(node) for node in nodes}
    for name in names.values():
        if len(same := [node for node in names if names[node] == name]) > 1:
            raise ValueError(f"The nodes {' and '.join(same)} would both be {name} in the mesh")
    folders = {f"nodes/{node}": name for node, name in names.items()}
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    if directory.stat().st_mode & 0o077:  # the files in it are readable
        raise ValueError(f"Other users may read {directory}, where the credentials are kept: chmod 0700 {directory}")
    make_secrets(directory, folders, peers=peers, nats=nats, postgres=postgres)
    files = {
        "nats": {"authorization.conf": directory / "nats" / "authorization.conf"},
        "postgres": {"password": directory / "postgres" / "password"},
        **{service: {file.name: file for file in (directory / service).iterdir()} for service in SERVICES},
        "nodes": {f"{node}.thaw_nats_url": directory / "nodes" / node / "thaw_nats_url" for node in nodes},
    }
    contents = {name: {key: file.read_text() for key, file in sorted(of.items())} for name, of in files.items()}
    contents["nodes"] |= {f"{node}.thaw_node": name for node, name in names.items()}
    return [
        {
            "apiVersion": "v1",
            "kind": "Secret",
            "metadata": {"name": f"thaw-{name}", "namespace": namespace},
            "stringData": content,
        }
        for name, content in contents.items()
    ]


def _main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m thaw.kubernetes", description="Make the Secrets of a mesh on Kubernetes.")
    parser.add_argument("directory", type=Path, help="where the credentials are kept; only you can read it")
    parser.add_argument("nodes", nargs="+", metavar="NODE", help="a Kubernetes node that runs a loader and a nodeagent")
    parser.add_argument("--nats", default="nats:4222", metavar="HOST:PORT", help="NATS as the pods see it")
    parser.add_argument("--postgres", default="postgres:5432", metavar="HOST:PORT", help="PostgreSQL as the pods see it")
    parser.add_argument("--peers", action="store_true", help="nodes may copy models from each other (THAW_PEERS=true)")
    parser.add_argument("--namespace", default=NAMESPACE, metavar="NAME", help="namespace of the Secrets (default: thaw)")
    given = parser.parse_args(arguments)
    try:
        made = secrets(
            given.directory,
            given.nodes,
            nats=given.nats,
            postgres=given.postgres,
            peers=given.peers,
            namespace=given.namespace,
        )
    except (OSError, ValueError) as e:
        parser.error(str(e))
    yaml.safe_dump_all(made, sys.stdout, sort_keys=False)


if __name__ == "__main__":
    _main()
