"""Bucket names that no object store accepts."""

from __future__ import annotations

import pytest

from shared.errors import InvalidModel
from weights.tiers.object_store import ObjectStoreTier


@pytest.mark.parametrize("source", ["s3://b/x", "gs://bb/x", "az://c"])
def test_a_bucket_name_that_is_too_short_is_called_so(source: str) -> None:
    with pytest.raises(InvalidModel, match="too short: names have 3 characters or more"):
        ObjectStoreTier(source)
