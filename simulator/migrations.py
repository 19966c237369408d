"""Simulate migration of requests as tokens (ServerlessLLM §5.3).

The destination recomputes in rounds.
"""

from __future__ import annotations

from collections.abc import Callable

from simulator.instances import Instance, Run, SimDevice
from simulator.starts import Start, Starts
from simulator.world import World

ROUNDS = 5
"""Rounds at most: then the source stops, whatever is left."""


class Migration:
    def __init__(self, source: Instance, destination: Instance) -> None:
        self.source, self.destination = source, destination
        self.rounds = 0
        self.prepared: dict[Run, int] = {}
        self.over = False


class Migrations:
    def __init__(
        self,
        world: World,
        starts: Starts,
        start_at: Callable[[Instance, SimDevice, Callable[[Instance], None]], Start | None],
        leave: Callable[[Instance], None],
        idle: Callable[[Instance], None],
        grant: Callable[[Instance, Run], bool],
        requeue: Callable[[list[Run]], None],
    ) -> None:
        self._world, self._starts, self._start_at, self._leave, self._idle = world, starts, start_at, leave, idle
        self._grant, self._requeue = grant, requeue
        self._under_way: dict[str, Migration] = {}

    def concerns(self, instance: Instance) -> bool:
        return any(instance in (m.source, m.destination) for m in self._under_way.values())

    def begin(self, source: Instance, device: SimDevice) -> None:
        """Load the model at the destination, then migrate.

        Without room there the source finishes its requests.
        """
        there = next((i for i in device.instances.values() if i.model is source.model and i.open), None)
        if there is not None:
            migration = Migration(source, there)
            self._under_way[source.key] = migration
            self._mark_moving(source, there)
            self._round(migration)
            return
        start = self._start_at(source, device, lambda destination: self._on_loaded(source, destination))
        if start is None:
            self._mark_moving(source)
            return
        self._under_way[source.key] = Migration(source, start.instance)
        self._mark_moving(source, start.instance)
        self._starts.begin(start)

    def _on_loaded(self, source: Instance, destination: Instance) -> None:
        if (migration := self._under_way.get(source.key)) is not None:
            self._round(migration)
        else:  # the source was lost meanwhile: its requests wait
            self._idle(destination)

    def _mark_moving(self, *instances: Instance) -> None:
        for instance in instances:
            instance.moving = True
            for part in instance.parts:
                self._world.touch(part.device)

    def _round(self, migration: Migration) -> None:
        """Recompute the KV cache of the tokens since the last round.

        Rounds repeat until what is left costs little more than the least duration of a round.
        """
        if migration.over:
            return
        source, model, service = migration.source, migration.source.model, migration.destination.service
        if not source.runs:
            self._finish(migration)
            return
        gaps = {r: r.prompt + source.tokens_of(r) - migration.prepared.get(r, 0) for r in source.runs}
        seconds = max(model.resume_seconds(gap, service) for gap in gaps.values())
        least = model.resume_seconds(0, service)
        first = not migration.prepared
        if not first and (seconds <= 2 * least + 0.01 or migration.rounds >= ROUNDS):
            self._hand_over(migration)
            return
        migration.rounds += 1
        for run, gap in gaps.items():
            migration.prepared[run] = migration.prepared.get(run, 0) + gap
        self._world.clock.call_later(seconds, lambda: self._round(migration))

    def _hand_over(self, migration: Migration) -> None:
        source, destination = migration.source, migration.destination
        destination.moving = False
        homeless = []
        for run in list(source.runs):
            source.take(run)
            self._world.outcome.migrations += 1
            if self._grant(destination, run):
                run.prepared = migration.prepared.get(run, 0)
                destination.admit(run)
            else:
                homeless.append(run)
        self._finish(migration)
        if homeless:  # no memory for its KV cache there: the request waits with its tokens
            self._requeue(homeless)

    def _finish(self, migration: Migration) -> None:
        """Stop the source; a destination without requests is idle."""
        migration.over = True
        del self._under_way[migration.source.key]
        destination = migration.destination
        destination.moving = False
        for part in destination.parts:
            self._world.touch(part.device)
        if migration.source.state == "ready":
            self._leave(migration.source)
        if destination.state == "ready" and not destination.runs:
            self._idle(destination)

    def on_lost(self, instance: Instance) -> None:
        """Handle the loss of the source or destination with its node."""
        for migration in list(self._under_way.values()):
            if instance is migration.source:
                other = migration.destination
                other.moving = False
            elif instance is migration.destination:
                other = migration.source
            else:
                continue
            migration.over = True
            del self._under_way[migration.source.key]
            for part in other.parts:
                self._world.touch(part.device)
            if other.state == "ready" and not other.runs:
                (self._idle if other is migration.destination else self._leave)(other)
