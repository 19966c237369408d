"""Define the names of scheduling policies.

They are the values of `scheduler.policy`, THAW_POLICY and `thaw simulate --policy`.

A package registers a policy with an entry point in the group `thaw.policies`, whose value is a
`Profile`. The `simulator` package registers the papers' policies this way, so the scheduler never
imports it.
"""

from __future__ import annotations

from importlib.metadata import EntryPoint, entry_points

ENTRY_POINTS = "thaw.policies"
DEFAULT_POLICY = "thaw"


def registered_policies() -> dict[str, EntryPoint]:
    """Return the registered policies by name, without importing them."""
    return {e.name: e for e in entry_points(group=ENTRY_POINTS)}


def policy_names() -> tuple[str, ...]:
    """Return every name that may be configured, the default first."""
    return (DEFAULT_POLICY, *sorted(registered_policies().keys() - {DEFAULT_POLICY}))
