"""The settings of a model as the thaw.yaml that would give them."""

from __future__ import annotations

from shared.contracts.models import ModelSpec

_WIDTH = 100
_INCOMPLETE = "# The source's user, password and query are left out.\n"


def model_yaml(spec: ModelSpec) -> str:
    """Return a `models:` section with the settings of `spec` that are not the defaults.

    `thaw up --config` and `thaw models add --config` read it. A source without its secrets is
    marked by a comment.
    """
    import yaml  # here: few gateways are ever asked, and all would start later

    entry = spec.model_dump(mode="json", exclude_defaults=True)
    ordered = {"name": spec.name, "source": ""} | entry | {"source": spec.public_source}
    text: str = yaml.safe_dump({"models": [ordered]}, sort_keys=False, allow_unicode=True, width=_WIDTH)
    return (_INCOMPLETE if spec.public_source != spec.source else "") + text
