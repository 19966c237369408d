"""Define the checks of `thaw doctor`.

Each check examines one thing and yields findings with their remedies. A check changes nothing.
"""

from __future__ import annotations

import asyncio
import importlib.metadata
import os
import platform
from collections.abc import Iterator
from importlib import import_module
from typing import Literal

import psutil

from shared.contracts.findings import Finding
from thaw.errors import CommandError
from thaw.launcher import servers, swap, unprivileged
from thaw.launcher.control import check_port
from thaw.launcher.engine_checks import find_installed
from thaw.launcher.gpus import NvmlFailed, read_gpus
from thaw.launcher.home import Home, read_json
from thaw.launcher.leftovers import SHM, find_leftovers
from thaw.launcher.planning import Wanted
from thaw.launcher.preflight import SERVICES_BYTES, available_memory, free_disk, free_shared_memory
from thaw.launcher.server_checks import check_nats, check_postgres
from thaw.launcher.status import running_status
from thaw.units import format_size

GIB = 1024**3
CHECKPOINT_DRIVER = 570
"""The first major version of the NVIDIA driver that has checkpoint calls."""


def examine(home: Home) -> Iterator[Finding]:
    """Every finding, in the order in which a person would look."""
    yield from _versions()
    yield from _state(home)
    yield from _memory()
    yield from _shared_memory()
    yield _suspending(home)
    yield from _gpus()
    yield from _engines()
    endpoints = read_json(home.endpoints_file) if running_status(home) else None
    nats_url = os.environ.get("THAW_NATS_URL") or (endpoints or {}).get("nats_url")
    database_url = os.environ.get("THAW_DATABASE_URL") or (endpoints or {}).get("database_url")
    yield _port(home)
    yield asyncio.run(check_nats(str(nats_url))) if nats_url else _own_nats()
    yield asyncio.run(check_postgres(str(database_url))) if database_url else _own_postgres(home)
    yield from _leftovers(home)


def _engines() -> Iterator[Finding]:
    found, faults = find_installed()
    yield Finding("engines", "ok", ", ".join(found))
    for fault in faults:
        yield Finding("engines", "warn", fault, "Name an interpreter or program that has it; see docs/engines.md.")


def _versions() -> Iterator[Finding]:
    yield Finding("python", "ok", f"{platform.python_version()} on {platform.system()} {platform.release()}")
    for package, need in (("torch", "node"), ("transformers", "node"), ("safetensors", "node")):
        try:
            yield Finding(package, "ok", importlib.metadata.version(package))
        except importlib.metadata.PackageNotFoundError:
            yield Finding(package, "fail", "not installed", f"pip install 'thaw-mesh[{need}]'")


def _state(home: Home) -> Iterator[Finding]:
    try:
        home.check()
    except CommandError as e:
        yield Finding("state", "fail", e.what, e.remedy)
        return
    free = free_disk(home.existing)
    level: Literal["ok", "warn", "fail"] = "ok" if free > 5 * GIB else "warn" if free > GIB else "fail"
    remedy = "" if level == "ok" else "Free some, or set THAW_HOME to a directory on another disk."
    yield Finding("disk", level, f"{format_size(free)} free under {home.root}", remedy)


def _memory() -> Iterator[Finding]:
    available = available_memory()
    text = f"{format_size(available)} available of {format_size(psutil.virtual_memory().total)}"
    if available < SERVICES_BYTES:
        yield Finding("memory", "fail", text, f"The services alone take {format_size(SERVICES_BYTES)}: stop other programs.")
    elif available < 3 * GIB:
        yield Finding(
            "memory", "warn", text, "The demo needs about 2 GiB; models on cpu:0 need their weights, KV and 192 MiB each."
        )
    else:
        yield Finding("memory", "ok", text)


def _shared_memory() -> Iterator[Finding]:
    free = free_shared_memory()
    if free is None:
        yield Finding("shared memory", "fail", f"there is no {SHM}", "Weights are loaded there: mount a tmpfs on it.")
    elif free < 2 * GIB:
        remedy = f"Weights are loaded there. Enlarge it: mount -o remount,size=8G {SHM} (container: --shm-size=8g)."
        yield Finding("shared memory", "warn" if free > GIB // 4 else "fail", f"{format_size(free)} free under {SHM}", remedy)
    else:
        yield Finding("shared memory", "ok", f"{format_size(free)} free under {SHM}")


def _suspending(home: Home) -> Finding:
    """Check whether instances on cpu can be suspended rather than stopped.

    Without that they start cold each time, which is no fault.
    """
    have = swap.swap()
    if have.total < swap.LEAST:
        text = (
            f"{format_size(have.total)} of swap: engines on cpu are stopped, not suspended"
            if have.total
            else "no swap: engines on cpu are stopped, not suspended"
        )
        return Finding("suspend", "warn", text, swap.remedy(home.root, home.existing))
    missing = swap.missing_capabilities()
    if missing:
        text = f"{' and '.join(missing)} missing: engines on cpu are stopped, not suspended"
        return Finding(
            "suspend",
            "warn",
            text,
            f"Run the nodeagent as root, or with them (container: {' '.join(f'--cap-add {c}' for c in missing)}).",
        )
    kind = swap.freezer()
    if kind is None:
        return Finding(
            "suspend",
            "warn",
            "no control groups that may be made here: engines on cpu are stopped, not suspended",
            "Run the nodeagent as root, or delegate a control group to it (systemd: Delegate=yes).",
        )
    return Finding("suspend", "ok", f"by {kind} and {format_size(have.free)} of free swap")


def _gpus() -> Iterator[Finding]:
    try:
        gpus = read_gpus()
    except ImportError:
        yield Finding("gpu", "warn", "cannot be looked for: nvidia-ml-py is not installed", "pip install 'thaw-mesh[node]'")
        return
    except NvmlFailed as e:
        yield Finding("gpu", "warn", f"NVML fails: {e}", "Update the NVIDIA driver, or reboot after an update.")
        return
    if not gpus.driver:
        yield Finding("gpu", "ok", "none with an NVIDIA driver; models run on cpu:0")
    for gpu in gpus.devices:
        memory = f"{format_size(gpu.free_bytes)} of {format_size(gpu.total_bytes)} free"
        yield Finding("gpu", "ok", f"{gpu.device_id} {gpu.name}, {memory}, driver {gpus.driver}")
    if gpus.devices:
        yield _suspending_on_gpus(gpus.driver)


def _suspending_on_gpus(driver: str) -> Finding:
    """True if engines on GPUs can be suspended by CUDA's checkpoint."""
    lacking = "engines on GPUs are stopped, not suspended, but for those that sleep by themselves"
    if int(driver.split(".")[0]) < CHECKPOINT_DRIVER:
        text = f"NVIDIA driver {driver} has no checkpoint calls: {lacking}"
        return Finding("suspend", "warn", text, f"Install driver {CHECKPOINT_DRIVER} or later.")
    try:
        calls = hasattr(import_module("cuda.bindings.driver"), "cuCheckpointProcessLock")
    except ImportError:
        calls = False
    if not calls:
        return Finding("suspend", "warn", f"no cuda-bindings of 12.8 or later: {lacking}", "pip install 'thaw-mesh[cuda]'")
    return Finding("suspend", "ok", "on GPUs by CUDA's checkpoint")


def _port(home: Home) -> Finding:
    try:
        wanted = Wanted()
        endpoints = read_json(home.endpoints_file)
        if running_status(home) is not None and endpoints is not None:
            return Finding("port", "ok", f"the gateway of this mesh is at {endpoints['url']}")
        check_port(wanted.host_or_default, wanted.port_or_default)
    except CommandError as e:
        return Finding("port", "warn", e.what, e.remedy)
    return Finding("port", "ok", f"{wanted.host_or_default}:{wanted.port_or_default} is free for the gateway")


def _own_nats() -> Finding:
    try:
        return Finding("nats", "ok", f"not running; `thaw up` starts {servers.nats_program()}")
    except CommandError as e:
        return Finding("nats", "fail", e.what, e.remedy)


def _own_postgres(home: Home) -> Finding:
    try:
        postgres = servers.locate_postgres(home)
    except CommandError as e:
        return Finding("postgres", "fail", e.what, e.remedy)
    if os.geteuid() != 0:
        return Finding("postgres", "ok", "not running; `thaw up` starts the wheel's")
    if postgres.user is None and unprivileged.namespaces_work():
        return Finding("postgres", "ok", "not running; `thaw up` starts the wheel's, in a user namespace because this is root")
    return Finding(
        "postgres", "warn", f"user namespaces are refused; as root it would run as nobody, with its data in {postgres.data}"
    )


def _leftovers(home: Home) -> Iterator[Finding]:
    if running_status(home) is not None:
        yield Finding("mesh", "ok", f"running under {home.root}")
        return
    left = find_leftovers(home)
    if left:
        what = f"{len(left.processes)} processes and {len(left.segments)} shared-memory segments of a mesh whose supervisor is gone"
        yield Finding("leftovers", "warn", what, "`thaw down` removes them; `thaw up` takes the processes over.")
    else:
        yield Finding("leftovers", "ok", "none")
