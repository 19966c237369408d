"""The port that engines are driven through, and what OpenAI-compatible ones have in common."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from services.enginehost.drivers.token_api import TokenApi
from services.enginehost.http1 import Client, HttpError, HttpRequest, json_request
from services.enginehost.settings import HostSettings
from shared.contracts.models import ENGINE_SOURCE, ModelCard
from shared.contracts.phases import Phase
from shared.errors import InvalidModel, UnsupportedParameter

Told = Callable[[Phase, float], None]
"""`(phase, share of it that is done)`, for preparations that can tell."""
PROBE_TOKENS = 4
PROBE_PROMPT = "Hello"


@dataclass(frozen=True)
class Launch:
    """What a driver makes a command line of. `key`: a secret that the engine is to ask of its callers, where it can."""

    card: ModelCard
    device: str
    kv_bytes: int
    host: str
    port: int
    key: str
    settings: HostSettings
    threads: int = 0
    devices: tuple[str, ...] = ()
    """All of its devices, where there are several."""
    socket: str = ""
    """Unix socket that it is reached by; empty where it is reached by a port."""
    is_private: bool = False
    """Whether no other user of the machine reaches it."""

    @property
    def gpus(self) -> list[str]:
        """Numbers of the GPUs that it has."""
        return [d.removeprefix("cuda:") for d in self.devices or (self.device,)] if self.on_cuda else []

    @property
    def on_cuda(self) -> bool:
        return self.device.startswith("cuda:")

    @property
    def model(self) -> str:
        """What the engine is told to serve: a path, or the name by which it knows the model."""
        source = self.card.info.source
        if source.startswith(ENGINE_SOURCE):
            return source.removeprefix(ENGINE_SOURCE)
        return source.removeprefix("hf://").rpartition("@")[0] or source.removeprefix("hf://") if self.remote else source

    @property
    def remote(self) -> bool:
        """Whether the engine has to fetch the model from the hub itself."""
        return self.card.info.source.startswith("hf://")

    @property
    def revision(self) -> str:
        return self.card.info.source.rpartition("@")[2] if self.remote and "@" in self.card.info.source else ""

    def fill(self, text: str) -> str:
        """`text` with {model}, {name}, {host}, {port} and {socket} filled in; other braces stay."""
        known = {"model": self.model, "name": self.card.name, "host": self.host, "port": str(self.port), "socket": self.socket}
        for name, value in known.items():
            text = text.replace("{" + name + "}", value)
        return text


@dataclass(frozen=True)
class Command:
    """Program and arguments, and what is added to its environment."""

    argv: tuple[str, ...]
    env: Mapping[str, str] = field(default_factory=dict)


class Driver:
    """An engine that opens an OpenAI-compatible port. Each method states what is the same for most of them."""

    health_path = "/health"
    stream_usage = True
    """Whether `stream_options.include_usage` is understood."""
    found_by: tuple[str, ...] = ()
    """The node's variables that say where its program is, or the interpreter that has its `module`."""
    module = ""
    program = ""
    """The module that an interpreter of it runs: one in waiting has that imported."""

    isolates = True
    """Whether it runs in a network of its own, unless the model says otherwise: it speaks to nobody but its host."""

    @property
    def takes_socket(self) -> bool:
        """Whether the engine listens on a Unix socket where it is started by `command`; else on a port."""
        return False

    @classmethod
    def in_waiting(cls, settings: HostSettings) -> Command | None:
        """Interpreter and module of an engine that may wait with its imports done, and what of the environment they read; None: it may not."""
        return None

    @property
    def tokens(self) -> TokenApi | None:
        """How it takes prompts as token ids and tells those that it generates: then another engine can go on with its answers, and it with
        theirs. None: it does not."""
        return None

    @property
    def caches_prefixes(self) -> bool:
        """Whether what it has computed of a sequence is found again by a request that begins with it."""
        return False

    @property
    def last(self) -> Mapping[str, Any]:
        """Fields of a request that all others go before; none where the engine takes them as they come."""
        return {}

    def __init__(self, launch: Launch) -> None:
        self.launch = launch

    @property
    def card(self) -> ModelCard:
        return self.launch.card

    @property
    def served_name(self) -> str:
        """The model's name in requests to the engine."""
        return self.card.name

    def command(self) -> Command:
        """How the engine is started as a process, where the model has no `command` of its own."""
        raise InvalidModel(f"{self.card.name}: engine {self.card.spec.engine} needs a command")

    def not_here(self, words: str) -> str:
        """What to do if an engine's last words say that it is not installed where it was looked for; else nothing."""
        spec = self.card.spec
        lacks = self.module and re.search(rf"No module named '?{self.module}\b", words)
        if spec.command or spec.container is not None or not self.found_by or not (lacks or "cannot be started: " in words):
            return ""
        return (
            f"\n{spec.engine} is not there: say where this node has it with {' or '.join(self.found_by)}, in the environment of "
            "`thaw up` or in thaw.yaml under mesh.environment"
        )

    def arguments(self) -> tuple[str, ...]:
        """What an image's entrypoint gets, for engines whose official image takes the server's arguments."""
        raise InvalidModel(f"{self.card.name}: say container.args; engine {self.card.spec.engine} has no arguments of its own")

    def environment(self) -> dict[str, str]:
        """Variables of the engine, whatever its command."""
        return {}

    def headers(self) -> dict[str, str]:
        """Of every request to the engine."""
        return {"authorization": f"Bearer {self.launch.key}"} if self.launch.key else {}

    @property
    def health(self) -> str:
        return self.card.spec.health or self.health_path

    @property
    def sleep_levels(self) -> tuple[int, ...]:
        """Levels of `SleepEngine` beyond 0 that the engine has on this device."""
        return ()

    async def healthy(self, client: Client) -> bool:
        try:
            status, _ = await client.ask(HttpRequest("GET", self.health))
        except HttpError:
            return False
        return 200 <= status < 300

    async def prepare(self, client: Client, told: Told) -> None:
        """What is to be done between health and the first token, such as a download into the engine's own store."""

    def body(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """A client's request as the engine is to get it."""
        return {**body, "model": self.served_name}

    def probes(self) -> list[HttpRequest]:
        """Requests whose answer proves the engine, in the order to try: a 404 or 405 leads to the next."""
        if self.card.info.task == "embed":
            return [json_request("/v1/embeddings", {"model": self.served_name, "input": PROBE_PROMPT})]
        asked = {"model": self.served_name, "max_tokens": PROBE_TOKENS, "temperature": 0, "stream": False}
        completion = json_request("/v1/completions", {**asked, "prompt": PROBE_PROMPT})
        chat = json_request("/v1/chat/completions", {**asked, "messages": [{"role": "user", "content": PROBE_PROMPT}]})
        return [completion, chat]

    async def sleep(self, client: Client, level: int) -> None:
        raise UnsupportedParameter(f"engine {self.card.spec.engine} has no sleep level {level}", param="level")

    async def wake(self, client: Client, level: int) -> None:
        raise UnsupportedParameter(f"engine {self.card.spec.engine} has no sleep level {level}", param="level")


def flags(arguments: Mapping[str, Any], *, underscores: bool = False, no_prefix: bool = True) -> list[str]:
    """`engine_args` as command-line options: true is --name, false --no-name (or nothing), a list its values, a mapping JSON."""
    found: list[str] = []
    for key, value in arguments.items():
        name = "--" + (key if underscores else key.replace("_", "-"))
        if value is None:
            continue
        if isinstance(value, bool):
            if value:
                found.append(name)
            elif no_prefix:
                found.append(name.replace("--", "--no-", 1))
        elif isinstance(value, list | tuple):
            found += [name, *map(str, value)]
        elif isinstance(value, Mapping):
            found += [name, json.dumps(value)]
        else:
            found += [name, str(value)]
    return found
