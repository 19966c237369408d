"""The environment that engines inherit from a node: everything but credentials."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

REFERENCE = re.compile(r"\$\{(\w+)\}")
"""`${NAME}` in a model's `env`: the node's own variable of that name."""
_CLOUDS = ("AWS_", "AZURE_", "GOOGLE_", "GCLOUD_", "GCP_", "CLOUDSDK_", "BOTO_", "VAULT_", "DOCKER_", "NATS_")
_NAMES = frozenset({"KUBECONFIG", "NETRC", "PGPASSFILE", "PGSERVICEFILE", "GIT_ASKPASS", "SSH_ASKPASS", "THAW_DATABASE_URL"})
_WORDS = re.compile(
    r"(^|_)(TOKENS?|PASS|PASSPHRASE|CREDENTIALS?|(API|ACCESS|PRIVATE)?KEYS?|AUTH|AUTHORIZATION|COOKIES?)(_|$)|PASSWORD|PASSWD|SECRET"
)
_URL_WITH_PASSWORD = re.compile(r"\w://[^/\s@]*:[^/\s@]+@")


def is_credential(name: str, value: str) -> bool:
    """True if the variable may hold a credential.

    That is a variable named like a credential, a variable of a cloud's client, or a URL with a
    password.
    """
    upper = name.upper()
    return (
        upper in _NAMES
        or upper.startswith(_CLOUDS)
        or _WORDS.search(upper) is not None
        or _URL_WITH_PASSWORD.search(value) is not None
    )


def without_credentials(environment: Mapping[str, str], keep: Iterable[str] = ()) -> dict[str, str]:
    """A copy of `environment` without credentials.

    Args:
        environment: Usually `os.environ`.
        keep: Names that stay whatever they hold.
    """
    kept = frozenset(keep)
    return {k: v for k, v in environment.items() if k in kept or not is_credential(k, v)}


def find_referenced(env: Mapping[str, str]) -> frozenset[str]:
    """Return the node's variables that a model's `env` references as `${NAME}`.

    Thaw's own variables are not given away.
    """
    return frozenset(n for text in env.values() for n in REFERENCE.findall(text) if not n.startswith("THAW_"))
