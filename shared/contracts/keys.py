"""Define the API keys that the mesh stores.

The bucket `subjects.KEYS_BUCKET` has a record under each key's SHA-256 in hexadecimal. The key
itself is stored nowhere.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from shared.contracts.base import Frozen

KEY_NAME_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9._@-]{0,99}$"
HASH_PATTERN = r"^[0-9a-f]{64}$"
Scope = Literal["inference", "admin"]


class ApiKey(Frozen):
    name: str = Field(pattern=KEY_NAME_PATTERN)
    scope: Scope = "inference"
    created: int = Field(description="Unix seconds.")


class NewKey(Frozen):
    """Request for a new API key at the admin API.

    Attributes:
        sha256: Digest of a key that the caller has generated, so that no other process ever sees
            the key.
    """

    name: str = Field(pattern=KEY_NAME_PATTERN)
    scope: Scope = "inference"
    sha256: str = Field(pattern=HASH_PATTERN)


class KeyList(Frozen):
    """The list of API keys.

    Attributes:
        configured: Inference keys of the gateway's settings instead.
        required: Inference needs a key, even if there are none.
    """

    keys: tuple[ApiKey, ...] = ()
    configured: int = 0
    required: bool = False
