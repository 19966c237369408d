"""The lifecycle of instances: `decide(state, event, now)`.

It returns the next state and the effects.

    preparing ──fork, report──► loading ──report──► ready ──stop──► draining ──exit──► stopped
        any ──exit, failure report, no progress──► failed
    ready ──suspend──► draining ──► suspended | asleep ──resume──► resuming ──► ready
                             (suspending.py)

An instance's bytes are freed at one place only (`teardown.py`): after its process has exited, its
memory is verified free and its weights are released. Until then it holds them in every state.
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
    templates,
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
    LoaderReported,
    Measured,
    MemoryFreed,
    NatsProbed,
    PauseAnswered,
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
    TakeFailed,
    Tick,
    WeightsReleased,
)
from services.nodeagent.domain.state import NodeState, forget_at
from services.nodeagent.domain.transition import Transition


def decide(state: NodeState, event: Event, now: float) -> tuple[NodeState, tuple[Effect, ...]]:
    """The next state and effects.

    Effects are performed in order, after the state is replaced.
    """
    transition = Transition(state, now)
    _dispatch(transition, event)
    granting.settle(transition)
    return transition.state, tuple(transition.effects)


def _dispatch(transition: Transition, event: Event) -> None:
    match event:
        case StartCommand():
            starting.on_start(transition, event)
        case StopCommand():
            stopping.on_stop(transition, event)
        case SuspendCommand() | ResumeCommand() | PauseAnswered() | Suspended() | SuspendFailed() | Resumed() | ResumeFailed():
            _park(transition, event)
        case Spilled():
            suspending.on_spilled(transition, event)
        case Assessed():
            suspending.on_assessed(transition, event)
        case Measured():
            suspending.on_measured(transition, event)
        case EngineForked():
            starting.on_forked(transition, event)
        case ForkFailed():
            starting.on_fork_failed(transition, event)
        case TakeFailed():
            templates.on_take_failed(transition, event)
        case EngineReported():
            starting.on_report(transition, event.report)
        case LoaderReported():
            starting.on_loader(transition, event)
        case DrainAnswered():
            stopping.on_drain_answered(transition, event)
        case EngineExited():
            process_exit.on_exit(transition, event)
        case MemoryFreed():
            teardown.on_memory_freed(transition, event)
        case WeightsReleased():
            teardown.on_released(transition, event)
        case ReleaseFailed():
            teardown.on_release_failed(transition, event)
        case Adopted():
            adoption.on_adopted(transition, event)
        case NatsProbed():
            adoption.on_nats_probed(transition, event)
        case Shutdown():
            stopping.on_shutdown(transition, event)
        case Tick():
            _on_tick(transition)


_Parking = SuspendCommand | ResumeCommand | PauseAnswered | Suspended | SuspendFailed | Resumed | ResumeFailed


def _park(transition: Transition, event: _Parking) -> None:
    match event:
        case SuspendCommand():
            suspending.on_suspend(transition, event)
        case ResumeCommand():
            resuming.on_resume(transition, event)
        case PauseAnswered():
            suspending.on_pause_answered(transition, event)
        case Suspended():
            suspending.on_suspended(transition, event)
        case SuspendFailed():
            suspending.on_suspend_failed(transition, event)
        case Resumed():
            resuming.on_resumed(transition, event)
        case ResumeFailed():
            resuming.on_resume_failed(transition, event)


def _on_tick(transition: Transition) -> None:
    """Handle every deadline that has passed.

    Per instance: 1. drop, 2. retry a release, 3. adoption, 4. drain, 5. kill, 6. suspension,
    7. start progress.
    """
    for instance in list(transition.state.instances.values()):
        if instance.ended_at is not None:
            if transition.now >= forget_at(transition.state, instance):
                transition.drop(instance.instance_id)
            continue
        if instance.release_at is not None and instance.release_at <= transition.now:
            teardown.release(transition, instance)
            continue
        if instance.adopt_until is not None and instance.adopt_until <= transition.now:
            adoption.on_adoption_timeout(transition, instance)
        elif instance.drain_until is not None and instance.drain_until <= transition.now:
            stopping.on_drain_timeout(transition, instance)
        elif instance.kill_at is not None and instance.kill_at <= transition.now:
            termination.kill(transition, instance)
        elif instance.suspends_until is not None and instance.suspends_until <= transition.now:
            suspending.on_suspension_timeout(transition, instance)
        elif instance.awaits_progress and transition.now - instance.progress_at >= instance.command.card.spec.init_timeout:
            starting.on_no_progress(transition, instance)
