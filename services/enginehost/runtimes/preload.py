"""A spare interpreter of an engine: `PYTHON preload.py MODULE`.

It imports the module and waits for its order.

The order is one line of JSON on standard input: `arguments` of the module, its whole `environment`,
`cgroups` (cgroup.procs files to join), `niceness`, and `log` (the file for standard output and
error). If standard input closes instead, the interpreter exits.

The file runs by name in the engine's own environment, which has no Thaw packages. Libraries keep
the environment that they read when they were imported: the starter has to set those variables
beforehand.
"""

import contextlib
import gc
import importlib
import json
import os
import runpy
import sys


def main() -> int:
    module = sys.argv[1]
    # The collector would traverse what the imports make again and again: a sixth of their CPU time.
    gc.disable()
    importlib.import_module(module)
    gc.enable()
    line = sys.stdin.buffer.readline()
    if not line:
        return 0
    become(module, json.loads(line))
    return 0


def become(module: str, order: dict) -> None:  # type: ignore[type-arg]  # run by whatever Python the engine has
    for path in order["cgroups"]:
        with open(path, "w") as file:  # noqa: PTH123  # as spawn.py
            file.write("0")
    with contextlib.suppress(OSError):  # raising the priority requires a privilege
        os.setpriority(os.PRIO_PROCESS, 0, order["niceness"])
    _redirect(order["log"])
    before = set(filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep)))
    os.environ.clear()
    os.environ.update(order["environment"])
    # The interpreter reads PYTHONPATH only at startup.
    sys.path[1:1] = [p for p in order["environment"].get("PYTHONPATH", "").split(os.pathsep) if p and p not in before]
    importlib.invalidate_caches()
    sys.argv = [module, *order["arguments"]]
    sys.modules.pop(module, None)  # run it as the main program, not as the imported module
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
