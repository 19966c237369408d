"""Bodies of the admin API's simulations: the latest requests of the mesh under another policy."""

from __future__ import annotations

from typing import Any

from pydantic import Field

from shared.contracts.base import Frozen
from shared.policies import DEFAULT_POLICY

MAX_REPLAYED = 2_000
"""Requests that a gateway replays at most, the latest ones."""
MAX_STARTS = 200
"""Latest starts whose phases are read; more do not change the means."""


class StartSimulation(Frozen):
    """Replay recorded requests with each policy, and again with each policy without a node.

    Attributes:
        policies: Names of policies, as of `thaw simulate --policy`.
        without: Name of the node that is left out; None: the nodes as they are.
        last_s: Requests that were received in so many seconds until now.
    """

    policies: tuple[str, ...] = Field(default=(DEFAULT_POLICY,), min_length=1, max_length=3)
    without: str | None = Field(default=None, max_length=200)
    last_s: int = Field(default=3600, ge=60, le=24 * 3600)


class SimulationOptions(Frozen):
    """The options of a simulation.

    Attributes:
        installed: The gateway has the simulator.
        policy: The mesh's policy; None: the scheduler does not report it.
    """

    installed: bool
    policies: tuple[str, ...]
    policy: str | None
    nodes: tuple[str, ...]


class SimulationProgress(Frozen):
    """Simulations that have ended, of all."""

    done: int
    of: int


class SimulationResult(Frozen):
    """Figures of the recorded requests and of their simulations.

    Attributes:
        recorded: Requests, cold ones, and times to the first token in seconds.
        runs: For each policy, and for each without the node, what `thaw simulate --json` has.
        command: The command line that simulates the same.
    """

    recorded: dict[str, Any]
    runs: tuple[dict[str, Any], ...]
    command: str
