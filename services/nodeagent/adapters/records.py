"""Records on disk from which the next agent adopts running engines.

There is a file for each instance, one for the newest epoch of a scheduler, and one for the crashes
of executors by model.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from services.nodeagent.domain.state import Instance
from shared.contracts.base import Frozen
from shared.contracts.phases import PhaseSpan
from shared.errors import Conflict
from shared.private import write_durably
from shared.restart_records import recover_records, write_record

log = logging.getLogger(__name__)
_CRASHES: TypeAdapter[dict[str, int]] = TypeAdapter(dict[str, int])


class Record(Frozen):
    """The record of one instance.

    Attributes:
        machine_boot: The kernel's boot id: monotonic times and pids are invalid after a reboot.
        phases: Phases of the start, with times on the monotonic clock.
    """

    version: int = 1
    machine_boot: str
    instance: Instance
    phases: tuple[PhaseSpan, ...] = ()


class Records:
    """Files in which an agent leaves its state to the next one.

    A disk error is logged, and serving continues. The next agent may then fail to adopt an engine.
    """

    def __init__(self, agent_directory: Path) -> None:
        """Make the directory.

        Args:
            agent_directory: `<node_state>/agent`.

        Raises:
            OSError: The directory cannot be made.
        """
        self._directory = agent_directory / "instances"
        self._epoch = agent_directory / "epoch"
        self._crashes = agent_directory / "crashes.json"
        self._lock = agent_directory / "lock"
        self._boot = read_boot_id()
        self._directory.mkdir(parents=True, exist_ok=True, mode=0o700)

    @contextmanager
    def hold_lock(self) -> Iterator[None]:
        """Lock the state, so that this agent is the only one of its node.

        Raises:
            Conflict: Another agent runs with this state, and would start and stop the same engines.
        """
        fd = os.open(self._lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as e:
                raise Conflict(
                    f"Another nodeagent runs with {self._lock.parent}; stop it, or give this one another THAW_NODE or THAW_HOME"
                ) from e
            yield
        finally:
            os.close(fd)

    def save(self, instance: Instance, phases: tuple[PhaseSpan, ...]) -> None:
        record = Record(machine_boot=self._boot, instance=instance, phases=phases)
        path = self._directory / f"{instance.instance_id}.json"
        try:
            write_record(path, record.model_dump_json())
        except OSError as e:
            _log_failure(path, e)

    def charges_path(self, instance_id: str) -> Path:
        """Return the file of an engine's meters (`ChargePage`), which is kept with the record."""
        return self._directory / f"{instance_id}.charges"

    def forget(self, instance_id: str) -> None:
        """Remove the files of an instance that has ended."""
        _remove(self._directory / f"{instance_id}.json")
        _remove(self.charges_path(instance_id))

    def load(self) -> Iterator[Record]:
        """Yield the readable records of this boot, and remove those of earlier boots."""
        try:
            recover_records(self._directory)
        except OSError as e:
            log.error("failed to recover instance records", extra={"path": str(self._directory), "error": str(e)})
        for path in sorted(self._directory.glob("*.json")):
            try:
                record = Record.model_validate_json(path.read_bytes())
            except (OSError, ValidationError) as e:
                log.error("failed to read an instance record; it is set aside", extra={"path": str(path), "error": str(e)})
                with contextlib.suppress(OSError):
                    path.rename(path.with_suffix(".unreadable"))
                continue
            if record.machine_boot != self._boot:
                _remove(path)
                _remove(path.with_suffix(".charges"))
                continue
            yield record

    def save_epoch(self, epoch: int) -> None:
        _replace(self._epoch, str(epoch))

    def load_epoch(self) -> int:
        """Return the newest epoch of a scheduler; 0 if there is none."""
        try:
            return int(self._epoch.read_text())
        except FileNotFoundError:
            return 0
        except (OSError, ValueError) as e:
            log.error("failed to read the newest epoch; starting from 0", extra={"path": str(self._epoch), "error": str(e)})
            return 0

    def save_crashes(self, crashes: Mapping[str, int]) -> None:
        _replace(self._crashes, json.dumps(dict(crashes)))

    def load_crashes(self) -> dict[str, int]:
        """Return the number of crashes of executors by model."""
        try:
            return _CRASHES.validate_json(self._crashes.read_bytes())
        except FileNotFoundError:
            return {}
        except (OSError, ValidationError) as e:
            log.error(
                "failed to read the crashes of executors; starting from none", extra={"path": str(self._crashes), "error": str(e)}
            )
            return {}


def read_boot_id() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def _replace(path: Path, text: str) -> None:
    """Replace a rarely written file, which survives a power cut.

    This blocks for longer than `write_record`.
    """
    try:
        write_durably(path, text.encode())
    except OSError as e:
        _log_failure(path, e)


def _remove(path: Path) -> None:
    try:
        path.unlink(missing_ok=True)
    except OSError as e:
        log.error("failed to remove a record", extra={"path": str(path), "error": str(e)})


def _log_failure(path: Path, error: OSError) -> None:
    log.error("failed to write a record", extra={"path": str(path), "error": str(error)})
