"""Form fields are parsed as the client wrote them, whatever the files contain."""

from __future__ import annotations

import asyncio

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.gateway.http.parsing import cooperative
from services.gateway.http.parsing.multipart import is_form, text_fields
from services.gateway.requests.passthrough import PassthroughResponse
from shared.contracts.inference import InferResponse
from shared.errors import InvalidRequest
from tests.support.examples import examples

VALUES = st.text(st.characters(exclude_characters="\r\n", exclude_categories=["Cs"]), max_size=20)
TRICKY = b'\r\n--b\r\nContent-Disposition: form-data; name="model"\r\n\r\nwrong'


@settings(max_examples=examples(100), deadline=None)
@given(fields=st.dictionaries(st.sampled_from(["model", "stream", "language", 'qu"ote']), VALUES), file=st.binary(max_size=200))
async def test_text_fields_are_found_beside_files(fields: dict[str, str], file: bytes) -> None:
    request = httpx.Request("POST", "http://x", data=fields, files={"file": ("model", file), "model2": ("x", TRICKY)})
    content_type = request.headers["content-type"]
    assert is_form(content_type)
    found = await text_fields(content_type, request.read())
    assert {name.replace("%22", '"'): value for name, value in found.items()} == fields


@pytest.mark.parametrize(
    ("content_type", "body"),
    [
        ("multipart/form-data", b""),
        ("multipart/form-data; boundary=b", b""),
        ("multipart/form-data; boundary=b", b'--b\r\nContent-Disposition: form-data; name="model"\r\n\r\nm'),
        ("multipart/form-data; boundary=b", b"\x00" * 100),
    ],
)
async def test_malformed_form_is_refused(content_type: str, body: bytes) -> None:
    with pytest.raises(InvalidRequest):
        await text_fields(content_type, body)


REPEATED = b"content-disposition:"


@pytest.mark.parametrize("size", [100_000, 6_000_000])
@pytest.mark.parametrize(
    ("before", "refused"),
    [
        (b"", True),
        (b"--b\r\n", True),
        (b'--b\r\nContent-Disposition: form-data; name="model"\r\n\r\n', False),
        (b"--b\r\nx: ", True),
    ],
)
async def test_repeated_header_is_parsed_in_linear_time(before: bytes, refused: bool, size: int) -> None:
    """A repeated header takes linear work.

    A parser that searches for a name from each repetition to the end of the part takes 3 s for 100
    KB and hours for 6 MB.
    """
    body = before + REPEATED * (size // len(REPEATED)) + b"\r\n--b--\r\n"
    if refused:
        with pytest.raises(InvalidRequest):
            await text_fields("multipart/form-data; boundary=b", body)
    else:
        assert await text_fields("multipart/form-data; boundary=b", body) == {}, "it is too long for a model's name"


async def test_a_form_is_bounded() -> None:
    part = b'--b\r\nContent-Disposition: form-data; name="model"\r\n\r\nm\r\n'
    kind = "multipart/form-data; boundary=b"
    assert await text_fields(kind, part * 128 + b"--b--\r\n") == {"model": "m"}
    headers = b"--b\r\n" + b"x: y\r\n" * 9 + b"\r\nm\r\n--b--\r\n"
    long = b"--b\r\nx: " + b"y" * 5000 + b"\r\n\r\nm\r\n--b--\r\n"
    for body in (part * 129 + b"--b--\r\n", headers, long):
        with pytest.raises(InvalidRequest):
            await text_fields(kind, body)
    with pytest.raises(InvalidRequest):
        await text_fields(kind + ";" * 2000, part + b"--b--\r\n")


async def test_the_loop_runs_while_a_large_form_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cooperative, "_SLICE_S", 0.0)
    ticks = 0

    async def tick() -> None:
        nonlocal ticks
        while True:
            ticks += 1
            await asyncio.sleep(0)

    ticking = asyncio.create_task(tick())
    with pytest.raises(InvalidRequest):
        await text_fields("multipart/form-data; boundary=b", b"--b\r\nx: y\r\n\r\n" + b"\r\n--x" * 100_000)
    ticking.cancel()
    assert ticks >= 500_000 // (16 * 1024)


@pytest.mark.parametrize(
    ("data", "between", "events"),
    [
        ((), True, 0),
        ((b"data: 1\n\n",), True, 1),
        ((b"data: 1\n", b"\n"), True, 1),
        ((b"data: 1\r\n\r", b"\ndata: 2"), False, 1),
        ((b"data: 1\n\ndata: 2\n\n",), True, 2),
    ],
)
def test_comments_are_inserted_only_between_events(data: tuple[bytes, ...], between: bool, events: int) -> None:
    relay = PassthroughResponse(InferResponse(status=200, content_type="text/event-stream"))
    for part in data:
        relay.add(part)
        relay.take()
    assert (relay.is_between_events, relay.events) == (between, events)
