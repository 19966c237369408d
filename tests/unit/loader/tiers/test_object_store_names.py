"""Bucket names that no object store accepts."""

from __future__ import annotations

import pytest

from shared.errors import InvalidModel
from weights.tiers.object_store import ObjectStoreTier


@pytest.mark.parametrize("source", ["s3://b/x", "gs://bb/x", "az://c"])
def test_short_bucket_name_is_refused_with_the_reason(source: str) -> None:
    with pytest.raises(InvalidModel, match="too short: names have 3 characters or more"):
        ObjectStoreTier(source)
