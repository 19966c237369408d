"""Control groups, one per engine, to freeze and end all its processes.

They also find and measure them. Supports the freezers of cgroup v2 and v1.

v2: `cgroup.freeze` and `cgroup.events`; SIGKILL reaches frozen processes. v1: `freezer.state`; a
signal waits until the group is thawed.

A container in v2 is frozen in the group that its container engine has made: its limits end with
that group. In v1 the freezer has a hierarchy of its own, where groups have no limits.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

from services.nodeagent.suspend import shared_memory
from services.nodeagent.suspend.container_groups import GONE, can_freeze, find_container_group, list_processes
from shared.errors import EngineFailed
from shared.processes import descendants

log = logging.getLogger(__name__)
_FREEZE_WITHIN_S = 5.0
_FIRST_POLL_S = 0.0005
_LONGEST_POLL_S = 0.02
_PREFIX = "thaw-"
_TRIAL = ".trial-"
_SWEPT_AFTER_S = 600.0


class Freezer(Protocol):
    """One cgroup hierarchy. Its methods take the directory of a group."""

    version: int

    def prepare(self, directory: Path) -> None: ...
    def set_frozen(self, directory: Path, frozen: bool) -> None: ...
    def is_frozen(self, directory: Path) -> bool: ...


class FreezerV2:
    version = 2

    def prepare(self, directory: Path) -> None:
        """Raise `OSError` if groups cannot be frozen.

        The kernel is older than 5.2, or the group is not writable.
        """
        (directory / "cgroup.freeze").read_text()

    def set_frozen(self, directory: Path, frozen: bool) -> None:
        (directory / "cgroup.freeze").write_text("1" if frozen else "0")

    def is_frozen(self, directory: Path) -> bool:
        return "frozen 1" in (directory / "cgroup.events").read_text()


class FreezerV1:
    version = 1

    def prepare(self, directory: Path) -> None:
        (directory / "freezer.state").read_text()

    def set_frozen(self, directory: Path, frozen: bool) -> None:
        (directory / "freezer.state").write_text("FROZEN" if frozen else "THAWED")

    def is_frozen(self, directory: Path) -> bool:
        return (directory / "freezer.state").read_text().strip() == "FROZEN"


class Cgroups:
    """The control groups of a node's engines, below this process's group.

    Calls block for milliseconds at most, except `freeze`, which takes seconds if a process is in
    the kernel.

    Args:
        scope: NodeSettings.scope.
        root: Directory of this process's group; None: there are no groups.
        freezer: The hierarchy that freezes processes.
        reason: Why there are no groups.
    """

    def __init__(self, scope: str, root: Path | None, freezer: Freezer | None, reason: str = "") -> None:
        self.scope = scope
        self._root = root
        self._freezer = freezer
        self.reason = reason
        self._left: dict[str, set[int]] = {}
        self._containers: dict[str, Path] = {}
        """Groups of container engines, by instance."""

    @property
    def available(self) -> bool:
        return self._root is not None

    @property
    def version(self) -> int | None:
        return self._freezer.version if self._freezer is not None else None

    def create(self, instance_id: str) -> Path | None:
        """Create the instance's group; return its cgroup.procs file, or None.

        None: there are no groups.
        """
        if self._root is None:
            return None
        directory = self._directory(instance_id)
        try:
            directory.mkdir(exist_ok=True)
        except OSError as e:
            log.warning("failed to create a control group", extra={"instance": instance_id, "error": str(e)})
            return None
        return directory / "cgroup.procs"

    def add(self, instance_id: str, pid: int) -> None:
        """Move a process with all its threads into the group.

        Existing children stay where they are.
        """
        if (procs := self.create(instance_id)) is None:
            return
        try:
            procs.write_text(str(pid))
        except ProcessLookupError:
            return
        except OSError as e:
            log.warning("failed to move a process into its control group", extra={"pid": pid, "error": str(e)})

    def gather(
        self, instance_id: str, host: int, *, include_host: bool, others: tuple[int, ...] = (), in_container: bool = False
    ) -> tuple[int, ...]:
        """Move `host`'s descendants and `others` into the group.

        `host` itself too if it is the engine. Processes of a container stay where `find_container`
        finds them.

        Returns:
            All pids of the engine.
        """
        found = [*descendants(host)[0 if include_host else 1 :], *others]
        if not (in_container and self.find_container(instance_id, others)):
            inside = set(self.pids(instance_id))
            for pid in found:
                if pid not in inside:
                    self.add(instance_id, pid)
        return tuple(sorted({p for p in (*found, *self.pids(instance_id)) if Path(f"/proc/{p}").exists()}))

    def find_container(self, instance_id: str, pids: tuple[int, ...]) -> bool:
        """Find the group that a container engine has made for these processes.

        From now on it is the instance's group, if this process may freeze it.

        Returns:
            False if there is none, or an earlier agent has moved them to the instance's own group.
        """
        group = self._find_container_group(instance_id, pids)
        if group is None or (group != self._containers.get(instance_id) and not can_freeze(group, pids)):
            self._containers.pop(instance_id, None)
        else:
            self._containers[instance_id] = group
        return group is not None

    def _find_container_group(self, instance_id: str, pids: tuple[int, ...]) -> Path | None:
        if self._root is None or self.version != FreezerV2.version:
            return None
        for kind, mount, root, _ in _mounts():
            if kind == "cgroup2" and self._root.is_relative_to(mount):
                group = find_container_group(pids, mount, root)
                return group if group != self._directory(instance_id) else None
        return None

    def pids(self, instance_id: str) -> tuple[int, ...]:
        if self._root is None:
            return ()
        try:
            return list_processes(self._group(instance_id))
        except OSError:
            return ()

    def list_outside(self, instance_id: str, pids: tuple[int, ...]) -> tuple[int, ...]:
        """Return those of `pids` that run outside the group.

        A delegated v2 group cannot take them from another group, and a container's group may belong
        to another user.
        """
        inside = set(self.pids(instance_id))
        return tuple(p for p in pids if p not in inside and Path(f"/proc/{p}").exists())

    def freeze(self, instance_id: str) -> None:
        """Freeze every process of the group.

        Raises `EngineFailed`, with the group thawed, if that takes too long.
        """
        directory, freezer = self._require_freezer(instance_id)
        freezer.set_frozen(directory, True)
        deadline, wait = time.monotonic() + _FREEZE_WITHIN_S, _FIRST_POLL_S
        while not freezer.is_frozen(directory):
            if time.monotonic() > deadline:
                freezer.set_frozen(directory, False)
                raise EngineFailed(f"The engine's processes could not be frozen within {_FREEZE_WITHIN_S:g} s")
            time.sleep(wait)
            wait = min(2 * wait, _LONGEST_POLL_S)

    def thaw(self, instance_id: str) -> None:
        """Thaw the group's processes. No effect if they are not frozen."""
        if self._root is not None and self._freezer is not None:
            try:
                self._freezer.set_frozen(self._group(instance_id), False)
            except OSError as e:
                if e.errno not in GONE:  # a container engine removes its group as soon as that is empty
                    raise

    def is_frozen(self, instance_id: str) -> bool:
        if self._root is None or self._freezer is None:
            return False
        try:
            return self._freezer.is_frozen(self._group(instance_id))
        except OSError:
            return False

    def kill(self, instance_id: str, spared: int | None = None) -> None:
        """Send SIGKILL to every process of the group, frozen or not.

        Processes forked meanwhile are included.
        """
        for _ in range(10):
            left = [p for p in self.pids(instance_id) if p != spared]
            for pid in left:
                self._left.setdefault(instance_id, set()).update(shared_memory.find_mapped_inodes(pid))
            for pid in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, 9)
            self.thaw(instance_id)
            if not left:
                return

    def left_segments(self, instance_id: str) -> set[int]:
        """Shared memory of processes that `kill` has ended (shared_memory.py).

        Cleared by this call.
        """
        return self._left.pop(instance_id, set())

    def remove(self, instance_id: str) -> bool:
        """Remove the group. False while it has a process. A container engine removes its own."""
        self._containers.pop(instance_id, None)
        if self._root is None:
            return True
        try:
            self._directory(instance_id).rmdir()
        except FileNotFoundError:
            return True
        except OSError:
            return False
        return True

    def known(self) -> Iterator[str]:
        """Instances that have a group, of this agent or an earlier one of this node."""
        if self._root is None:
            return
        prefix = f"{_PREFIX}{self.scope}."
        for directory in self._root.glob(f"{prefix}*"):
            yield directory.name.removeprefix(prefix)

    def _directory(self, instance_id: str) -> Path:
        assert self._root is not None
        return self._root / f"{_PREFIX}{self.scope}.{instance_id}"

    def _group(self, instance_id: str) -> Path:
        return self._containers.get(instance_id) or self._directory(instance_id)

    def _require_freezer(self, instance_id: str) -> tuple[Path, Freezer]:
        if self._root is None or self._freezer is None:
            raise EngineFailed(self.reason)
        return self._group(instance_id), self._freezer


def open_cgroups(scope: str, version: int | None = None) -> Cgroups:
    """Open the first hierarchy in which groups can be created and frozen.

    v2 is tried before v1, or only `version`.
    """
    reasons = []
    for freezer, root in hierarchies():
        if version not in (None, freezer.version):
            continue
        trial = root / f"{_PREFIX}{scope}{_TRIAL}{os.getpid()}"
        try:
            trial.mkdir()
        except OSError as e:
            reasons.append(f"cgroup v{freezer.version} at {root}: {e.strerror}")
            continue
        try:
            freezer.prepare(trial)
            _sweep(root)
            return Cgroups(scope, root, freezer)
        except OSError as e:
            reasons.append(f"cgroup v{freezer.version} at {root} cannot freeze: {e.strerror}")
        finally:
            with contextlib.suppress(OSError):
                trial.rmdir()
    return Cgroups(scope, None, None, "; ".join(reasons) or "no cgroup freezer is mounted")


def _sweep(root: Path) -> None:
    """Remove empty groups of nodes that no longer exist.

    Only old ones: a new group may be about to get its first process. A group with a process cannot
    be removed.
    """
    for directory in root.glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError):
            if time.time() - directory.stat().st_mtime > _SWEPT_AFTER_S:
                directory.rmdir()


def hierarchies() -> Iterator[tuple[Freezer, Path]]:
    """Yield each freezer with the directory for groups below this process's own."""
    own = dict(_own_paths())
    for kind, mount, root, _ in _mounts():
        if kind == "cgroup2":
            yield FreezerV2(), _find_own_group(mount, root, own.get("", "/"))
    for kind, mount, root, options in _mounts():
        if kind == "cgroup" and "freezer" in options.split(","):
            yield FreezerV1(), _find_own_group(mount, root, own.get("freezer", "/"))


def _find_own_group(mount: Path, root: str, path: str) -> Path:
    """This process's own group.

    The mount's root if that is not visible, as in a container.
    """
    relative = path.removeprefix(root.rstrip("/")).lstrip("/")
    own = mount / relative
    return own if own.is_dir() else mount


def _mounts() -> Iterator[tuple[str, Path, str, str]]:
    """Yield (kind, mount point, root within the hierarchy, options) of each mount."""
    try:
        lines = Path("/proc/self/mountinfo").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        before, _, after = line.partition(" - ")
        fields, kind_fields = before.split(), after.split()
        yield kind_fields[0], Path(fields[4]), fields[3], kind_fields[-1]


def _own_paths() -> Iterator[tuple[str, str]]:
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        for controller in controllers.split(","):
            yield controller, path
