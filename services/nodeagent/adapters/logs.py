"""Reads the log files of this node for the admin API.

A name is looked up among the files that exist; it is never a part of a path.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from pathlib import Path

from shared.contracts.logs import MAX_BYTES, ListLogs, LogFile, LogRead, LogRequest, LogsListed, ReadLog
from shared.errors import NotFound
from shared.logfiles import read_part, sort_newest_first

SERVICES = ("nodeagent", "loader")
_ENGINE = ".engine"
_MAX_LISTED = 1_000


class LogReader:
    """Lists and reads logs.

    Args:
        node: Name of this node.
        engines: Directory of the logs of engines, the zygote and the spares.
        services: Directory where a launcher keeps the logs of services, if it writes files.
        models: Returns the model of each instance by the instance's id.
    """

    def __init__(self, node: str, engines: Path, services: Path, models: Callable[[], Mapping[str, str]]) -> None:
        self._node = node
        self._engines = engines
        self._services = services
        self._models = models

    async def answer(self, request: LogRequest) -> LogsListed | LogRead:
        """Answer a request. Raises `NotFound` for a log that does not exist."""
        if isinstance(request, ListLogs):
            return await asyncio.to_thread(self._list, dict(self._models()))
        return await asyncio.to_thread(self._read, request)

    def _list(self, models: Mapping[str, str]) -> LogsListed:
        found = self._find()
        by_path = {path: name for name, path in found.items()}
        logs = []
        for path in sort_newest_first(found.values())[:_MAX_LISTED]:
            try:
                nbytes = path.stat().st_size
            except OSError:  # removed in the meantime, or a link to a removed file
                continue
            name = by_path[path]
            logs.append(LogFile(name=name, nbytes=nbytes, model=models.get(name.removesuffix(_ENGINE))))
        return LogsListed(node=self._node, logs=tuple(logs))

    def _read(self, request: ReadLog) -> LogRead:
        path = self._find().get(request.name)
        try:
            if path is None:
                raise FileNotFoundError
            part = read_part(path, request.lines, MAX_BYTES, request.after)
        except OSError as e:
            raise NotFound(
                f"{self._node} has no log {request.name}: the oldest logs of engines are removed, and services in containers "
                "write none to files. List the node's logs"
            ) from e
        return LogRead(
            node=self._node, name=request.name, lines=part.lines, rest=part.rest, position=part.position, skipped=part.skipped
        )

    def _find(self) -> dict[str, Path]:
        """Return the files by name, without links that leave their directory."""
        services = [self._services / f"{service}.{self._node}.log" for service in SERVICES]
        candidates = [*self._engines.glob("*.log"), *services]
        return {
            path.name.removesuffix(".log"): path
            for path in candidates
            if path.is_file() and path.resolve().parent == path.parent.resolve()
        }
