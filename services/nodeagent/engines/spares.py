"""Spare hosts: interpreters with their imports done.

They save half of a start.

There is one for each configured engine. It is used once, and replaced after a period without
starts, because imports compete for the cores of a starting engine. A spare holds memory (some
500 MB for vLLM) that is not charged to a device. It exits with this agent.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from shared.contracts.engine import EngineStart
from shared.contracts.models import ModelCard
from shared.environment import without_credentials

log = logging.getLogger(__name__)
REST_S = 30.0
_POLL_S = 1.0
_BACKOFF_FACTOR = 4.0
_ENDS_WITHIN_S = 5.0


class Spares:
    """Keeps spare hosts.

    Args:
        rest_s: Seconds without a start before a spare is created; four times as long after one that
            has exited by itself.
    """

    def __init__(
        self, engines: tuple[str, ...], module: str, log_path: Path, environment: Mapping[str, str], rest_s: float = REST_S
    ) -> None:
        self._engines = engines
        self._module = module
        self._log_path = log_path
        self._environment = environment
        self._rest_s = rest_s
        self._waiting: dict[str, subprocess.Popen[bytes]] = {}
        self._not_before: dict[str, float] = {}

    async def run(self) -> None:
        """Keep one spare per engine, until cancelled."""
        loop = asyncio.get_running_loop()
        while self._engines:
            for engine in self._engines:
                if self._has_ended(engine):
                    log.warning("a spare host has exited", extra={"engine": engine, "log": str(self._log_path)})
                    self._not_before[engine] = loop.time() + _BACKOFF_FACTOR * self._rest_s
                if engine not in self._waiting and loop.time() >= self._not_before.get(engine, 0.0):
                    with contextlib.suppress(OSError):
                        self._waiting[engine] = self._spawn(engine)
            await asyncio.sleep(min(_POLL_S, self._rest_s))

    def take(self, start: EngineStart) -> subprocess.Popen[bytes] | None:
        """Hand `start` to a spare host; None if there is none."""
        now = asyncio.get_running_loop().time()
        self._not_before = dict.fromkeys(self._engines, now + self._rest_s)
        if not serves(start.card):
            return None
        host = self._waiting.pop(start.card.spec.engine, None)
        if host is None:
            return None
        assert host.stdin is not None
        try:
            if host.poll() is not None:
                raise BrokenPipeError
            with host.stdin as pipe:
                pipe.write(start.model_dump_json().encode() + b"\n")
        except OSError as e:
            log.warning("a spare host has exited", extra={"error": str(e)})
            _close_input(host)
            return None
        return host

    async def close(self) -> None:
        """Close the spares' standard input, upon which they exit."""
        waiting, self._waiting, self._engines = self._waiting, {}, ()
        for host in waiting.values():
            _close_input(host)
        for host in waiting.values():
            try:
                await asyncio.to_thread(host.wait, _ENDS_WITHIN_S)
            except subprocess.TimeoutExpired:
                host.kill()
                host.wait()

    def _has_ended(self, engine: str) -> bool:
        host = self._waiting.get(engine)
        if host is None or host.poll() is None:
            return False
        _close_input(self._waiting.pop(engine))
        return True

    def _spawn(self, engine: str) -> subprocess.Popen[bytes]:
        with self._log_path.open("ab") as output:
            return subprocess.Popen(
                [sys.executable, "-m", self._module, "--spare", engine],
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=output,
                env={**without_credentials(os.environ), **self._environment},
                start_new_session=True,
            )


def _close_input(host: subprocess.Popen[bytes]) -> None:
    """Close the host's standard input."""
    assert host.stdin is not None
    with contextlib.suppress(OSError):  # it has exited with unread input
        host.stdin.close()


def serves(card: ModelCard) -> bool:
    """True if a spare can host the model.

    Its imports and environment were fixed before the model was known.
    """
    spec = card.spec
    own = spec.container is None and not spec.command and not spec.env and spec.network != "host"
    return own and not card.info.source.startswith("hf://")
