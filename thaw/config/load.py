"""Parse the text of thaw.yaml into the input of `thaw up` and `thaw models add`.

Every fault is found before any of the input is used.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from shared.contracts.keys import HASH_PATTERN, NewKey
from shared.contracts.models import ENGINE_SOURCE, ModelOptions, ModelSpec, strip_credentials
from shared.contracts.prices import Prices
from shared.device_list import PAGE_BYTES, SEPARATE, parse_devices, parse_rate
from shared.model_paths import resolve_model
from shared.policies import policy_names
from thaw.config.credentials import expand, expand_mesh, expiry_of, names_in_mesh, names_of
from thaw.config.faults import EXAMPLE, ConfigError, Fault, message_of, unknown_key
from thaw.config.faults import Path as KeyPath
from thaw.config.tree import Tree, read_tree
from thaw.errors import CommandError
from thaw.units import parse_duration, parse_size

NODE_PATTERN = r"[a-z0-9][a-z0-9-]{0,62}"
"""The form of a node's name (`NodeSettings.node`)."""
HUB_PATTERN = r"hf://\w[\w.-]*/\w[\w.-]*(@\w[\w./-]*)?"
REMOTE_PATTERN = r"https?://[^/\s]+(/\S*)?|(s3|gs|az)://\w[\w.-]*(/[^\s?#]*)?"
DEVICE_PATTERN = r"^(cpu|cuda):\d+$"
SEPARATE_EXAMPLE = "{size: 4GiB, memory: separate}"
PACED_EXAMPLE = "{size: 4GiB, memory: separate, bandwidth: 2GiB/s}"
_DURATIONS: tuple[tuple[str, ...], ...] = (
    ("keep_alive",),
    ("init_timeout",),
    ("ready_timeout",),
    ("response_timeout",),
    ("queue", "timeout"),
    ("slo", "ttft"),
    ("slo", "tpot"),
)
_SIZES: tuple[tuple[str, ...], ...] = (
    ("memory",),
    ("container", "shm_bytes"),
    ("engine_args", "kv_cache_bytes"),
    ("engine_args", "adapter_cache_bytes"),
)


class Strict(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class NodeConfig(Strict):
    """Configuration of a node.

    Attributes:
        devices: Bytes, a share such as "90%", or the text of THAW_DEVICES for memory of its own
            such as "4294967296/separate@2147483648", by device id ("cpu:0", "cuda:0").
        dram: Bytes of host memory for weights that no instance holds.
    """

    devices: dict[str, int | str] = Field(default_factory=dict)
    dram: int | None = Field(default=None, ge=0)


class MeshConfig(Strict):
    """`mesh:`: this machine's endpoint and nodes. Command-line options go before it."""

    host: str | None = None
    port: int | None = Field(default=None, ge=1, le=65535)
    nats_port: int | None = Field(default=None, ge=1, le=65535)
    postgres_port: int | None = Field(default=None, ge=1, le=65535)
    admin_key: str | None = Field(default=None, min_length=8)
    api_keys: tuple[str, ...] = ()
    nodes: dict[str, NodeConfig] = Field(default_factory=dict)
    environment: dict[str, str] = Field(default_factory=dict)


class SchedulerConfig(Strict):
    """`scheduler:`: how the mesh decides."""

    policy: str | None = None

    @field_validator("policy")
    @classmethod
    def _known(cls, value: str | None) -> str | None:
        if value is not None and value not in policy_names():
            raise ValueError(f"given {value!r}; allowed: {', '.join(policy_names())}")
        return value


class ThawFile(Strict):
    """A whole thaw.yaml with the defaults worked into each model."""

    mesh: MeshConfig = MeshConfig()
    scheduler: SchedulerConfig = SchedulerConfig()
    models: tuple[ModelSpec, ...] = ()
    keys: tuple[NewKey, ...] = ()
    prices: Prices | None = None
    variables: frozenset[str] = frozenset()
    """Names of the environment's variables in its keys and sources."""


_KEYS = ("defaults", "keys", "mesh", "models", "prices", "scheduler")
_HASH = re.compile(HASH_PATTERN)


def load_config(path: Path) -> ThawFile:
    """Read and check `path`.

    Raises `ConfigError` with every fault, `CommandError` if the file cannot be read.
    """
    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as e:
        why = e.strerror if isinstance(e, OSError) else "it is not UTF-8 text"
        raise CommandError(f"{path} cannot be read: {why}.", f"{EXAMPLE} is a file to start from.") from e
    tree = read_tree(text)
    result = _Check(tree, path.parent).file()
    if tree.faults:
        raise ConfigError(str(path), tree.faults)
    return result


def faults_of(text: str, directory: Path) -> tuple[Fault, ...]:
    """Return the faults of a thaw.yaml's text.

    Args:
        directory: Base of relative sources.
    """
    tree = read_tree(text)
    _Check(tree, directory).file()
    return tuple(sorted(set(tree.faults)))


class _Check:
    """Walks one tree; faults gather in it."""

    def __init__(self, tree: Tree, directory: Path) -> None:
        self._tree = tree
        self._directory = directory
        self._variables: set[str] = set()

    def file(self) -> ThawFile:
        root = self._tree.value
        if root is None:
            return ThawFile()
        if not isinstance(root, dict):
            self._tree.fault((), f"the file must be a mapping with the keys {', '.join(_KEYS)}")
            return ThawFile()
        for key in root.keys() - set(_KEYS):
            self._tree.fault((key,), unknown_key(key, _KEYS))
        defaults = self._defaults(root.get("defaults"))
        return ThawFile(
            mesh=self._mesh(root.get("mesh")),
            scheduler=self._scheduler(root.get("scheduler")),
            models=self._models(root.get("models"), defaults),
            keys=self._keys(root.get("keys")),
            prices=self._prices(root.get("prices")),
            variables=frozenset(self._variables),
        )

    def _prices(self, value: Any) -> Prices | None:
        if value is None:
            return None
        if not isinstance(value, dict):
            self._tree.fault(("prices",), "must be a mapping, e.g. {currency: EUR, tokens: {prompt: 0.10, completion: 0.40}}")
            return None
        try:
            return Prices.model_validate(value)
        except ValidationError as e:
            self._report(e, ("prices",), Prices)
            return None

    def _keys(self, value: Any) -> tuple[NewKey, ...]:
        """`keys:`; each has its key, or the SHA-256 of it, under `key`."""
        if value is None:
            return ()
        if not isinstance(value, list) or not all(isinstance(entry, dict) for entry in value):
            self._tree.fault(("keys",), "must be a list; each entry begins with '- name: …'")
            return ()
        found: dict[str, NewKey] = {}
        for i, entry in enumerate(value):
            path: KeyPath = ("keys", i)
            fields = {name: given for name, given in entry.items() if name != "key"}
            key = expand(entry["key"]) if isinstance(entry.get("key"), str) else None
            if not key:
                self._tree.fault((*path, "key"), "must be the key, its SHA-256 in hex, or ${VARIABLE} of the environment")
                continue
            self._variables |= names_of(entry["key"])
            fields["sha256"] = key if _HASH.match(key) else hashlib.sha256(key.encode()).hexdigest()
            if isinstance(fields.get("expires"), date):
                fields["expires"] = expiry_of(fields["expires"])
            try:
                new = NewKey.model_validate(fields)
            except ValidationError as e:
                self._report(e, path, NewKey)
                continue
            if new.name in found:
                self._tree.fault((*path, "name"), f"given {new.name!r}, which is another key's name; allowed: each once")
            found[new.name] = new
        return tuple(found.values())

    def _scheduler(self, value: Any) -> SchedulerConfig:
        if value is None:
            return SchedulerConfig()
        if not isinstance(value, dict):
            self._tree.fault(("scheduler",), "must be a mapping, e.g. policy: thaw")
            return SchedulerConfig()
        try:
            return SchedulerConfig.model_validate(value)
        except ValidationError as e:
            self._report(e, ("scheduler",), SchedulerConfig)
            return SchedulerConfig()

    def _defaults(self, value: Any) -> dict[str, Any]:
        if value is None:
            return {}
        if not isinstance(value, dict):
            self._tree.fault(("defaults",), "must be a mapping of model options")
            return {}
        value = self._with_units(value, ("defaults",))
        bad: set[str] = set()
        try:
            ModelOptions.model_validate(value)
        except ValidationError as e:
            bad = self._report(e, ("defaults",), ModelOptions)
        return {k: v for k, v in value.items() if k not in bad}

    def _models(self, value: Any, defaults: dict[str, Any]) -> tuple[ModelSpec, ...]:
        if value is None:
            return ()
        if not isinstance(value, list):
            self._tree.fault(("models",), "must be a list; each entry begins with '- name: …'")
            return ()
        specs: list[ModelSpec] = []
        names: dict[str, KeyPath] = {}
        for i, entry in enumerate(value):
            path: KeyPath = ("models", i)
            if not isinstance(entry, dict):
                self._tree.fault(path, "must be a mapping with at least name and source")
                continue
            entry = dict(entry)
            adapters = entry.pop("adapters", None)
            self._check_unique(entry, path, names)
            spec = self._model(entry, path, {} if entry.get("base") else defaults)
            if spec is not None:
                specs.append(spec)
            if adapters is not None:
                specs += self._adapters(adapters, entry.get("name"), path, names)
        return tuple(specs)

    def _adapters(self, value: Any, base: object, model: KeyPath, names: dict[str, KeyPath]) -> list[ModelSpec]:
        """`adapters: {name: source}` of a model."""
        path: KeyPath = (*model, "adapters")
        if not isinstance(value, dict) or not all(isinstance(source, str) and source for source in value.values()):
            self._tree.fault(path, "must be a mapping of names to sources, e.g. sql: ~/adapters/sql")
            return []
        specs = []
        for name, source in value.items():
            if name in names:
                line = self._tree.place(names[name])[0]
                self._tree.fault(
                    (*path, name), f"given {name!r}, which is a model's name or alias on line {line} already; allowed: each once"
                )
                continue
            names[name] = (*path, name)
            try:
                specs.append(ModelSpec(name=name, source=self._source(source, (*path, name)), base=str(base)))
            except ValidationError as e:
                self._tree.fault((*path, name), message_of(e.errors()[0], ModelSpec))
        return specs

    def _check_unique(self, entry: dict[str, Any], path: KeyPath, names: dict[str, KeyPath]) -> None:
        aliases = entry.get("aliases")
        uses: list[tuple[object, KeyPath]] = [(entry.get("name"), (*path, "name"))]
        uses += [(a, (*path, "aliases", i)) for i, a in enumerate(aliases)] if isinstance(aliases, list) else []
        for name, place in uses:
            if not isinstance(name, str):
                continue
            if name in names:
                line = self._tree.place(names[name])[0]
                self._tree.fault(
                    place, f"given {name!r}, which is a model's name or alias on line {line} already; allowed: each once"
                )
            else:
                names[name] = place

    def _model(self, entry: dict[str, Any], path: KeyPath, defaults: dict[str, Any]) -> ModelSpec | None:
        merged = _merge(defaults, self._with_units(entry, path))
        source = merged.get("source")
        if isinstance(source, str) and source:
            merged["source"] = self._source(source, path)
        try:
            return ModelSpec.model_validate(merged)
        except ValidationError as e:
            self._report(e, path, ModelSpec)
            return None

    def _source(self, source: str, path: KeyPath) -> str:
        if source.startswith("hf://"):
            if not re.fullmatch(HUB_PATTERN, source):
                self._tree.fault((*path, "source"), f"given {source!r}; allowed: hf://org/name[@revision]")
            return source
        if source.startswith(ENGINE_SOURCE):
            return source
        if "://" in source:
            if not re.fullmatch(REMOTE_PATTERN, source):
                self._tree.fault(
                    (*path, "source"),
                    f"given {strip_credentials(source)!r}; allowed: a directory, hf://org/name[@revision], https://host/path, "
                    "s3://bucket/prefix, gs://bucket/prefix, or az://container/prefix",
                )
            return source
        self._variables |= names_of(source) & os.environ.keys()
        try:
            directory = resolve_model(self._directory / Path(os.path.expandvars(source)).expanduser())
            if not directory.is_dir() and not (directory.suffix == ".gguf" and directory.is_file()):
                kind = "file" if directory.suffix == ".gguf" and not directory.exists() else "directory"
                fault = f"there is no {kind} {directory}"
                if directory.is_file():
                    fault = f"{directory} is a file, not a directory or .gguf file"
                self._tree.fault((*path, "source"), f"given {source!r}; {fault}")
        except (OSError, RuntimeError, ValueError) as e:  # no access, too long, an unknown user's home, a zero byte
            self._tree.fault((*path, "source"), f"given {source!r}, which cannot be looked at ({e})")
            return source
        return str(directory)

    def _mesh(self, value: Any) -> MeshConfig:
        if value is None:
            return MeshConfig()
        if not isinstance(value, dict):
            self._tree.fault(("mesh",), "must be a mapping")
            return MeshConfig()
        self._variables |= names_in_mesh(value)
        value = expand_mesh(value, self._tree.fault)
        if isinstance(value.get("nodes"), dict):
            value["nodes"] = self._nodes(value["nodes"])
        if isinstance(value.get("environment"), dict):
            value["environment"] = {k: v if v is None else str(v) for k, v in value["environment"].items()}
        try:
            return MeshConfig.model_validate(value)
        except ValidationError as e:
            self._report(e, ("mesh",), MeshConfig)
            return MeshConfig()

    def _nodes(self, nodes: dict[str, Any]) -> dict[str, Any]:
        """Parse `nodes` in the short and the long form.

        These are `node-0: {cpu:0: 8GiB, dram: 2GiB}` and `node-0: {devices: {…}, dram: 2GiB}`.
        """
        result: dict[str, Any] = {}
        for name, node in nodes.items():
            path: KeyPath = ("mesh", "nodes", name)
            if not re.fullmatch(NODE_PATTERN, name):
                self._tree.fault(path, f"given {name!r}; allowed: lower-case letters, digits and hyphens, at most 63")
            rest: dict[str, Any] = {}
            if isinstance(node, dict) and "dram" in node:
                node = dict(node)
                rest = {"dram": self._convert(node.pop("dram"), (*path, "dram"), parse_size)}
            nested = isinstance(node, dict) and "devices" in node
            devices = node["devices"] if nested else node
            base: KeyPath = (*path, "devices") if nested else path
            if not isinstance(devices, dict):
                if devices is not None:
                    self._tree.fault(base, "must be a mapping of devices to sizes, e.g. cpu:0: 8GiB")
                result[name] = rest
                continue
            known_faults = len(self._tree.faults)
            for device in devices:
                if not re.match(DEVICE_PATTERN, device):
                    self._tree.fault((*base, device), f"given {device!r}; allowed: cpu:0 or cuda:N")
                elif device.startswith("cpu:") and device != "cpu:0" and not _is_separate(devices[device]):
                    self._tree.fault((*base, device), f"must be {SEPARATE_EXAMPLE}; only cpu:0 shares the host's memory")
            result[name] = {"devices": {d: self._budget(v, (*base, d)) for d, v in devices.items()}, **rest}
            if len(self._tree.faults) == known_faults:
                self._check_peers(result[name]["devices"], base)
        return result

    def _check_peers(self, devices: dict[str, int | str], path: KeyPath) -> None:
        """Find bandwidths between devices that the node does not have."""
        try:
            parse_devices(",".join(f"{d}={v}" for d, v in devices.items()) or "auto")
        except ValueError as e:
            self._tree.fault(path, str(e))

    def _budget(self, value: Any, path: KeyPath) -> int | str:
        if isinstance(value, dict):
            return self._memory(value, path)
        if isinstance(value, str) and value.strip().endswith("%"):
            share = value.strip()[:-1]
            if not share.replace(".", "", 1).isdigit() or not 0 < float(share) <= 100:
                self._tree.fault(path, f"given {value!r}; allowed: a share over 0% and at most 100%")
            return value.strip()
        size = self._convert(value, path, parse_size)
        if size is not None and not (isinstance(size, int) and size > 0):
            self._tree.fault(path, f"given {value!r}; allowed: a whole number of bytes, 1 or more")
            return 0
        return int(size or 0)

    def _memory(self, value: dict[str, Any], path: KeyPath) -> int | str:
        """Parse `{size: 4GiB, memory: separate}` to the text of THAW_DEVICES."""
        kind = value.get("memory", "unified")
        if not {"size"} <= set(value) <= {"size", "memory", "bandwidth"} or kind not in ("unified", "separate"):
            self._tree.fault(path, f"must be a size, or {SEPARATE_EXAMPLE}")
            return 0
        size = self._budget(value["size"], (*path, "size"))
        if kind == "unified":
            if "bandwidth" in value:
                self._tree.fault((*path, "bandwidth"), f"only a separate device can be paced, such as {PACED_EXAMPLE}")
            return size
        if not str(path[-1]).startswith("cpu:") or not isinstance(size, int) or size < PAGE_BYTES:
            self._tree.fault(path, f"must be a cpu device of at least 2MiB, such as {SEPARATE_EXAMPLE}")
            return 0
        return f"{size}{SEPARATE}{self._pace(value.get('bandwidth'), (*path, 'bandwidth'))}"

    def _pace(self, value: Any, path: KeyPath) -> str:
        """Parse `2GiB/s`, or `{host: 2GiB/s, cpu:2: 8GiB/s}`: bandwidths by their source."""
        if value is None:
            return ""
        found = []
        for source, rate in (value if isinstance(value, dict) else {"host": value}).items():
            if source != "host" and not (re.match(DEVICE_PATTERN, source) and source.startswith("cpu:")):
                self._tree.fault((*path, source), f"given {source!r}; allowed: host, or another separate device of the node")
                continue
            converted = self._convert(rate, (*path, source) if isinstance(value, dict) else path, parse_rate)
            if converted is None:
                continue
            if converted < 1:
                self._tree.fault(path, f"given {rate!r}; allowed: a bandwidth over 0, such as 2GiB/s")
                continue
            found.append(f"@{int(converted)}" if source == "host" else f"@{source}={int(converted)}")
        return "".join(found)

    def _with_units(self, value: dict[str, Any], path: KeyPath) -> dict[str, Any]:
        """`value` with durations and sizes that have units made into numbers."""
        value = _copy(value)
        for keys, parse in [*((k, parse_duration) for k in _DURATIONS), *((k, parse_size) for k in _SIZES)]:
            holder = value
            for key in keys[:-1]:
                inner = holder.get(key)
                holder = inner if isinstance(inner, dict) else {}
            if isinstance(holder.get(keys[-1]), str):
                converted = self._convert(holder[keys[-1]], (*path, *keys), parse)
                if converted is None:
                    del holder[keys[-1]]  # reported; the default stands in, so that pydantic does not report it again
                else:
                    holder[keys[-1]] = converted
        return value

    def _convert(self, value: Any, path: KeyPath, parse: Callable[[str], float]) -> float | None:
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            return value
        try:
            return parse(str(value))
        except ValueError as e:
            self._tree.fault(path, str(e))
            return None

    def _report(self, error: ValidationError, path: KeyPath, schema: type[BaseModel]) -> set[str]:
        """Turn pydantic's errors into faults; the top-level keys that have any."""
        bad: set[str] = set()
        for detail in error.errors():
            loc = detail["loc"]
            bad |= {str(p) for p in loc[:1]}
            in_file = (*path, *loc)
            inherited = path[0] == "models" and loc and loc[:1] != ("name",) and not _is_covered(self._tree, in_file)
            if inherited and ("defaults", *loc[:1]) in self._tree.keys:
                in_file = ("defaults", *loc)
            self._tree.fault(in_file, message_of(detail, schema))
        return bad


def _is_covered(tree: Tree, path: KeyPath) -> bool:
    return path[:3] in tree.keys


def _is_separate(value: Any) -> bool:
    return isinstance(value, dict) and value.get("memory") == "separate"


def _copy(value: dict[str, Any]) -> dict[str, Any]:
    return {k: _copy(v) if isinstance(v, dict) else v for k, v in value.items()}


def _merge(defaults: dict[str, Any], value: dict[str, Any]) -> dict[str, Any]:
    """`value` over `defaults`, nested mappings key by key."""
    result = _copy(defaults)
    for key, own in value.items():
        below = result.get(key)
        result[key] = _merge(below, own) if isinstance(below, dict) and isinstance(own, dict) else own
    return result
