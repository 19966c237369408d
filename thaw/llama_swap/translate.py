"""Translate the keys of a llama-swap configuration into those of a thaw.yaml.

Every fault is found before anything is written.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from shared.contracts.models import NAME_PATTERN
from thaw.config.faults import ConfigError
from thaw.config.faults import Path as KeyPath
from thaw.config.tree import Tree, read_tree
from thaw.llama_swap.containers import container, is_container
from thaw.llama_swap.document import Draft, Loss, ModelDraft
from thaw.llama_swap.engines import NotTranslatable, Server, own_command, recognise
from thaw.llama_swap.macros import MacroError, Macros
from thaw.llama_swap.words import split, without_comments

_MIN_HEALTH_TIMEOUT_S = 15
_FILE_KEYS = frozenset({"models", "macros", "apiKeys", "globalTTL", "healthCheckTimeout", "groups", "matrix", "routing", "hooks"})
_FILE_LOSSES = {
    "captureBuffer": "Thaw keeps no request bodies",
    "includeAliasesInList": "GET /v1/models lists registered names only",
    "listen": "set mesh.host and mesh.port",
    "logLevel": "THAW_LOG_LEVEL in mesh.environment",
    "logTimeFormat": "logs are JSON with ISO timestamps",
    "logToStdout": "`thaw logs NAME` shows each process's log",
    "matrix": "Thaw computes which models fit from their memory; pin, priority and placement constrain it",
    "metricsMaxInMemory": "Thaw exports metrics at /metrics",
    "peers": "run a node of the mesh on each machine instead (docs/operations.md)",
    "performance": "Thaw exports metrics at /metrics",
    "profiles": "use aliases",
    "selectors": "use aliases, or replicas of one model",
    "sendLoadingState": "a waiting stream receives SSE comments",
    "startPort": "Thaw chooses the ports",
    "store": "Thaw keeps traces in NATS",
    "tailcat": "set mesh.host and api_keys",
    "ui": "Thaw's console is at /ui",
    "unloadTimeout": "stop_signal, then SIGKILL after a fixed time",
    "upstream": "Thaw has no /upstream endpoint",
}
_MODEL_KEYS = frozenset(
    {"cmd", "env", "ttl", "aliases", "macros", "checkEndpoint", "concurrencyLimit", "proxy", "cmdStop", "capabilities"}
)
_MODEL_LOSSES = {
    "compat": "Thaw passes no websockets through",
    "description": "GET /v1/models has no description",
    "filters": "Thaw passes parameters through unchanged; clients set them",
    "metadata": "GET /v1/models has no metadata",
    "name": "GET /v1/models shows the model's ID",
    "sendLoadingState": "a waiting stream receives SSE comments",
    "timeouts": "response_timeout and queue.timeout limit a request as a whole",
    "unlisted": "GET /v1/models lists every model",
    "unloadTimeout": "stop_signal, then SIGKILL after a fixed time",
}
_MEMORY_HINT = "bytes of its device that one instance needs, as 8GiB; Thaw reads no files of this model"
_CONTEXT_HINT = "context in tokens, as 8192; Thaw reads no files of this model"


def translate(text: str, file: str, environment: Mapping[str, str], memory: str | None = None) -> Draft:
    """Translate a llama-swap configuration.

    Args:
        text: The configuration.
        file: Its name, for faults.
        environment: Variables for `${env.NAME}`.
        memory: Size for models whose memory Thaw cannot compute; None leaves it to a person.

    Raises:
        ConfigError: The file is not one that llama-swap would load; every fault is named with its
            line.
    """
    tree = read_tree(text)
    draft = _Translation(tree, environment, memory).run() if not tree.faults else Draft()
    if tree.faults:
        raise ConfigError(file, tree.faults, "Correct them; llama-swap's config.example.yaml shows every key.")
    return draft


class _Translation:
    """Walks one configuration; faults gather in its tree."""

    def __init__(self, tree: Tree, environment: Mapping[str, str], memory: str | None) -> None:
        self._tree = tree
        self._memory = memory
        self._environment = environment
        self._draft = Draft()
        self._programs: dict[str, str] = {}
        self._macros: dict[str, Any] = {}
        self._names: dict[str, str] = {}

    def run(self) -> Draft:
        root = self._tree.value
        if not isinstance(root, dict) or not isinstance(root.get("models"), dict) or not root["models"]:
            self._tree.fault(("models",), "llama-swap needs a mapping `models:` with at least one model")
            return self._draft
        self._macros = self._mapping(root, "macros")
        self._file_keys(root)
        for name, entry in root["models"].items():
            if not isinstance(entry, dict) or not isinstance(entry.get("cmd"), str) or not entry["cmd"].strip():
                self._tree.fault(("models", name), "must be a mapping with `cmd`, the command that starts the server")
                continue
            try:
                self._draft.models.append(self._model(name, entry))
            except (MacroError, ValueError) as e:
                self._tree.fault(("models", name), str(e))
        self._routing(root)
        if self._programs:
            self._draft.mesh["environment"] = dict(sorted(self._programs.items()))
        return self._draft

    def _mapping(self, holder: Mapping[str, Any], key: str, path: KeyPath = ()) -> dict[str, Any]:
        found = holder.get(key) or {}
        if not isinstance(found, dict):
            self._tree.fault((*path, key), "must be a mapping")
            return {}
        return found

    def _read_whole(self, holder: Mapping[str, Any], key: str, path: KeyPath = ()) -> int | None:
        found = holder.get(key)
        if found is None or (isinstance(found, int) and not isinstance(found, bool)):
            return found
        self._tree.fault((*path, key), f"given {found!r}; allowed: a whole number")
        return None

    # The file's own keys

    def _file_keys(self, root: Mapping[str, Any]) -> None:
        draft = self._draft
        draft.mesh["port"] = 8080  # llama-swap's own default
        if keys := self._keys(root.get("apiKeys")):
            draft.mesh["api_keys"] = keys
        ttl = self._read_whole(root, "globalTTL") or 0
        draft.defaults["keep_alive"] = _keep_alive(ttl)
        if limit := self._read_whole(root, "healthCheckTimeout"):
            draft.defaults["init_timeout"] = f"{max(limit, _MIN_HEALTH_TIMEOUT_S)}s"
        for key in root:
            if key in _FILE_LOSSES:
                draft.losses.append(Loss(key, _FILE_LOSSES[key]))
            elif key not in _FILE_KEYS:
                draft.losses.append(Loss(key, "unknown key"))

    def _keys(self, value: Any) -> list[str]:
        if value is None:
            return []
        if not isinstance(value, list):
            self._tree.fault(("apiKeys",), "must be a list of keys")
            return []
        found = []
        for number, key in enumerate(value):
            if "${env." in str(key):  # secrets stay out of files
                self._draft.losses.append(
                    Loss(f"apiKeys[{number}]", f"{key}: give it to `thaw up` as THAW_API_KEYS, or use `thaw keys add`")
                )
            else:
                found.append(str(key))
        return found

    # One model

    def _model(self, given: str, entry: Mapping[str, Any]) -> ModelDraft:
        path: KeyPath = ("models", given)
        macros = Macros({**self._macros, **self._mapping(entry, "macros", path)}, self._environment, given)
        draft = ModelDraft({"name": self._name(given, path)})
        words = split(str(macros.expand(without_comments(entry["cmd"]))))
        if not words:
            raise ValueError("cmd has no command")
        server = self._server(draft.options["name"], words)
        draft.options |= {"engine": server.engine, **server.options}
        for key, reason in server.losses:
            draft.losses.append(Loss(f"models.{given}.{key}", reason))
        self._aliases(draft, given, macros.expand(entry.get("aliases") or []))
        self._variables(draft, given, macros.expand(entry.get("env") or [], keep_environment=True))
        ttl = self._read_whole(entry, "ttl", path)
        if ttl is not None and ttl >= 0 and _keep_alive(ttl) != self._draft.defaults["keep_alive"]:
            draft.options["keep_alive"] = _keep_alive(ttl)
        if limit := self._read_whole(entry, "concurrencyLimit", path):
            draft.options["queue"] = {"max_waiting": limit}
        self._health(draft, server, given, macros.expand(entry.get("checkEndpoint")))
        self._capabilities(draft, server, self._mapping(entry, "capabilities", path), given)
        self._losses(draft, server, given, entry)
        self._set_required(draft)
        return draft

    def _name(self, given: str, path: KeyPath) -> str:
        """Return a name that Thaw accepts, and remember it."""
        name = given
        if not re.fullmatch(NAME_PATTERN, given):
            name = re.sub(r"[^A-Za-z0-9._/@-]", "-", given).lstrip("._/@-")[:200] or "model"
            self._draft.losses.append(Loss(f"models.{given}", f"the name has characters that Thaw's names do not: now {name}"))
        if name in self._names.values():
            self._tree.fault(path, f"given {given!r}; {name} is a model's name or alias already")
        self._names[given] = name
        return name

    def _server(self, name: str, words: list[str]) -> Server:
        if is_container(words):
            return container(name, words)
        try:
            server = recognise(words)
        except NotTranslatable as e:
            server = own_command(name, words)
            server.losses.append(("cmd", f"kept as a command, because {e}"))
            return server
        if server is None:
            return own_command(name, words)
        if server.program is not None:
            setting, program = server.program
            if not program:
                self._unknown_program(setting, words[0])
            elif self._programs.setdefault(setting, program) != program:
                server = own_command(name, words)
                server.losses.append(("cmd", f"kept as a command, because {setting} is {self._programs[setting]}"))
        return server

    def _unknown_program(self, setting: str, word: str) -> None:
        loss = Loss("cmd", f"set {setting} in mesh.environment to the full path of {_PROGRAMS.get(setting, word)}")
        if loss not in self._draft.losses:
            self._draft.losses.append(loss)

    def _aliases(self, draft: ModelDraft, given: str, aliases: Any) -> None:
        if not isinstance(aliases, list):
            self._tree.fault(("models", given, "aliases"), "must be a list of names")
            return
        kept = []
        for alias in map(str, aliases):
            if not re.fullmatch(NAME_PATTERN, alias):
                draft.losses.append(Loss(f"models.{given}.aliases", f"{alias} has characters that Thaw's names do not"))
            else:
                kept.append(alias)
        if kept:
            draft.options["aliases"] = kept

    def _variables(self, draft: ModelDraft, given: str, entries: Any) -> None:
        if not isinstance(entries, list) or not all("=" in str(entry) for entry in entries):
            self._tree.fault(("models", given, "env"), 'must be a list of "NAME=value"')
            return
        variables = dict(str(entry).split("=", 1) for entry in entries)
        if (visible := variables.pop("CUDA_VISIBLE_DEVICES", None)) is not None:
            numbers = visible.split(",")
            if all(number.strip().isdigit() for number in numbers):
                draft.options["placement"] = {"devices": [f"cuda:{number.strip()}" for number in numbers]}
            else:
                draft.losses.append(Loss(f"models.{given}.env", f"CUDA_VISIBLE_DEVICES={visible}: set placement.devices"))
        if variables:
            draft.options["env"] = {**draft.options.get("env", {}), **variables}

    def _health(self, draft: ModelDraft, server: Server, given: str, endpoint: Any) -> None:
        if endpoint == "none":
            draft.losses.append(Loss(f"models.{given}.checkEndpoint", "Thaw always waits for a path that answers 200"))
            endpoint = None
        if server.engine == "openai":
            draft.options["health"] = str(endpoint or "/health")
        elif endpoint and str(endpoint) != "/health":
            draft.options["health"] = str(endpoint)

    def _capabilities(self, draft: ModelDraft, server: Server, found: Mapping[str, Any], given: str) -> None:
        if isinstance(context := found.get("context"), int) and context > 0:
            draft.options.setdefault("max_model_len", context)
        if found.get("reranker") and server.engine == "openai":
            draft.options["routes"] = ["/v1/rerank"]
        rest = sorted(found.keys() - {"context", "reranker"})
        if rest:
            draft.losses.append(Loss(f"models.{given}.capabilities", f"GET /v1/models shows no {', '.join(rest)}"))

    def _losses(self, draft: ModelDraft, server: Server, given: str, entry: Mapping[str, Any]) -> None:
        where = f"models.{given}"
        for key in entry:
            if key in _MODEL_LOSSES:
                draft.losses.append(Loss(f"{where}.{key}", _MODEL_LOSSES[key]))
            elif key == "useModelName":
                draft.losses.append(Loss(f"{where}.{key}", f"Thaw sends the engine the name {draft.options['name']}"))
            elif key not in _MODEL_KEYS:
                draft.losses.append(Loss(f"{where}.{key}", "unknown key"))
        if "cmdStop" in entry and "container" not in draft.options:
            draft.losses.append(Loss(f"{where}.cmdStop", "set stop_signal; SIGKILL follows"))
        proxy = str(entry.get("proxy") or "")
        if not any("{port}" in word or "{socket}" in word for word in draft.options.get("command", ("{port}",))):
            reason = f"Thaw chooses the port: write {{port}} into command where the server takes it ({proxy or 'no proxy given'})"
            draft.losses.append(Loss(f"{where}.proxy", reason))

    def _set_required(self, draft: ModelDraft) -> None:
        if str(draft.options["source"]).startswith("engine://"):
            if self._memory is not None:
                draft.options["memory"] = self._memory
            for key, hint in (("memory", _MEMORY_HINT), ("max_model_len", _CONTEXT_HINT)):
                if key not in draft.options:
                    draft.missing[key] = hint

    # Keys about several models

    def _routing(self, root: Mapping[str, Any]) -> None:
        routing = self._mapping(root, "routing")
        router = self._mapping(self._mapping(routing, "router"), "settings")
        scheduler = self._mapping(self._mapping(routing, "scheduler"), "settings")
        for where, groups in (("groups", self._mapping(root, "groups")), ("routing.groups", self._mapping(router, "groups"))):
            for name, group in groups.items():
                self._group(f"{where}.{name}", group if isinstance(group, dict) else {})
        if "matrix" in router:
            self._draft.losses.append(Loss("routing.matrix", _FILE_LOSSES["matrix"]))
        for name, priority in self._mapping(self._mapping(scheduler, "fifo"), "priority").items():
            if (model := self._find(name)) is not None and isinstance(priority, int):
                model.options["priority"] = max(-100, min(100, priority))
        startup = self._mapping(self._mapping(root, "hooks"), "on_startup")
        for name in startup.get("preload") or []:
            if (model := self._find(str(name))) is not None:
                model.options["park"] = True
        if startup.get("profile"):
            self._draft.losses.append(Loss("hooks.on_startup.profile", _FILE_LOSSES["profiles"]))

    def _group(self, where: str, group: Mapping[str, Any]) -> None:
        members = [model for name in group.get("members") or [] if (model := self._find(str(name))) is not None]
        if group.get("persistent"):
            for model in members:
                model.options["pin"] = True
        rules = [key for key in ("swap", "exclusive") if group.get(key, True)]
        if rules:
            reason = "Thaw evicts idle models only where memory is needed; pin, priority and placement constrain it"
            self._draft.losses.append(Loss(where, f"{' and '.join(rules)}: {reason}"))

    def _find(self, given: str) -> ModelDraft | None:
        name = self._names.get(given)
        found = next((model for model in self._draft.models if model.options["name"] == name), None)
        if found is None and not self._tree.faults:
            self._draft.losses.append(Loss(given, "named under routing or hooks, but no model has this ID"))
        return found


_PROGRAMS = {
    "THAW_LLAMACPP_SERVER": "llama-server",
    "THAW_VLLM_PYTHON": "the Python that has vLLM",
    "THAW_SGLANG_PYTHON": "the Python that has SGLang",
}


def _keep_alive(ttl: int) -> str | int:
    """Return a ttl in seconds as Thaw's keep_alive: 0 means never in llama-swap."""
    return -1 if ttl <= 0 else f"{ttl}s"
