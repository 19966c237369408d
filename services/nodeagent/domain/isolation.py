"""Decide which instances share a process."""

from __future__ import annotations

import signal
from dataclasses import replace

from services.nodeagent.domain.events import PersistCrashes
from services.nodeagent.domain.state import Instance, Process
from services.nodeagent.domain.transition import Transition
from shared.contracts.models import ModelCard
from shared.contracts.node import StartInstance

MAX_CRASHES = 2
"""A model that has crashed its executor this often gets a process of its own."""
_OUTSIDE = frozenset({signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGXCPU})
"""Signals that others send: an operator, the kernel's out-of-memory killer, a limit."""
_MAX_MODELS = 1024
"""The counts of the models that crashed last are kept."""


def shares(transition: Transition, command: StartInstance) -> bool:
    """True if the instance is attached to its device's executor.

    1. The model requests it (`isolation: shared`), runs on the builtin engine and has no code of
       its own.
    2. It runs on one device.
    3. The model has crashed fewer than `MAX_CRASHES` executors, no step of it had to be ended, and
       it has not exceeded the memory of an executor.
    """
    return (
        command.card.spec.may_share
        and len(command.device_ids) == 1
        and transition.state.crashes.get(_key(command.card), 0) < MAX_CRASHES
    )


def is_crash(returncode: int | None, *, is_fault: bool) -> bool:
    """True if an executor ended by a fault of its own, and not from outside.

    1. It reported a fault: then the exit status does not matter.
    2. The exit status is unknown: not a crash.
    3. Otherwise any exit status but 0, and any signal that is not sent from outside.

    Args:
        returncode: Exit status, -N for signal N; None: unknown.
        is_fault: The executor reported a fault (`Executors.is_fault`).
    """
    if is_fault:  # 1
        return True
    return returncode is not None and returncode != 0 and -returncode not in _OUTSIDE  # 2, 3


def count_crash(
    transition: Transition,
    instance: Instance,
    culprit: str,
    returncode: int | None,
    *,
    is_stuck: bool = False,
    is_fault: bool = False,
) -> None:
    """Count an executor's crash for the model of `culprit`, the instance that was computing.

    A step that did not end counts as `MAX_CRASHES`: the next one would take as long. An executor
    that was killed from outside counts for no model.
    """
    if instance.is_shared and instance.instance_id == culprit and (is_stuck or is_crash(returncode, is_fault=is_fault)):
        _count(transition, instance, MAX_CRASHES if is_stuck else 1)


def separate(transition: Transition, instance: Instance) -> None:
    """Give the model of `instance` a process of its own from its next start on."""
    if instance.is_shared:
        _count(transition, instance, MAX_CRASHES)


def _count(transition: Transition, instance: Instance, number: int) -> None:
    key = _key(instance.command.card)
    crashes = dict(transition.state.crashes)
    crashes[key] = crashes.pop(key, 0) + number
    kept = dict(list(crashes.items())[-_MAX_MODELS:])
    transition.state = replace(transition.state, crashes=kept)
    transition.emit(PersistCrashes(kept))


def charge_executor(transition: Transition, instance: Instance) -> None:
    """Book the executor of an instance that is attached, for as long as the executor runs."""
    command = instance.command
    if instance.is_shared and command.executor_bytes:
        transition.set_ledger(transition.state.ledger.set_executor(command.device_ids[0], command.executor_bytes))


def on_executor_exited(transition: Transition, instance: Instance) -> None:
    """Return the bytes of an executor that has died; bookings of its device may need another.

    The exits of its instances are learned one after the other. By then the device may have another
    executor, whose bytes stay booked.
    """
    if not instance.is_shared:
        return
    device_id = instance.command.device_ids[0]
    there = (i for i in transition.state.instances.values() if i.is_shared and device_id in i.command.device_ids)
    if not any(i.process is Process.ALIVE and i.pid != instance.pid for i in there):
        transition.set_ledger(transition.state.ledger.set_executor(device_id, 0))


def _key(card: ModelCard) -> str:
    return f"{card.name}@{card.info.revision}"
