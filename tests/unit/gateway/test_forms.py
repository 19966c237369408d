"""The fields of a form are found as the client wrote them, whatever its files hold."""

from __future__ import annotations

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.gateway.http.forms import is_form, text_fields
from services.gateway.relay import Relay
from shared.contracts.inference import InferResponse
from shared.errors import InvalidRequest

VALUES = st.text(st.characters(exclude_characters="\r\n", exclude_categories=["Cs"]), max_size=20)
TRICKY = b'\r\n--b\r\nContent-Disposition: form-data; name="model"\r\n\r\nwrong'


@settings(max_examples=100, deadline=None)
@given(fields=st.dictionaries(st.sampled_from(["model", "stream", "language", 'qu"ote']), VALUES), file=st.binary(max_size=200))
def test_fields_are_found_beside_files(fields: dict[str, str], file: bytes) -> None:
    request = httpx.Request("POST", "http://x", data=fields, files={"file": ("model", file), "model2": ("x", TRICKY)})
    content_type = request.headers["content-type"]
    assert is_form(content_type)
    found = text_fields(content_type, request.read())
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
def test_what_is_no_form_is_refused(content_type: str, body: bytes) -> None:
    with pytest.raises(InvalidRequest):
        text_fields(content_type, body)


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
def test_a_comment_goes_between_events_only(data: tuple[bytes, ...], between: bool, events: int) -> None:
    relay = Relay(InferResponse(status=200, content_type="text/event-stream"))
    for part in data:
        relay.add(part)
        relay.take()
    assert (relay.between_events, relay.events) == (between, events)
