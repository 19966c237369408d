"""Write the reference of every setting: `python docs/generate_reference.py > docs/configuration.md`
(or `thaw docs settings`).

Lives here because it may import everything; the command line may not import services.
"""

from __future__ import annotations

import sys
from enum import Enum
from pathlib import Path
from typing import Any, get_args, get_origin

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from pydantic import AliasChoices, BaseModel, SecretStr
from pydantic.fields import FieldInfo

from services.engine.settings import EngineSettings
from services.enginehost.settings import HostSettings
from services.gateway.settings import GatewaySettings
from services.loader.settings import LoaderSettings
from services.migrator.settings import MigratorSettings
from services.nodeagent.settings import NodeagentSettings
from services.scheduler.settings import SchedulerSettings
from shared.contracts.models import ModelSpec
from shared.settings import CommonSettings, NodeSettings

_INTRODUCTION = """\
# Configuration

Use this page to look up a setting of a process or a key of thaw.yaml. It is generated from the code by `docs/generate_reference.py`.

Every process reads its settings from the environment. `thaw up` sets those that connect its processes to each other and passes on
whatever else is set where it is run (or under `mesh.environment` in thaw.yaml). A value that is not allowed ends the process with status 2
and the name of the variable. In containers a setting may be a file instead: one named like the variable, in lower case, in the directory
that `THAW_SECRETS_DIR` names.
"""

_COMMAND_LINE = """\
## The command line

| variable | default | meaning |
| --- | --- | --- |
| `THAW_HOME` | `~/.thaw` | State directory of this machine. |
| `THAW_URL` |  | Gateway to talk to; the one under THAW_HOME by default. |
| `THAW_ADMIN_KEY` |  | Bearer key of the admin API; read from THAW_HOME by default. `thaw up` gives it to its gateway. |
| `THAW_API_KEY` |  | Key that `thaw chat` sends, if the mesh requires one. |
| `THAW_NATS_URL` |  | NATS servers of yours: `thaw up` then starts none. |
| `THAW_DATABASE_URL` |  | PostgreSQL of yours (`postgresql+asyncpg://…`): `thaw up` then starts none. |
| `THAW_GATEWAY_HOST`, `THAW_GATEWAY_PORT` | `127.0.0.1`, `8080` | Where `thaw up` has its gateway listen; `--host` and `--port` take precedence. |
| `THAW_HEALTH_FILE` |  | In containers: file to which a service writes its health, for their health checks. The images set it. |
| `THAW_WATCHDOG_S` | `10` | Seconds without progress after which a hung service is restarted, by `thaw up` or in its container; 0: never. |
"""

_MODELS = """\
## Models in thaw.yaml

Keys of an entry of `models:`; all but `name`, `source` and `aliases` may stand under `defaults:` too. Durations are seconds or text such as
"500ms", "30s", "5m", "1h30m". `thaw.example.yaml` shows them in use.

| key | default | meaning |
| --- | --- | --- |
"""


def main() -> None:
    sections = [_INTRODUCTION, _COMMAND_LINE]
    sections.append(_section("Every service", CommonSettings, set()))
    common = set(CommonSettings.model_fields)
    sections.append(_section("Nodeagent, loader and engine", NodeSettings, common))
    node = common | set(NodeSettings.model_fields)
    services: dict[str, type[CommonSettings]] = {
        "Gateway": GatewaySettings,
        "Scheduler": SchedulerSettings,
        "Migrator": MigratorSettings,
        "Nodeagent": NodeagentSettings,
        "Loader": LoaderSettings,
        "Engine": EngineSettings,
        "EngineHost": HostSettings,
    }
    shared_settings = {"kill_grace"}  # the nodeagent's, which passes it on
    for name, settings in services.items():
        without = node | shared_settings if settings is HostSettings else node
        if set(settings.model_fields) - without:
            sections.append(_section(f"{name} (`python -m services.{name.lower()}`)", settings, without))
    sections.append(_MODELS + "\n".join(_model_rows(ModelSpec, "")) + "\n")
    sys.stdout.write("\n".join(sections))


def _section(title: str, settings: type[CommonSettings], without: set[str]) -> str:
    rows = [_row(name, field) for name, field in settings.model_fields.items() if name not in without]
    return f"## {title}\n\n| variable | type | default | meaning |\n| --- | --- | --- | --- |\n" + "\n".join(rows) + "\n"


def _row(name: str, field: FieldInfo) -> str:
    variable = f"THAW_{name.upper()}"
    if isinstance(field.validation_alias, AliasChoices):
        variable = next((str(c) for c in field.validation_alias.choices if str(c).startswith("THAW_")), variable)
    elif isinstance(field.validation_alias, str):
        variable = field.validation_alias
    return f"| `{variable}` | {_type(field.annotation)} | {_default(field)} | {_escape(field.description or '')} |"


def _type(annotation: Any) -> str:
    """A type for people: Literal as its values, optional without the None."""
    arguments = [a for a in get_args(annotation) if a is not type(None)]
    if get_origin(annotation) is None:
        if isinstance(annotation, type) and issubclass(annotation, Enum):
            return ", ".join(str(e.value) for e in annotation)
        names = {str: "text", SecretStr: "text", int: "integer", float: "number", bool: "true or false", Path: "path"}
        return names.get(annotation, getattr(annotation, "__name__", str(annotation)))
    if get_origin(annotation) is tuple:
        return f"list of {_type(arguments[0])}"
    if get_origin(annotation) is dict:
        return "mapping"
    if all(isinstance(a, str) for a in arguments):
        return ", ".join(arguments)
    return " or ".join(dict.fromkeys(_type(a) for a in arguments))


def _default(field: FieldInfo) -> str:
    if field.default_factory is not None:
        return "" if field.default_factory in (dict, list, tuple) else "computed"
    value = field.default
    if field.is_required() or value is None or value == "":
        return "**required**" if field.is_required() else ""
    if isinstance(value, SecretStr):
        value = value.get_secret_value()
    if isinstance(value, bool):
        value = str(value).lower()
    return f"`{value}`" if value != () else ""


def _model_rows(model: type[BaseModel], prefix: str) -> list[str]:
    rows: list[str] = []
    order = sorted(model.model_fields.items(), key=lambda item: 0 if item[0] in ("name", "source", "aliases") else 1)
    for name, field in order:
        inner = next((a for a in (field.annotation, *get_args(field.annotation)) if _is_model(a)), None)
        if inner is not None:
            rows += _model_rows(inner, f"{prefix}{name}.")
            continue
        meaning = field.description or ""
        if _type(field.annotation) and field.description is None:
            meaning = _type(field.annotation)
        rows.append(f"| `{prefix}{name}` | {_default(field)} | {_escape(meaning)} |")
    return rows


def _is_model(annotation: Any) -> bool:
    return isinstance(annotation, type) and issubclass(annotation, BaseModel)


def _escape(text: str) -> str:
    return text.replace("|", "\\|")


if __name__ == "__main__":
    main()
