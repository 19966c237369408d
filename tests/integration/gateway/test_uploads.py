"""Uploads of files at the same time."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

import openai
import pytest
from nats.js.errors import BucketNotFoundError, NoKeysError

from shared.contracts import subjects
from tests.integration.gateway.clients import openai_client
from tests.integration.gateway.conftest import CARDS, ServeFn, until, until_listed
from tests.support.fake_engine import FakeNode

HEADERS = {"content-type": "multipart/form-data; boundary=b", "authorization": "Bearer key"}
HEAD = (
    b'--b\r\ncontent-disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
    b'--b\r\ncontent-disposition: form-data; name="file"; filename="f"\r\n\r\n'
)


async def has_content(node: FakeNode) -> bool:
    """True if a part of a file is stored."""
    with contextlib.suppress(BucketNotFoundError, NoKeysError):
        return bool(await (await node.mesh.nc.jetstream().key_value(subjects.FILES_BUCKET)).keys())
    return False


async def test_uploads_at_the_same_time_share_the_room_of_their_key(node: FakeNode, serve: ServeFn) -> None:
    """Each by itself fits. All keys share the store, which one key would fill with many of them."""
    async with serve(files_bytes_per_key=1_200_000) as gateway:
        await until_listed(gateway, CARDS)
        may_end = asyncio.Event()

        async def upload() -> AsyncIterator[bytes]:
            yield HEAD + b"x" * 600_000
            await may_end.wait()
            yield b"\r\n--b--\r\n"

        slow = asyncio.create_task(gateway.http.post("/v1/files", content=upload(), headers=HEADERS))
        await until(lambda: has_content(node))
        async with openai_client(gateway, "key") as client:
            with pytest.raises(openai.APIStatusError, match="Delete some"):
                await client.files.create(file=("f", b"x" * 800_000), purpose="batch")
            may_end.set()
            assert (await slow).status_code == 200
            await client.files.create(file=("f", b"x" * 500_000), purpose="batch")
