"""Simulate a migrator: rounds at the destination, then the hand-off.

docs/migration.md describes the real migrator.
"""

from __future__ import annotations

from collections.abc import Callable

from services.scheduler.domain.events import Event, MigrationUpdated
from shared.contracts.migration import BEAT_S, MigrationRecord, MigrationRound, MigrationState, MovedRequest
from shared.contracts.node import InstanceState
from simulator.instances import Run
from simulator.mesh.agents import Agents
from simulator.mesh.gateway import Gateway
from simulator.mesh.machine import MeshInstance
from simulator.migrations import ROUNDS
from simulator.world import World


class Migrator:
    def __init__(self, world: World, agents: Agents, gateway: Gateway, post: Callable[[Event], None]) -> None:
        self._world, self._agents, self._gateway, self._post = world, agents, gateway, post

    def start_migration(self, record: MigrationRecord) -> None:
        claimed = record.model_copy(update={"owner": "migrator"})
        self._post(MigrationUpdated(self._world.clock.now, claimed))
        _Migration(self._world, self._agents, self._gateway, self._post, claimed).round()


class _Migration:
    def __init__(
        self, world: World, agents: Agents, gateway: Gateway, post: Callable[[Event], None], record: MigrationRecord
    ) -> None:
        self._world, self._agents, self._gateway, self._post, self._record = world, agents, gateway, post, record
        self._began = world.clock.now
        self._rounds: list[MigrationRound] = []
        self._number = 0
        self._prepared: dict[Run, int] = {}
        self._is_over = False
        world.clock.call_later(BEAT_S, self._beat)

    def _beat(self) -> None:
        """Keep the lease: the scheduler cancels a migration whose owner is silent."""
        if self._is_over:
            return
        self._record = self._record.model_copy(update={"beats": self._record.beats + 1})
        self._post(MigrationUpdated(self._world.clock.now, self._record))
        self._world.clock.call_later(BEAT_S, self._beat)

    def round(self) -> None:
        """Recompute the KV cache of the tokens since the last round.

        Rounds repeat until the remaining tokens cost little more than the shortest round.
        """
        source, destination = self._agents.find(self._record.source_instance), self._agents.find(self._record.instance_id)
        if source is None or destination is None or destination.state is not InstanceState.READY:
            self._end("failed")
            return
        model, service, runs = source.engine.model, destination.engine.service, source.engine.runs
        if not runs:
            self._end("done")
            return
        gaps = {r: r.prompt + source.engine.tokens_of(r) - self._prepared.get(r, 0) for r in runs}
        seconds = max(model.resume_seconds(gap, service) for gap in gaps.values())
        if self._prepared and (seconds <= 2 * model.resume_seconds(0, service) + 0.01 or self._number >= ROUNDS):
            self._hand_over(source, destination)
            return
        self._number += 1
        for run, gap in gaps.items():
            self._prepared[run] = self._prepared.get(run, 0) + gap
            took = model.resume_seconds(gap, service) * 1e3
            self._rounds.append(MigrationRound(request_id=str(run.number), number=self._number, tokens=gap, took_ms=took, gap=0))
        self._world.clock.call_later(seconds, self.round)

    def _hand_over(self, source: MeshInstance, destination: MeshInstance) -> None:
        """Hand the requests over to the destination.

        Requests without a slot at the destination wait at the gateway with their tokens.
        """
        moved, unplaced = [], []
        for run in list(source.engine.runs):
            source.engine.take(run)
            self._world.outcome.migrations += 1
            moved.append(MovedRequest(request_id=str(run.number), outcome="moved", tokens=run.tokens))
            if destination.engine.open:
                run.prepared = self._prepared.get(run, 0)
                destination.engine.admit(run)
                self._agents.on_load_changed(destination)
            else:
                unplaced.append(run)
        self._gateway.requeue(unplaced)
        self._agents.on_emptied(source)
        self._end("done", tuple(moved))

    def _end(self, state: MigrationState, moved: tuple[MovedRequest, ...] = ()) -> None:
        self._is_over = True
        now = self._world.clock.now
        update = {"state": state, "rounds": tuple(self._rounds), "requests": moved, "duration_ms": (now - self._began) * 1e3}
        self._post(MigrationUpdated(now, self._record.model_copy(update=update)))
