"""`PYTHON preload.py MODULE`: an engine's interpreter in waiting. It has the module imported, and becomes the engine when it is told how.

Told is one line of JSON on standard input: `arguments` of the module, its whole `environment`, `cgroups` (files named cgroup.procs, to be joined),
`niceness`, `log` (a file that standard output and error go to). The end of the file instead: nobody needs it.

Run by file name in the engine's own environment, where nothing of ours is installed. What a library has read of the environment when it was
imported stays as it was: whoever starts this gives it those variables that matter then.
"""

import contextlib
import importlib
import json
import os
import runpy
import sys


def main() -> int:
    module = sys.argv[1]
    importlib.import_module(module)
    line = sys.stdin.buffer.readline()
    if not line:
        return 0
    become(module, json.loads(line))
    return 0


def become(module: str, told: dict) -> None:  # type: ignore[type-arg]  # run by whatever Python the engine has
    for path in told["cgroups"]:
        with open(path, "w") as file:  # noqa: PTH123  # as spawn.py
            file.write("0")
    with contextlib.suppress(OSError):  # to compute sooner than now takes a right that not everybody has
        os.setpriority(os.PRIO_PROCESS, 0, told["niceness"])
    _redirect(told["log"])
    before = set(filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep)))
    os.environ.clear()
    os.environ.update(told["environment"])
    # The interpreter reads it at its start only.
    sys.path[1:1] = [p for p in told["environment"].get("PYTHONPATH", "").split(os.pathsep) if p and p not in before]
    importlib.invalidate_caches()
    sys.argv = [module, *told["arguments"]]
    sys.modules.pop(module, None)  # it is run as the program, not used as it was imported
    runpy.run_module(module, run_name="__main__", alter_sys=True)


def _redirect(log: str) -> None:
    sys.stdout.flush()
    sys.stderr.flush()
    to = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
    nothing = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
    for source, number in ((nothing, 0), (to, 1), (to, 2)):
        os.dup2(source, number)
        os.set_inheritable(number, True)
    os.close(to)
    os.close(nothing)


if __name__ == "__main__":
    sys.exit(main())
