"""Reaper: `python -IS reaper.py NAME=TOKEN CGROUP_FILES`.

It ends what is left of an engine after its host has died.

Standard input is a pipe whose other end the host holds, so the host's death, whatever its cause, is
read here as end of file. The kernel kills the engine's first process together with the host
(spawn.py); its children survive. The reaper kills:

- every process with the host's token in its environment, as the variable NAME (a newer host of the
  same instance has another token);
- every process in the engine's session, which the host sends through the pipe as "PID START" (a
  process that changes its title, as vLLM's do, may lose its environment).

Afterwards it removes the shared memory that these processes had mapped, the segments that the host
sent ("INODE PATH"), and the directory of the engine's socket ("directory PATH"). No other process
does so for killed processes, and Python's own resource tracker may be killed first.

The reaper daemonises, belongs to no engine's control group, and in a normal shutdown finds nothing
to do. It runs by file name in a bare interpreter, like spawn.py.
"""

import os
import signal
import sys
import time

VARIABLE = "THAW_INSTANCE_HOST"
DIRECTORY = "directory"
"""First word of a line that names a directory."""
_WITHIN_S = 10.0
_POLL_S = 0.05
_LOOK_AGAIN_S = 0.5
_SHARED = ("/dev/shm/psm_", "/dev/shm/sem.mp-", "/dev/shm/vllm_dist_")
"""Name prefixes of the shared memory and semaphores of Python's multiprocessing, and of vLLM's cpu
workers.
"""
_SEMAPHORES = "/dev/shm/sem."


def carrying(entry: str) -> list[int]:
    """Processes with this entry (NAME=TOKEN) in their environment. Zombies have none."""
    wanted = entry.encode()
    found = []
    for name in os.listdir("/proc"):  # noqa: PTH208  # only necessary imports
        if name.isdigit():
            try:
                with open(f"/proc/{name}/environ", "rb") as file:  # noqa: PTH123
                    if wanted in file.read().split(b"\0"):
                        found.append(int(name))
            except OSError:
                continue
    return found


def read_start_time(pid: int) -> int:
    """Start time in clock ticks since boot; 0 if there is no such process."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:  # noqa: PTH123
            return int(file.read().rpartition(b")")[2].split()[19])
    except OSError:
        return 0


def in_session(leader: int, start: int) -> list[int]:
    """Processes of a session without zombies.

    The kernel does not reuse a leader's pid while its session has members; if it was reused, the
    session is over.
    """
    if read_start_time(leader) not in (0, start):
        return []
    found = []
    for name in os.listdir("/proc"):  # noqa: PTH208
        if name.isdigit():
            try:
                with open(f"/proc/{name}/stat", "rb") as file:  # noqa: PTH123
                    fields = file.read().rpartition(b")")[2].split()
            except OSError:
                continue
            if int(fields[3]) == leader and fields[0] not in (b"Z", b"X"):
                found.append(int(name))
    return found


def find_shared_memory(pid: int) -> dict[str, int]:
    """Python's shared memory that a process has mapped, as inode by path.

    The creator of a semaphore maps it under a temporary name, which `sem_open` unlinks afterwards.
    """
    found = {}
    made = set()
    try:
        with open(f"/proc/{pid}/maps") as file:  # noqa: PTH123
            for line in file:
                fields = line.split(maxsplit=5)
                if len(fields) > 5 and fields[5].startswith(_SHARED) and not fields[5].endswith(" (deleted)\n"):
                    found[fields[5].rstrip("\n")] = int(fields[4])
                elif len(fields) > 5 and fields[5].startswith(_SEMAPHORES):
                    made.add(int(fields[4]))
        for name in os.listdir("/dev/shm") if made else ():  # noqa: PTH208
            path = f"/dev/shm/{name}"
            if path.startswith(_SHARED) and (inode := _inode(path)) in made and inode is not None:
                found[path] = inode
    except OSError:
        pass
    return found


def remove(left: dict[str, int]) -> None:
    """Unlink these files once no process has them mapped.

    A path that has another inode by now is left alone.
    """
    deadline = time.monotonic() + _WITHIN_S
    while left := {path: inode for path, inode in left.items() if _inode(path) == inode}:
        used: set[str] = set()
        for name in os.listdir("/proc"):  # noqa: PTH208
            if name.isdigit():
                used.update(find_shared_memory(int(name)))
        for path in left.keys() - used:
            try:
                os.unlink(path)  # noqa: PTH108
            except OSError:
                continue
        if not used & left.keys() or time.monotonic() > deadline:
            return
        time.sleep(_LOOK_AGAIN_S)


def _inode(path: str) -> int | None:
    try:
        return os.stat(path).st_ino  # noqa: PTH116
    except OSError:
        return None


def remove_directory(path: str) -> None:
    """Remove a directory and its sockets. A missing directory is ignored."""
    try:
        for name in os.listdir(path):  # noqa: PTH208
            os.unlink(os.path.join(path, name))  # noqa: PTH108, PTH118
        os.rmdir(path)  # noqa: PTH106
    except OSError:
        pass


def thaw(files: str) -> None:
    """Thaw the control groups: cgroup v1 delays signals to frozen processes."""
    for path in filter(None, files.split(":")):
        state = os.path.join(os.path.dirname(path), "freezer.state")  # noqa: PTH118, PTH120
        if os.path.exists(state):  # noqa: PTH110
            with open(state, "w") as file:  # noqa: PTH123
                file.write("THAWED")


def end(entry: str, files: str, session: tuple[int, int] | None, left: dict[str, int]) -> None:
    """Kill the engine's processes.

    Args:
        left: Shared memory of theirs that is known already.
    """
    deadline = time.monotonic() + _WITHIN_S
    while (found := carrying(entry) + (in_session(*session) if session else [])) and time.monotonic() < deadline:
        for pid in found:
            left.update(find_shared_memory(pid))
        for pid in found:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        try:
            thaw(files)
        except OSError as e:
            sys.stderr.write(f"failed to thaw an engine's control group: {e.strerror}\n")
        time.sleep(_POLL_S)
    remove(left)


def main() -> int:
    entry, files = sys.argv[1:]
    if os.fork():
        return 0
    message = b""
    while read := os.read(0, 4096):
        message += read
    first, *more = message.decode().splitlines() or [""]
    leader, _, start = first.partition(" ")
    lines = [line.partition(" ") for line in more]
    known = {path: int(inode) for inode, _, path in lines if inode != DIRECTORY}
    end(entry, files, (int(leader), int(start)) if start else None, known)
    for word, _, path in lines:
        if word == DIRECTORY:
            remove_directory(path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
