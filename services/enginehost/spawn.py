"""`python -I spawn.py PARENT CGROUP_FILES NICENESS -- PROGRAM ARGUMENT…`: becomes PROGRAM, tied to its host.

Run by file name in a bare interpreter, so that neither the host's modules nor code between fork and exec is needed: it puts itself into the control
groups whose `cgroup.procs` files it is given (joined by colons), lets others go before it, asks the kernel to be killed when its parent dies, and
executes the program.
"""

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1
NOT_STARTED = 127


def main() -> int:
    parent, files, niceness, separator, *program = sys.argv[1:]
    assert separator == "--"
    for path in filter(None, files.split(":")):
        with open(path, "w") as file:  # noqa: PTH123  # no imports that are not needed
            file.write("0")
    _yield_to_others(int(niceness))
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != int(parent):
        return NOT_STARTED  # the host died meanwhile: its end was not seen
    for number in (signal.SIGINT, signal.SIGPIPE, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
    try:
        os.execvp(program[0], program)
    except OSError as e:
        sys.stderr.write(f"{program[0]} cannot be started: {e.strerror}\n")
        return NOT_STARTED


def _yield_to_others(niceness: int) -> None:
    os.nice(niceness)
    try:
        # Where the kernel groups processes by session, niceness counts within the session only, and that of the group against the others.
        with open("/proc/self/autogroup", "w") as file:  # noqa: PTH123
            file.write(str(niceness))
    except OSError:
        pass  # it does not group them, or not this one


if __name__ == "__main__":
    sys.exit(main())
