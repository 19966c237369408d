"""Run a service process: settings, logs, traces, the mesh, signals and shutdown."""

from __future__ import annotations

import asyncio
import faulthandler
import logging
import os
import signal
import sys
from collections.abc import Awaitable, Callable
from typing import TypeVar

from pydantic import ValidationError

from shared.settings import CommonSettings
from shared.telemetry.logs import setup_logs
from shared.telemetry.tracing import setup_tracing, shutdown_tracing
from shared.watchdog.heartbeat import HeartbeatSender

log = logging.getLogger(__name__)
S = TypeVar("S", bound=CommonSettings)
App = Callable[[S, asyncio.Event], Awaitable[int]]
_heartbeats: HeartbeatSender | None = None


def report_ready() -> None:
    """Notify the process's supervisor, if there is one, that the service is ready."""
    if _heartbeats is not None:
        _heartbeats.report_ready()


def run_service(
    name: str, settings_type: type[S], app: App[S], *, loop_factory: Callable[[], asyncio.AbstractEventLoop] | None = None
) -> int:
    """Run `app(settings, stop)` until it returns its exit status.

    Args:
        name: Name of the service, for logs and traces.
        settings_type: Reads the settings from the environment.
        app: The service. SIGTERM and SIGINT set its `stop`; a second signal ends the process.
        loop_factory: Creates the event loop; None: asyncio's.

    Returns:
        The exit status of the process: 2 for invalid settings.
    """
    try:
        settings = settings_type()
    except ValidationError as e:
        for fault in e.errors():
            variable = "THAW_" + "_".join(str(p) for p in fault["loc"]).upper()
            print(f"{name}: {variable}: {fault['msg']}", file=sys.stderr)
        return 2
    global _heartbeats
    _heartbeats = heartbeats = HeartbeatSender.from_environment()
    faulthandler.enable()  # a watchdog's SIGABRT writes the stack of every thread into the log
    setup_logs(settings, name)
    setup_tracing(settings, name)
    try:
        with asyncio.Runner(loop_factory=loop_factory) as runner:
            if heartbeats is not None:
                heartbeats.send_every_second(runner.get_loop())
            return runner.run(_until_stopped(name, settings, app))
    except KeyboardInterrupt:
        return 130
    finally:
        _heartbeats = None
        if heartbeats is not None:
            heartbeats.close()
        shutdown_tracing()


async def _until_stopped(name: str, settings: S, app: App[S]) -> int:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()

    def on_signal(signum: int) -> None:
        if stop.is_set():
            loop.remove_signal_handler(signum)
            signal.raise_signal(signum)
        log.info("stopping", extra={"signal": signal.Signals(signum).name})
        stop.set()

    for signum in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(signum, on_signal, signum)
    log.info("starting", extra={"pid": os.getpid()})
    return await app(settings, stop)
