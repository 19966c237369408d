"""The processes of a group on one node: the first stage's process forks those of the others.

They are forked before the process has threads, so that the imports of the zygote serve all stages.
The kernel kills them if the first stage's process ends: no half group keeps memory.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import traceback
from collections.abc import Callable
from typing import NoReturn

from shared.contracts.engine import EngineStart
from shared.contracts.stages import split_layers, stage_holder, stage_instance

_PR_SET_PDEATHSIG = 1


def later_starts(start: EngineStart) -> tuple[EngineStart, ...]:
    """Return the starts of the other stages of a group, whose devices the first one has.

    None for an engine that serves alone, and for a stage that was started by itself.
    """
    first = start.stage
    if first is None or not first.is_first or len(start.devices) != first.count:
        return ()
    ranges = split_layers(first.layers.total, first.count)
    return tuple(
        start.model_copy(
            update={
                "instance_id": stage_instance(start.instance_id, index),
                "device": start.devices[index],
                "devices": (start.devices[index],),
                "separate_memory": start.devices[index] in start.separate_devices,
                "stage": first.model_copy(
                    update={"index": index, "layers": ranges[index], "holder": stage_holder(start.instance_id, index)}
                ),
            }
        )
        for index in range(1, first.count)
    )


def fork_later_stages(start: EngineStart, run: Callable[[EngineStart], int]) -> tuple[int, ...]:
    """Fork a process for each later stage, and return their pids. Call it without other threads.

    Args:
        start: The first stage's start.
        run: The body of an engine process; returns its exit status.
    """
    parent = os.getpid()
    pids: list[int] = []
    for later in later_starts(start):
        pid = os.fork()
        if pid == 0:
            _become_stage(later, run, parent)
        pids.append(pid)
    return tuple(pids)


def _become_stage(start: EngineStart, run: Callable[[EngineStart], int], parent: int) -> NoReturn:
    status = 1
    try:
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() == parent:  # it may have ended before the call
            status = run(start)
    except BaseException:  # a process boundary: nothing may return into the first stage
        traceback.print_exc()
    finally:
        try:
            sys.stdout.flush()
            sys.stderr.flush()
        finally:  # also if the log's disk is full
            os._exit(status)
