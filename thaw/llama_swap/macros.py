"""Expand macros of llama-swap.

They are `${name}`, `${env.NAME}`, and the reserved `${PORT}`, `${MODEL_ID}` and `${PID}`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

MACRO = re.compile(r"\$\{([a-zA-Z0-9_.-]+)\}")
ENVIRONMENT = "env."
PORT = "{port}"
"""Thaw's placeholder for the port that it chooses."""
_MAX_DEPTH = 32


class MacroError(ValueError):
    """A macro that cannot be replaced; its text says which, and what to do."""


class Macros:
    """The macros that hold for one model, or for the file outside of models.

    Args:
        values: Macros by name; those of a model replace those of the file.
        environment: Variables for `${env.NAME}`.
        model: The model's ID; None outside of models.
    """

    def __init__(self, values: Mapping[str, Any], environment: Mapping[str, str], model: str | None = None) -> None:
        self._values = dict(values)
        self._environment = environment
        if model is not None:
            self._values |= {"MODEL_ID": model, "PORT": PORT, "PID": "${PID}"}

    def expand(self, value: Any, *, keep_environment: bool = False) -> Any:
        """Return `value` with every macro replaced, in lists and mappings too.

        Args:
            value: Any value of the configuration.
            keep_environment: Turn `${env.NAME}` into Thaw's `${NAME}` instead of its value.

        Raises:
            MacroError: A macro or a variable is not defined, or macros refer to each other in a
                circle.
        """
        if isinstance(value, dict):
            return {key: self.expand(item, keep_environment=keep_environment) for key, item in value.items()}
        if isinstance(value, list):
            return [self.expand(item, keep_environment=keep_environment) for item in value]
        if not isinstance(value, str):
            return value
        return self._text(value, lambda name: self._variable(name, keep_environment), 0)

    def _text(self, text: str, variable: Callable[[str], str], depth: int) -> Any:
        if depth > _MAX_DEPTH:
            raise MacroError(f"macros refer to each other in a circle: {text}")

        def value_of(name: str) -> Any:
            if name.startswith(ENVIRONMENT):
                return variable(name.removeprefix(ENVIRONMENT))
            if name not in self._values:
                raise MacroError(f"macro ${{{name}}} is not defined; define it under `macros:`")
            found = self._values[name]
            return self._text(found, variable, depth + 1) if isinstance(found, str) and name != "PID" else found

        whole = MACRO.fullmatch(text.strip())
        if whole is not None:
            return value_of(whole[1])  # a number stays a number
        return MACRO.sub(lambda match: _format_value(value_of(match[1])), text)

    def _variable(self, name: str, keep: bool) -> str:
        if keep:
            return f"${{{name}}}"
        if name not in self._environment:
            raise MacroError(f"variable {name} of ${{env.{name}}} is not set; export it and run the import again")
        return self._environment[name]


def _format_value(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
