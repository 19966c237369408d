"""Fair shares of the keys whose requests wait for one model.

Start-time fair queueing (Goyal, Vin, Cheng: Start-time Fair Queueing, SIGCOMM 1996, §2): a request
gets a start tag, the larger of the virtual time and the finish tag of the key's request before it;
its finish tag adds its cost. Requests are served in order of start tags, and the virtual time is
the tag of the last one served. Keys that wait all the time get equal shares of the cost, up to one
request each; a key that is alone gets everything, in order of arrival. A key's weight
divides the costs of its requests, so that shares are in proportion to weights.

Instances take a bounded number of requests at once. A key with less than its share of that number
may exceed it (`is_below_share`): the engine gives its slots to the keys by fair shares as well.

If the queue is full, the key with the most waiting requests loses its last one (longest queue drop;
Suter et al., INFOCOM 1998): a key that floods gets the refusals itself.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache


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


@lru_cache(maxsize=4096)
def flow_of(key: str) -> str:
    """Return the id by which engines know the requests of a key; empty without a key.

    It is the same in all gateways, and hides the key's name. It is no secret: a name that is
    guessed can be confirmed.
    """
    return hashlib.sha256(b"thaw flow\0" + key.encode()).hexdigest()[:16] if key else ""


def is_below_share(key: str, in_flight: Mapping[str, int], weights: Mapping[str, float], limit: int) -> bool:
    """True if instances have less than the share of `key` of the requests that they take at once.

    Each key may have one request there in any case.

    Args:
        key: Name of the API key.
        in_flight: Requests that instances have, by key.
        weights: Weights of the keys that have requests, waiting ones included.
        limit: Requests that the instances take at once.
    """
    return in_flight.get(key, 0) < max(1.0, limit * weights[key] / sum(weights.values()))


def choose_dropped(waiting: Mapping[str, int], key: str) -> str:
    """Return the key that loses a request when one of `key` meets a full queue.

    Args:
        waiting: Waiting requests by key.
        key: The key of the new request, which is refused itself if no other key has more.
    """
    longest = max(waiting, key=lambda name: (waiting[name], name), default=key)
    return longest if waiting.get(longest, 0) > waiting.get(key, 0) + 1 else key
