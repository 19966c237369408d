"""The gateways of the mesh, and which of them owns a key (rendezvous hashing).

Thaler, Ravishankar: A Name-Based Mapping Scheme for Rendezvous (1996). When a gateway appears or
goes, only the keys that it gets or had change their owner.
"""

from __future__ import annotations

from hashlib import blake2b

SILENT_S = 3.5
"""A gateway that was silent for so long is gone."""


class Members:
    """The gateways that announced themselves lately; this one is always a member."""

    def __init__(self, own: str) -> None:
        self._own = own
        self._seen: dict[str, float] = {}
        self._owners: dict[str, str] = {}

    def on_presence(self, gateway: str, now: float) -> bool:
        """Note a gateway; return whether it is new."""
        if gateway == self._own:
            return False
        is_new = gateway not in self._seen
        self._seen[gateway] = now
        if is_new:
            self._owners.clear()
        return is_new

    def remove(self, gateway: str) -> None:
        if self._seen.pop(gateway, None) is not None:
            self._owners.clear()

    def touch(self, now: float) -> None:
        """None is silent yet: announcements begin, or those of the last seconds were not read."""
        self._seen = dict.fromkeys(self._seen, now)

    def has_silent(self, now: float) -> bool:
        """True if `expire` may find a silent gateway."""
        return any(now - seen_at > SILENT_S for seen_at in self._seen.values())

    def expire(self, now: float, connected_since: float) -> None:
        """Remove silent gateways.

        Args:
            now: Monotonic seconds.
            connected_since: Time since which announcements can arrive here.
        """
        for gateway in [g for g, seen_at in self._seen.items() if now - max(seen_at, connected_since) > SILENT_S]:
            self.remove(gateway)

    def owner(self, key: str) -> str:
        """Return the gateway that owns a key."""
        found = self._owners.get(key)
        if found is None:
            found = self._owners[key] = max((self._own, *self._seen), key=lambda g: (_weight(g, key), g))
        return found

    def __len__(self) -> int:
        return 1 + len(self._seen)


def _weight(gateway: str, key: str) -> bytes:
    return blake2b(f"{gateway}\0{key}".encode(), digest_size=8).digest()
