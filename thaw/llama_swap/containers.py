"""`docker run …` and `podman run …` as a model with `container`."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import Any

from shared.contracts.models import ENGINE_SOURCE
from thaw.llama_swap.engines import NotTranslatable, Server, arguments_of, engine_of_image
from thaw.units import parse_size

_SHORT = {
    "a": "attach",
    "c": "cpu-shares",
    "d": "detach",
    "e": "env",
    "h": "hostname",
    "i": "interactive",
    "l": "label",
    "m": "memory",
    "p": "publish",
    "P": "publish-all",
    "q": "quiet",
    "t": "tty",
    "u": "user",
    "v": "volume",
    "w": "workdir",
}
_LOGICAL = frozenset({
    "detach", "disable-content-trust", "env-host", "help", "http-proxy", "init", "interactive", "no-healthcheck",
    "no-hostname", "no-hosts", "oom-kill-disable", "passwd", "privileged", "publish-all", "quiet", "read-only",
    "read-only-tmpfs", "replace", "rm", "rmi", "rootfs", "sig-proxy", "tls-verify", "tty", "unsetenv-all",
    "use-api-socket",
})  # fmt: skip
"""Options of docker and podman without a value. All others have one."""
_FALSE = frozenset({"0", "f", "F", "false", "False", "FALSE"})
_DROPPED = frozenset({"rm", "init", "detach", "interactive", "tty", "quiet", "name", "restart", "label"})
"""Options that Thaw decides by itself."""
_REASONS = {
    "ipc": "Thaw sets the size of /dev/shm by container.shm_bytes",
    "network": "Thaw connects the container itself",
    "net": "Thaw connects the container itself",
    "env-file": "write the variables into env",
}


@dataclass
class _Run:
    image: str
    arguments: list[str]
    given: list[tuple[str, str]] = field(default_factory=list)

    def values(self, *names: str) -> list[str]:
        return [value for name, value in self.given if name in names]

    def value(self, name: str) -> str | None:
        return next(reversed(self.values(name)), None)


def is_container(words: Sequence[str]) -> bool:
    return len(words) > 2 and PurePosixPath(words[0]).name in ("docker", "podman") and words[1] == "run"


def container(name: str, words: Sequence[str]) -> Server:
    """Return the command that `docker run …` starts, for the model `name`.

    Raises:
        ValueError: The command has no image.
    """
    run = _parse(words[2:])
    body: dict[str, Any] = {"image": run.image}
    losses = [
        (f"cmd --{name}", _REASONS.get(name, "no counterpart in `container`"))
        for name in dict.fromkeys(n for n, _ in run.given)
        if name not in _DROPPED and name not in _TAKEN
    ]
    server = _server(name, run, body)
    _limits(run, body)
    if variables := dict(map(_variable, run.values("env"))):
        server.options["env"] = variables
    if devices := _devices(run.value("gpus") or ""):
        server.options["placement"] = {"devices": devices}
    server.options["container"] = body
    server.losses += losses
    return server


_TAKEN = frozenset(
    {"publish", "volume", "env", "user", "memory", "shm-size", "runtime", "entrypoint", "cap-add", "pids-limit", "gpus"}
)


def _parse(words: Sequence[str]) -> _Run:
    """Read the options, the image and its arguments as docker does."""
    left = deque(words)
    given: list[tuple[str, str]] = []
    while left and left[0].startswith("-"):
        word = left.popleft()
        if word == "--":
            break
        given += _read_long(word, left) if word.startswith("--") else _read_short(word, left)
    if not left:
        raise ValueError("the command names no image")
    image, *arguments = left
    return _Run(image, arguments, [(name, value) for name, value in given if name not in _LOGICAL or value not in _FALSE])


def _read_long(word: str, left: deque[str]) -> list[tuple[str, str]]:
    name, equals, value = word.removeprefix("--").partition("=")
    return [(name, value if equals or name in _LOGICAL else _read_value(word, left))]


def _read_short(word: str, left: deque[str]) -> list[tuple[str, str]]:
    """Read options of one letter: only the last one of a word can have a value."""
    given: list[tuple[str, str]] = []
    for at, letter in enumerate(word[1:], 2):
        name, rest = _SHORT.get(letter, letter), word[at:]
        if name not in _LOGICAL:
            return [*given, (name, rest.removeprefix("=") if rest else _read_value(word, left))]
        if rest.startswith("="):
            return [*given, (name, rest[1:])]
        given.append((name, ""))
    return given


def _read_value(option: str, left: deque[str]) -> str:
    if not left:
        raise ValueError(f"{option} has no value")
    return left.popleft()


def _server(name: str, run: _Run, body: dict[str, Any]) -> Server:
    """Return engine, source and options from the arguments of the image."""
    ports = [publish.rpartition(":")[2].partition("/")[0] for publish in run.values("publish")]
    if ports:
        body["port"] = int(ports[0])
    volumes = [tuple(volume.split(":")) for volume in run.values("volume")]
    mounts = [v for v in volumes if len(v) > 1 and v[0].startswith("/") and v[1].startswith("/")]
    engine = engine_of_image(run.image)
    try:
        if engine is None or run.value("entrypoint"):
            raise NotTranslatable("an image of another server")
        server = arguments_of(engine, run.arguments)
        source = str(server.options["source"])
        if source.startswith("/"):
            server.options["source"], used = _on_host(source, mounts)
            mounts.remove(used)
    except NotTranslatable as e:
        server = Server("openai", {"source": f"{ENGINE_SOURCE}{name}"})
        body["args"] = run.arguments
        if entrypoint := run.value("entrypoint"):
            body["entrypoint"] = [entrypoint]
        server.losses.append(("cmd", f"kept as arguments of the container, because {e}"))
    for volume in (v for v in volumes if len(v) < 2 or not (v[0].startswith("/") and v[1].startswith("/"))):
        server.losses.append(
            (
                "cmd --volume",
                f"{':'.join(volume)} does not name a host path and a container path: write /host:/inside into container.mounts",
            )
        )
    if mounts:
        body["mounts"] = [":".join((*mount[:2], "ro" if mount[2:] and "ro" in mount[2].split(",") else "rw")) for mount in mounts]
    return server


def _variable(entry: str) -> tuple[str, str]:
    """Return name and value of `--env`. Without a value it is the variable of the node."""
    name, equals, value = entry.partition("=")
    return name, value if equals else f"${{{name}}}"


def _on_host(path: str, mounts: Sequence[tuple[str, ...]]) -> tuple[str, tuple[str, ...]]:
    """Return the host's path of the container's `path`, and the mount that has it."""
    for mount in mounts:
        if PurePosixPath(path).is_relative_to(mount[1]):
            return str(PurePosixPath(mount[0]) / PurePosixPath(path).relative_to(mount[1])), mount
    raise NotTranslatable(f"{path} is inside the image")


def _limits(run: _Run, body: dict[str, Any]) -> None:
    for option, key in (("shm-size", "shm_bytes"), ("memory", "memory_limit_bytes")):
        if size := run.value(option):
            body[key] = parse_size(size)
    for option in ("runtime", "user"):
        if text := run.value(option):
            body[option] = text
    if run.values("cap-add"):
        body["capabilities"] = run.values("cap-add")
    if limit := run.value("pids-limit"):
        body["pids_limit"] = int(limit)


def _devices(gpus: str) -> list[str]:
    """Return the devices of `--gpus device=0,1`; none for all of them."""
    numbers = gpus.strip("\"'").removeprefix("device=").split(",")
    return [f"cuda:{number}" for number in numbers] if all(number.isdigit() for number in numbers) else []
