"""`python -I reaper.py NAME=TOKEN CGROUP_FILES`, with a pipe for standard input: ends what is left of an engine once its host is gone.

The kernel ends an engine's first process with its host (spawn.py); what that has forked lives on. The host holds the other end of the pipe, so
its end, however it comes, is read here as the end of the file. Killed then is whatever carries the host's own token in its environment, as the
variable NAME (a host that a nodeagent starts for the same instance meanwhile has another), and whatever is in the engine's session, of which the
host has told through the pipe, "PID START": a process that gives itself another title, as vLLM's do, can lose its environment by that.
Python's shared memory that those had mapped is removed after them, and what the host has told of it ("INODE PATH", further lines): nobody else
does it for processes that were killed, and Python's own tracker not always before it is ended. So is the directory of the engine's socket
("directory PATH"). This process leaves its parent at once: it belongs to no engine, is frozen with none, and in good order finds nothing to end.

Run by file name in a bare interpreter, as spawn.py.
"""

import os
import signal
import sys
import time

VARIABLE = "THAW_INSTANCE_HOST"
DIRECTORY = "directory"
"""Begins the line that tells of a directory."""
_WITHIN_S = 10.0
_POLL_S = 0.05
_LOOK_AGAIN_S = 0.5
_SHARED = ("/dev/shm/psm_", "/dev/shm/sem.mp-", "/dev/shm/vllm_dist_")
"""What Python's multiprocessing calls its shared memory and its semaphores, and vLLM that of its workers on cpu."""
_SEMAPHORES = "/dev/shm/sem."


def carrying(entry: str) -> list[int]:
    """Processes with this entry (NAME=TOKEN) in their environment, zombies left out (they have none)."""
    wanted = entry.encode()
    found = []
    for name in os.listdir("/proc"):  # noqa: PTH208  # no imports that are not needed
        if name.isdigit():
            try:
                with open(f"/proc/{name}/environ", "rb") as file:  # noqa: PTH123
                    if wanted in file.read().split(b"\0"):
                        found.append(int(name))
            except OSError:
                continue
    return found


def started(pid: int) -> int:
    """In clock ticks since boot; 0 if there is no such process."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:  # noqa: PTH123
            return int(file.read().rpartition(b")")[2].split()[19])
    except OSError:
        return 0


def in_session(leader: int, start: int) -> list[int]:
    """Its processes, zombies left out. A leader's number is not given away while its session has members; where it was, the session is over."""
    if started(leader) not in (0, start):
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


def shared(pid: int) -> dict[str, int]:
    """Python's shared memory that a process has mapped: inode by path. Who made a semaphore has mapped it by another name, gone since
    (`sem_open` links it to its own when it is whole)."""
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
    """Unlink those of these files that are the same still, once no process has them mapped; what somebody goes on using stays."""
    deadline = time.monotonic() + _WITHIN_S
    while left := {path: inode for path, inode in left.items() if _inode(path) == inode}:
        used: set[str] = set()
        for name in os.listdir("/proc"):  # noqa: PTH208
            if name.isdigit():
                used.update(shared(int(name)))
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
    """With the sockets in it; harmless if it is gone."""
    try:
        for name in os.listdir(path):  # noqa: PTH208
            os.unlink(os.path.join(path, name))  # noqa: PTH108, PTH118
        os.rmdir(path)  # noqa: PTH106
    except OSError:
        pass


def thaw(files: str) -> None:
    """cgroup v1 keeps a signal from what is frozen."""
    for path in filter(None, files.split(":")):
        state = os.path.join(os.path.dirname(path), "freezer.state")  # noqa: PTH118, PTH120
        if os.path.exists(state):  # noqa: PTH110
            with open(state, "w") as file:  # noqa: PTH123
                file.write("THAWED")


def end(entry: str, files: str, session: tuple[int, int] | None, left: dict[str, int]) -> None:
    """`left`: shared memory of theirs that is known already."""
    deadline = time.monotonic() + _WITHIN_S
    while (found := carrying(entry) + (in_session(*session) if session else [])) and time.monotonic() < deadline:
        for pid in found:
            left.update(shared(pid))
        for pid in found:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        try:
            thaw(files)
        except OSError as e:
            sys.stderr.write(f"an engine's control group cannot be thawed: {e.strerror}\n")
        time.sleep(_POLL_S)
    remove(left)


def main() -> int:
    entry, files = sys.argv[1:]
    if os.fork():
        return 0
    told = b""
    while read := os.read(0, 4096):
        told += read
    first, *more = told.decode().splitlines() or [""]
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
