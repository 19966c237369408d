"""The driver interface, and the behaviour that OpenAI-compatible engines share."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from services.enginehost.drivers.token_api import TokenApi
from services.enginehost.http1 import Client, HttpError, HttpRequest, json_request
from services.enginehost.settings import HostSettings
from shared.contracts.inference import FairShare
from shared.contracts.models import ENGINE_SOURCE, ModelCard
from shared.contracts.phases import Phase
from shared.errors import InvalidModel, UnsupportedParameter

OnProgress = Callable[[Phase, float], None]
"""Receives `(phase, completed share)` during preparation."""
PROBE_TOKENS = 4
PROBE_PROMPT = "Hello"


@dataclass(frozen=True)
class Rank:
    """The place of an engine among the engines of several nodes that compute together.

    Attributes:
        index: Number of the rank; rank 0 answers requests.
        count: Number of ranks.
        address: Address of the first rank's node.
        port: Port of the first rank's engine, at which all ranks meet.
        own_address: This node's address.
    """

    index: int
    count: int
    address: str
    port: int
    own_address: str


@dataclass(frozen=True)
class Launch:
    """The parameters of an engine's command line.

    Attributes:
        card: The model.
        device: Its device, or the first of `devices`.
        kv_bytes: Size of the KV cache.
        host: Address at which the engine listens.
        port: Port at which the engine listens.
        key: API key that the engine has to require, if it can.
        settings: Settings of the host process.
        threads: Threads that compute on a cpu device.
        devices: All devices, if there are several.
        socket: Unix socket that the engine is reached by; empty if it is reached by a port.
        is_private: No other user of the machine can reach the engine.
        directory: Directory of the sockets that the engine creates, removed with the engine; empty:
            none.
        log: Path of the instance's log.
        rank: Its place among several nodes; None: the engine runs on this node alone.
    """

    card: ModelCard
    device: str
    kv_bytes: int
    host: str
    port: int
    key: str
    settings: HostSettings
    threads: int = 0
    devices: tuple[str, ...] = ()
    socket: str = ""
    is_private: bool = False
    directory: str = ""
    log: str = ""
    rank: Rank | None = None

    @property
    def gpus(self) -> list[str]:
        """Numbers of the engine's GPUs."""
        return [d.removeprefix("cuda:") for d in self.devices or (self.device,)] if self.on_cuda else []

    @property
    def on_cuda(self) -> bool:
        return self.device.startswith("cuda:")

    @property
    def model(self) -> str:
        """The model argument of the engine: a path, or a name that the engine knows."""
        source = self.card.info.source
        if source.startswith(ENGINE_SOURCE):
            return source.removeprefix(ENGINE_SOURCE)
        return source.removeprefix("hf://").rpartition("@")[0] or source.removeprefix("hf://") if self.remote else source

    @property
    def remote(self) -> bool:
        """True if the engine has to download the model from the hub itself."""
        return self.card.info.source.startswith("hf://")

    @property
    def revision(self) -> str:
        return self.card.info.source.rpartition("@")[2] if self.remote and "@" in self.card.info.source else ""

    def fill(self, text: str) -> str:
        """Replace {model}, {name}, {host}, {port} and {socket} in `text`; other braces stay."""
        known = {"model": self.model, "name": self.card.name, "host": self.host, "port": str(self.port), "socket": self.socket}
        for name, value in known.items():
            text = text.replace("{" + name + "}", value)
        return text


@dataclass(frozen=True)
class Command:
    """Program and arguments, and additions to the environment."""

    argv: tuple[str, ...]
    env: Mapping[str, str] = field(default_factory=dict)


class Driver:
    """An engine with an OpenAI-compatible port.

    The methods are those of an engine with a `command` of the operator; a subclass for each engine
    overrides those in which it differs.
    """

    health_path = "/health"
    stream_usage = True
    """True if the engine supports `stream_options.include_usage`."""
    location_variables: tuple[str, ...] = ()
    """The node's variables with the path of the engine's program or Python interpreter."""
    module = ""
    """The engine's Python package; empty if it is no Python program."""
    program = ""
    """The module that the interpreter runs; a spare interpreter has imported it."""
    isolates = True
    """True if the engine has its own network namespace by default: it talks only to its host."""

    def __init__(self, launch: Launch) -> None:
        self.launch = launch

    @property
    def takes_socket(self) -> bool:
        """True if an engine started by `command` listens on a Unix socket."""
        return False

    @classmethod
    def spare_command(cls, settings: HostSettings) -> Command | None:
        """Command and environment of a spare interpreter; None: not supported."""
        return None

    @property
    def tokens(self) -> TokenApi | None:
        """How the engine accepts and reports token ids, so that responses can be resumed.

        None if it does not.
        """
        return None

    @property
    def caches_prefixes(self) -> bool:
        """True if a request reuses the computed prefix of an earlier one."""
        return False

    @property
    def lowest_priority_fields(self) -> Mapping[str, Any]:
        """Request fields for the lowest priority; empty if the engine has no priorities."""
        return {}

    @property
    def salts_prefixes(self) -> bool:
        """True if requests with different `cache_salt` share no prefix of the engine's cache."""
        return False

    def share_fields(self, share: FairShare) -> dict[str, Any]:
        """Request fields for a fair share; empty if the engine cannot apply shares."""
        return {}

    @property
    def card(self) -> ModelCard:
        return self.launch.card

    @property
    def served_name(self) -> str:
        """The model's name in requests to the engine."""
        return self.card.name

    def command(self) -> Command:
        """The command of an engine process, if the model specifies none."""
        raise InvalidModel(f"{self.card.name}: engine {self.card.spec.engine} needs a command")

    def install_hint(self, log_tail: str) -> str:
        """Advice if the end of the log shows that the engine is not installed; else empty."""
        spec = self.card.spec
        if spec.command or spec.container is not None or not self.location_variables:
            return ""
        lacks_module = self.module and re.search(rf"No module named '?{self.module}\b", log_tail)
        if not lacks_module and "cannot be started: " not in log_tail:
            return ""
        return (
            f"\n{spec.engine} is not installed on this node: set {' or '.join(self.location_variables)} to its location, in the environment of "
            "`thaw up` or in thaw.yaml under mesh.environment"
        )

    def arguments(self) -> tuple[str, ...]:
        """Container arguments, for images that take the server's arguments."""
        raise InvalidModel(f"{self.card.name}: set container.args; engine {self.card.spec.engine} has no arguments of its own")

    def environment(self) -> dict[str, str]:
        """Environment variables of the engine, whatever its command."""
        return {}

    def headers(self) -> dict[str, str]:
        """Headers of every request to the engine."""
        return {"authorization": f"Bearer {self.launch.key}"} if self.launch.key else {}

    @property
    def health(self) -> str:
        return self.card.spec.health or self.health_path

    @property
    def sleep_levels(self) -> tuple[int, ...]:
        """Levels of `SleepEngine` beyond 0 that the engine supports on this device."""
        return ()

    async def is_healthy(self, client: Client) -> bool:
        try:
            status, _ = await client.ask(HttpRequest("GET", self.health))
        except HttpError:
            return False
        return 200 <= status < 300

    async def prepare(self, client: Client, on_progress: OnProgress) -> None:
        """Prepare a healthy engine for its first token: for example, have it download the model."""

    def name_of(self, adapter: ModelCard | None) -> str:
        """The name of a LoRA adapter (None: the model itself) in requests to the engine."""
        return self.served_name if adapter is None else adapter.name

    def body(self, body: Mapping[str, Any], adapter: ModelCard | None = None) -> dict[str, Any]:
        """Return a client's request body as the host sends it to the engine.

        Args:
            body: The client's request body.
            adapter: The LoRA adapter that generates the response; None: the model itself.
        """
        return {**body, "model": self.name_of(adapter)}

    def probes(self, tokens: int = PROBE_TOKENS) -> list[HttpRequest]:
        """Return requests that prove that the engine works, in the order to try.

        The next one is tried after a 404 or 405.

        Args:
            tokens: The number of tokens to generate, at most.
        """
        if self.card.info.task == "embed":
            return [json_request("/v1/embeddings", {"model": self.served_name, "input": PROBE_PROMPT})]
        asked = {"model": self.served_name, "max_tokens": tokens, "temperature": 0, "stream": False}
        completion = json_request("/v1/completions", {**asked, "prompt": PROBE_PROMPT})
        chat = json_request("/v1/chat/completions", {**asked, "messages": [{"role": "user", "content": PROBE_PROMPT}]})
        return [completion, chat]

    @property
    def adapter_slots(self) -> int:
        """Number of LoRA adapters that the engine can hold; 0: it serves none."""
        return 0

    async def load_adapter(self, client: Client, name: str, directory: Path) -> None:
        """Have the engine load a LoRA adapter, which requests then name as their model.

        Raises:
            InvalidModel: The engine refuses it.
            EngineFailed: The engine does not answer.
        """
        raise UnsupportedParameter(f"Engine {self.card.spec.engine} serves no LoRA adapters", param="model")

    async def unload_adapter(self, client: Client, name: str) -> None:
        """Have the engine unload a LoRA adapter. Raises `EngineFailed`."""
        raise UnsupportedParameter(f"Engine {self.card.spec.engine} serves no LoRA adapters", param="model")

    @property
    def changes_model(self) -> bool:
        """True if the running engine can serve another model of its template key."""
        return False

    async def change_model(self, client: Client, asleep: int) -> None:
        """Have the engine serve this driver's model in place of its present one.

        Args:
            client: Client of the running engine.
            asleep: The level at which the engine sleeps; 0: it is awake. Afterwards it is awake.

        Raises:
            EngineFailed: The engine does not serve the model, and may no longer serve any.
        """
        raise UnsupportedParameter(f"Engine {self.card.spec.engine} cannot change its model", param="model")

    async def sleep(self, client: Client, level: int) -> None:
        raise UnsupportedParameter(f"Engine {self.card.spec.engine} has no sleep level {level}", param="level")

    async def wake(self, client: Client, level: int) -> None:
        raise UnsupportedParameter(f"Engine {self.card.spec.engine} has no sleep level {level}", param="level")


def flags(arguments: Mapping[str, Any], *, underscores: bool = False, no_prefix: bool = True) -> list[str]:
    """Return `engine_args` as command-line options.

    true becomes --name, false --no-name (or nothing), a list its values, a mapping JSON.

    Args:
        arguments: Names and values; an option with the value None is omitted.
        underscores: Names keep their underscores.
        no_prefix: The engine knows --no-name.
    """
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
