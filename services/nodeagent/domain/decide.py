"""The life of instances on one node: `decide(state, event, now)` returns the next state and the effects, and does nothing itself.

    preparing ──fork, report──► loading ──report──► ready ──stop──► draining ──exit──► stopped
        any ──death, failure report, no progress──► failed
    ready ──suspend──► draining ──► suspended | asleep ──resume──► resuming ──► ready        (parking.py)

An instance gives its bytes back at one place only (`teardown.py`): once its process is proved gone, its memory read back and its weights
released. Until then it holds them, whatever its state says.
"""

from __future__ import annotations

from services.nodeagent.domain import (
    adoption,
    granting,
    process_exit,
    resuming,
    starting,
    stopping,
    suspending,
    teardown,
    termination,
)
from services.nodeagent.domain.events import (
    Adopted,
    Assessed,
    DrainAnswered,
    Effect,
    EngineExited,
    EngineForked,
    EngineReported,
    Event,
    ForkFailed,
    HoldAnswered,
    LoaderHeard,
    Measured,
    MemoryProved,
    ReleaseFailed,
    ResumeCommand,
    Resumed,
    ResumeFailed,
    Shutdown,
    Spilled,
    StartCommand,
    StopCommand,
    SuspendCommand,
    Suspended,
    SuspendFailed,
    Tick,
    WeightsReleased,
)
from services.nodeagent.domain.state import NodeState, Process
from services.nodeagent.domain.transition import Turn


def decide(state: NodeState, event: Event, now: float) -> tuple[NodeState, tuple[Effect, ...]]:
    """What follows from `event` at `now`. Effects are to be performed in order, after the state is taken over."""
    turn = Turn(state, now)
    _dispatch(turn, event)
    granting.settle(turn)
    return turn.state, tuple(turn.effects)


def _dispatch(turn: Turn, event: Event) -> None:
    match event:
        case StartCommand():
            starting.on_start(turn, event)
        case StopCommand():
            stopping.on_stop(turn, event)
        case SuspendCommand() | ResumeCommand() | HoldAnswered() | Suspended() | SuspendFailed() | Resumed() | ResumeFailed():
            _park(turn, event)
        case Spilled():
            suspending.on_spilled(turn, event)
        case Assessed():
            suspending.on_assessed(turn, event)
        case Measured():
            suspending.on_measured(turn, event)
        case EngineForked():
            starting.on_forked(turn, event)
        case ForkFailed():
            starting.on_fork_failed(turn, event)
        case EngineReported():
            starting.on_report(turn, event.report)
        case LoaderHeard():
            starting.on_loader(turn, event)
        case DrainAnswered():
            stopping.on_drain_answer(turn, event)
        case EngineExited():
            process_exit.on_exit(turn, event)
        case MemoryProved():
            teardown.on_memory_proved(turn, event)
        case WeightsReleased():
            teardown.on_released(turn, event)
        case ReleaseFailed():
            teardown.on_release_failed(turn, event)
        case Adopted():
            adoption.on_adopted(turn, event)
        case Shutdown():
            stopping.on_shutdown(turn, event)
        case Tick():
            _on_tick(turn)


_Parking = SuspendCommand | ResumeCommand | HoldAnswered | Suspended | SuspendFailed | Resumed | ResumeFailed


def _park(turn: Turn, event: _Parking) -> None:
    match event:
        case SuspendCommand():
            suspending.on_suspend(turn, event)
        case ResumeCommand():
            resuming.on_resume(turn, event)
        case HoldAnswered():
            suspending.on_hold_answer(turn, event)
        case Suspended():
            suspending.on_suspended(turn, event)
        case SuspendFailed():
            suspending.on_suspend_failed(turn, event)
        case Resumed():
            resuming.on_resumed(turn, event)
        case ResumeFailed():
            resuming.on_resume_failed(turn, event)


def _on_tick(turn: Turn) -> None:
    """Every deadline that is over, by instance: 1. drop, 2. release again, 3. not answering, 4. drain over, 5. kill, 6. no progress."""
    for instance in list(turn.state.instances.values()):
        if instance.ended_at is not None:
            if turn.now - instance.ended_at >= turn.state.policy.keep_ended_s:
                turn.drop(instance.instance_id)
            continue
        if instance.release_at is not None and instance.release_at <= turn.now:
            teardown.release(turn, instance)
            continue
        if instance.adopt_until is not None and instance.adopt_until <= turn.now:
            adoption.on_silence(turn, instance)
        elif instance.drain_until is not None and instance.drain_until <= turn.now:
            stopping.drain_over(turn, instance)
        elif instance.kill_at is not None and instance.kill_at <= turn.now:
            termination.kill(turn, instance)
        elif (
            instance.process is not Process.QUEUED
            and instance.state.starting
            and turn.now - instance.progress_at >= instance.command.card.spec.init_timeout
        ):
            starting.on_no_progress(turn, instance)
