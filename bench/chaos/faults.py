"""Draw the faults of a campaign.

They are a pure function of the seed and the number of processes.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass
from typing import Literal

Action = Literal["kill", "stop"]
STOP_S = 15.0
"""How long a stopped process stands still, unless a supervisor replaces it earlier."""
VICTIMS: dict[str, int] = {
    "gateway": 2,
    "scheduler": 2,
    "migrator": 1,
    "nodeagent": 2,
    "loader": 2,
    "zygote": 1,
    "engine": 3,
    "engine host": 1,
    "hosted engine": 1,
    "nats": 1,
    "postgres": 1,
    "supervisor": 1,
}
"""How often each kind of process is struck within a round of `sum(VICTIMS.values())` strikes."""
STOP_SHARE, PAIR_SHARE = 0.12, 0.1


@dataclass(frozen=True)
class Strike:
    """One process is killed (SIGKILL) or stopped (SIGSTOP).

    Attributes:
        victim: Kind of the process.
        pick: Chooses among the processes of this kind; in [0, 1).
    """

    victim: str
    action: Action
    pick: float

    def choose(self, found: int) -> int:
        """The index of the victim among `found` processes of its kind."""
        return min(found - 1, int(self.pick * found))


@dataclass(frozen=True)
class Fault:
    """One strike, or a pair at the same instant."""

    number: int
    strikes: tuple[Strike, ...]

    @property
    def kind(self) -> str:
        return "pair" if len(self.strikes) > 1 else self.strikes[0].action

    def __str__(self) -> str:
        return " + ".join(f"{s.action} {s.victim}" for s in self.strikes)


def plan(kills: int, seed: int, victims: dict[str, int] = VICTIMS) -> tuple[Fault, ...]:
    """Faults that strike `kills` processes in all.

    Every kind of process is struck in proportion to its count in `victims`.
    """
    random_ = random.Random(seed)
    deck: list[str] = []
    faults: list[Fault] = []
    left = kills
    while left:
        drawn = random_.random()
        if drawn < PAIR_SHARE and left >= 2:
            names = _draw(random_, deck, victims, 2)
            strikes = tuple(Strike(name, "kill", random_.random()) for name in names)
        else:
            action: Action = "stop" if drawn > 1 - STOP_SHARE else "kill"
            strikes = (Strike(_draw(random_, deck, victims, 1)[0], action, random_.random()),)
        faults.append(Fault(len(faults) + 1, strikes))
        left -= len(strikes)
    return tuple(faults)


def count(faults: tuple[Fault, ...]) -> Counter[str]:
    """Strikes by victim."""
    return Counter(s.victim for f in faults for s in f.strikes)


def _draw(random_: random.Random, deck: list[str], victims: dict[str, int], wanted: int) -> list[str]:
    """Take `wanted` different kinds from the deck.

    The deck is shuffled again when it is empty.
    """
    drawn: list[str] = []
    while len(drawn) < wanted:
        at = next((i for i in reversed(range(len(deck))) if deck[i] not in drawn), None)
        if at is None:
            deck[:0] = random_.sample(dealt := [v for v, n in victims.items() for _ in range(n)], len(dealt))
            continue
        drawn.append(deck.pop(at))
    return drawn
