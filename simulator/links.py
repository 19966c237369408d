"""Simulate shared links: max-min fair, or one load after the other.

Background loads get the remaining bandwidth.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from math import inf

from simulator.clock import Clock, Timer

_EPSILON = 1e-3
"""A flow with fewer remaining bytes has ended: rounding errors leave some."""


class Link:
    """A link.

    Attributes:
        carried: Bytes that have passed.
    """

    __slots__ = ("bandwidth", "carried", "flows", "name", "sequential")

    def __init__(self, name: str, bandwidth: float, sequential: bool = False) -> None:
        self.name, self.bandwidth, self.sequential = name, bandwidth, sequential
        self.flows: dict[Flow, None] = {}
        self.carried = 0.0


class Flow:
    """A transfer over all links of `path`.

    Attributes:
        left: Bytes that have not arrived.
    """

    __slots__ = ("background", "done", "left", "nbytes", "path", "rate")

    def __init__(self, path: tuple[Link, ...], nbytes: float, done: Callable[[], None], background: bool) -> None:
        self.path, self.nbytes, self.left, self.done, self.background = path, nbytes, nbytes, done, background
        self.rate = 0.0


class Network:
    """The links of one node. A flow has the same rate on all links of its path."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self.flows: dict[Flow, None] = {}
        self._since = 0.0
        self._next: Timer | None = None

    def start(self, path: tuple[Link, ...], nbytes: float, done: Callable[[], None], background: bool = False) -> Flow:
        """Transfer bytes.

        Args:
            path: The links that they cross.
            nbytes: Their number.
            done: Called when the last one has arrived.
            background: Leave the bandwidth to other flows where these need it.
        """
        self._advance()
        flow = Flow(path, nbytes, done, background)
        self.flows[flow] = None
        for link in path:
            link.flows[flow] = None
        self._share()
        return flow

    def cancel(self, flow: Flow) -> None:
        if flow in self.flows:
            self._advance()
            self._remove(flow)
            self._share()

    def estimate_seconds(self, path: Iterable[Link], nbytes: float) -> float:
        """Return q + n/b for one more flow, in seconds.

        q is queued on sequential links, b is the least share of the others.
        """
        self._advance()
        queued, rate = 0.0, inf
        for link in path:
            earlier = [f for f in link.flows if not f.background]
            if link.sequential:
                queued = max(queued, sum(f.left for f in earlier) / link.bandwidth)
                rate = min(rate, link.bandwidth)
            else:
                rate = min(rate, link.bandwidth / (len(earlier) + 1))
        return queued + (nbytes / rate if rate < inf else 0.0)

    def _remove(self, flow: Flow) -> None:
        del self.flows[flow]
        for link in flow.path:
            del link.flows[flow]

    def _advance(self) -> None:
        now = self._clock.now
        seconds, self._since = now - self._since, now
        if seconds > 0:
            for flow in self.flows:
                moved = min(flow.left, flow.rate * seconds)
                flow.left -= moved
                for link in flow.path:
                    link.carried += moved

    def _share(self) -> None:
        if self._next is not None:
            self._next.cancel()
            self._next = None
        if not self.flows:
            return
        free: dict[Link, float] = {}
        for flow in self.flows:
            flow.rate = 0.0
        for background in (False, True):
            self._fill([f for f in self.flows if f.background is background and _is_admitted(f)], free)
        soonest = min((f.left / f.rate if f.rate < inf else 0.0) for f in self.flows if f.rate > 0 or not f.path)
        self._next = self._clock.call_later(max(soonest, 0.0), self._on_due)

    @staticmethod
    def _fill(flows: list[Flow], free: dict[Link, float]) -> None:
        """Fill progressively: the link with the least share fixes its flows' rate.

        Then the next link follows.
        """
        counts: dict[Link, int] = {}
        for flow in flows:
            flow.rate = inf
            for link in flow.path:
                counts[link] = counts.get(link, 0) + 1
                free.setdefault(link, link.bandwidth)
        open_flows = [f for f in flows if f.path]
        while open_flows:
            tightest = min((k for k, n in counts.items() if n), key=lambda k: free[k] / counts[k])
            share = free[tightest] / counts[tightest]
            rest = []
            for flow in open_flows:
                if tightest not in flow.path:
                    rest.append(flow)
                    continue
                flow.rate = share
                for link in flow.path:
                    free[link] = max(0.0, free[link] - share)
                    counts[link] -= 1
            open_flows = rest

    def _on_due(self) -> None:
        self._next = None
        self._advance()
        # A flow counts as ended if the rest takes less than the resolution of the clock, a float:
        # otherwise its timer would not advance the time, and would fire for ever.
        ended = [f for f in self.flows if f.left <= max(_EPSILON, f.rate * 1e-9 * max(1.0, self._clock.now)) or f.rate == inf]
        for flow in ended:
            for link in flow.path:
                link.carried += flow.left
            flow.left = 0.0
            self._remove(flow)
        self._share()
        for flow in ended:
            flow.done()


def _is_admitted(flow: Flow) -> bool:
    """True if the flow is the first on its sequential links.

    Background flows are last.
    """
    for link in flow.path:
        if link.sequential:
            first = next((f for f in link.flows if not f.background), None) or next(iter(link.flows))
            if first is not flow:
                return False
    return True
