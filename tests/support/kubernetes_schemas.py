"""Kubernetes' schemas of resources, each read once.

`kubernetes_validate` reads the definitions of a release, several megabytes of JSON, again for each
resource that it validates.
"""

from __future__ import annotations

import functools
from typing import Any

import kubernetes_validate
from kubernetes_validate import utils

ValidationError = kubernetes_validate.ValidationError
utils.schema_contents = functools.cache(utils.schema_contents)
utils.all_versions = functools.cache(utils.all_versions)


def validate(resource: dict[str, Any], release: str) -> None:
    """Check a resource against the strict schema of a release.

    Raises:
        ValidationError: The resource does not fit the schema, or has an unknown field.
    """
    kubernetes_validate.validate(resource, release, strict=True)
