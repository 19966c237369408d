"""Fair shares of the keys whose requests wait for one model.

Start-time fair queueing (Goyal, Vin, Cheng: Start-time Fair Queueing, SIGCOMM 1996, §2): a request
gets a start tag, the larger of the virtual time and the finish tag of the key's request before it;
its finish tag adds its cost. Requests are served in order of start tags, and the virtual time is
the tag of the last one served. Keys that wait all the time get equal shares of the cost, up to one
request each; a key that is alone gets everything, in order of arrival. A key's weight
divides the costs of its requests, so that shares are in proportion to weights.

If the queue is full, the key with the most waiting requests loses its last one (longest queue drop;
Suter et al., INFOCOM 1998): a key that floods gets the refusals itself.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(slots=True)
class VirtualClock:
    """Tags of the waiting requests of one model.

    Attributes:
        time: Start tag of the last request that was served.
    """

    time: float = 0.0
    _finish_tags: dict[str, float] = field(default_factory=dict)

    def tag(self, key: str, cost: float) -> float:
        """Return the start tag of a new request.

        Args:
            key: Name of the API key.
            cost: Its size, in any unit that is the same for all requests; more than 0.
        """
        start = max(self.time, self._finish_tags.get(key, 0.0))
        self._finish_tags[key] = start + cost
        return start

    def advance(self, start_tag: float) -> None:
        """A request was served. Keys that have had their share are forgotten."""
        if start_tag > self.time:
            self.time = start_tag
            self._finish_tags = {key: tag for key, tag in self._finish_tags.items() if tag > start_tag}

    def withdraw(self, key: str, start_tag: float, cost: float) -> None:
        """A request left without service; if it was its key's last one, its share is given back."""
        if self._finish_tags.get(key) == start_tag + cost:
            self._finish_tags[key] = start_tag


@dataclass(slots=True)
class PriorityClass:
    """The waiting requests of one priority: their tags, and how many each key has."""

    clock: VirtualClock = field(default_factory=VirtualClock)
    waiting: Counter[str] = field(default_factory=Counter)

    def remove(self, key: str) -> None:
        self.waiting[key] -= 1
        if not self.waiting[key]:
            del self.waiting[key]


def choose_dropped(waiting: Mapping[str, int], key: str) -> str:
    """Return the key that loses a request when one of `key` meets a full queue.

    Args:
        waiting: Waiting requests by key.
        key: The key of the new request, which is refused itself if no other key has more.
    """
    longest = max(waiting, key=lambda name: (waiting[name], name), default=key)
    return longest if waiting.get(longest, 0) > waiting.get(key, 0) + 1 else key
