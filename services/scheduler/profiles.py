"""Scheduling profiles by name: Thaw's own, and those that other packages register."""

from __future__ import annotations

from services.scheduler.domain.policies import thaw
from services.scheduler.domain.policies.port import Profile
from shared.errors import InvalidRequest
from shared.policies import policy_names, registered_policies


def profile_named(name: str) -> Profile:
    """Return the profile registered under `name`.

    Raises:
        InvalidRequest: No policy has this name, or its entry point is not a profile.
    """
    if name == thaw.PROFILE.name:
        return thaw.PROFILE
    registered = registered_policies().get(name)
    if registered is None:
        raise InvalidRequest(f"There is no scheduling policy {name!r}; there are {', '.join(policy_names())}")
    profile = registered.load()
    if not isinstance(profile, Profile):
        raise InvalidRequest(f"Scheduling policy {name!r} ({registered.value}) is not a Profile; correct its entry point")
    return profile
