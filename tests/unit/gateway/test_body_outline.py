"""Outlines of large bodies: what is cut out, and that it fits back in."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from services.gateway.domain.body_outline import CELL_BYTES, FormOutline, JsonOutline, Outline, is_base64
from services.gateway.domain.engine_request import EngineRequest
from services.gateway.domain.held_request import check_held
from services.gateway.http.parsing.multipart import text_fields
from shared.contracts.openai import ChatCompletionRequest
from shared.contracts.request_body import HeldBody
from shared.errors import InvalidRequest, PayloadTooLarge
from tests.support.fake_engine import card_of

MARKER = "thaw0123456789abcdef"
BASE64 = b"QUJDREVGR0hJSktMTU5PUA+/Zm9vYmFy-_==" * 4096


def feed(outline: Outline, body: bytes, seed: int = 0) -> None:
    """Feed a body in parts of random sizes."""
    sizes, at = random.Random(seed), 0
    while at < len(body):
        size = sizes.choice((1, 100, CELL_BYTES, 3 * CELL_BYTES + 7))
        outline.feed(body[at : at + size])
        at += size
    outline.finish()


def held_of(body: bytes, outline: Outline) -> HeldBody:
    pieces = tuple(outline.pieces)
    return HeldBody(gateway_id="g", body_id="b", size_bytes=len(body), marker=outline.marker, pieces=pieces)


def put_back(body: bytes, outline: Outline, sent: bytes) -> bytes:
    segments = held_of(body, outline).split(sent)
    return b"".join(s if isinstance(s, bytes) else body[s.offset : s.offset + s.size_bytes] for s in segments)


@pytest.mark.parametrize("seed", range(20))
def test_any_text_is_restored(seed: int) -> None:
    mixed = random.Random(seed)
    runs = [
        BASE64[: mixed.randrange(100_000)],
        b"prose \\u00e9 and more " * mixed.randrange(5000),
        b"\\/" * mixed.randrange(40_000),
    ]
    body = b"".join(mixed.choice(runs) + mixed.choice((b"", b"\\\\", b"\\n", b'","', b"\\")) for _ in range(20))
    outline = JsonOutline(MARKER)
    feed(outline, body, seed)
    assert put_back(body, outline, bytes(outline.kept)) == body


@pytest.mark.parametrize("before", [b"", b"\\n", b"\\u0041", b"\\\\", b"\\/", b"data:image/png;base64,"])
@pytest.mark.parametrize("shift", [*range(20), CELL_BYTES - 1])
def test_values_survive_parsing_and_encoding_of_the_outline(before: bytes, shift: int) -> None:
    """A piece that began inside an escape sequence would change the value."""
    text = b'{"pad":"' + b" " * (CELL_BYTES - 8 - shift) + b'","url":"' + before + BASE64.replace(b"/", b"\\/") + b'"}'
    outline = JsonOutline(MARKER)
    feed(outline, text)
    assert len(outline.pieces) == 1
    sent = json.dumps(json.loads(outline.kept)).encode()
    assert json.loads(put_back(text, outline, sent)) == json.loads(text)


def test_long_images_leave_little() -> None:
    images = b",".join(b'"%b"' % BASE64 for _ in range(10))
    outline = JsonOutline(MARKER)
    feed(outline, b"[" + images + b"]")
    assert len(outline.pieces) == 10
    assert len(outline.kept) < 10 * 2 * (CELL_BYTES + 100)


def test_the_number_of_pieces_is_bounded() -> None:
    outline = JsonOutline(MARKER)
    cell = BASE64[:CELL_BYTES]
    feed(outline, (cell + b" " * CELL_BYTES) * 300)
    assert len(outline.pieces) == 256


@pytest.mark.parametrize(
    ("text", "expected"),
    [(b"ab+/=_-", True), (b"a\\/b", True), (b"a\\\\/b", False), (b"a b", False), (b'a"', False), (b"a\\", False), (b"\xff", False)],
)
def test_base64(text: bytes, expected: bool) -> None:
    assert is_base64(text) is expected


def form(*parts: tuple[str, bytes]) -> bytes:
    return b"".join(b"--bb\r\n%b\r\n\r\n%b\r\n" % (head.encode(), data) for head, data in parts) + b"--bb--\r\n"


@pytest.mark.parametrize("seed", range(5))
async def test_fields_of_a_form_are_those_of_its_outline(seed: int) -> None:
    sound = random.Random(seed).randbytes(1_000_000) + b"\r\n--b" * 100_000
    body = form(
        ('Content-Disposition: form-data; name="file"; filename="a"', sound),
        ('Content-Disposition: form-data; name="model"', b"own"),
        ('Content-Disposition: form-data; name="other"; filename="b"', sound[::-1]),
        ('Content-Disposition: form-data; name="stream"', b"true"),
    )
    outline = FormOutline(b"bb")
    feed(outline, body, seed)
    assert len(outline.kept) < 300_000
    assert await text_fields("multipart/form-data; boundary=bb", bytes(outline.kept)) == {"model": "own", "stream": "true"}


async def test_an_incomplete_form_has_an_incomplete_outline() -> None:
    outline = FormOutline(b"bb")
    feed(outline, form(('Content-Disposition: form-data; name="model"', b"own"))[:-6])
    with pytest.raises(InvalidRequest, match="incomplete"):
        await text_fields("multipart/form-data; boundary=bb", bytes(outline.kept))


def test_a_form_of_many_parts_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="128 parts"):
        feed(FormOutline(b"bb"), b"\r\n--bb" * 1000)


def chat_of(*content: Any) -> tuple[ChatCompletionRequest, EngineRequest]:
    body = json.dumps({"model": "m", "messages": [{"role": "user", "content": list(content)}]}).encode()
    outline = JsonOutline(MARKER)
    feed(outline, body)
    request = ChatCompletionRequest.model_validate_json(bytes(outline.kept))
    return request, EngineRequest("chat", bytes(outline.kept), held=held_of(body, outline))


def test_only_media_of_hosted_models_may_be_long() -> None:
    hosted, builtin = card_of("own", engine="vllm"), card_of("alpha")
    image = {"type": "image_url", "image_url": {"url": "data:," + BASE64.decode()}}
    text = {"type": "text", "text": BASE64.decode()}
    request, engine_request = chat_of(image, image)
    check_held(request, engine_request, hosted, 10)
    for asked, card in ((chat_of(image, image), builtin), (chat_of(image, text), hosted), (chat_of(text), hosted)):
        with pytest.raises(PayloadTooLarge, match="limit of 10 bytes"):
            check_held(*asked, card, 10)


def test_a_translated_chat_has_each_piece_once_and_only_in_media() -> None:
    hosted = card_of("own", engine="vllm")
    _, engine_request = chat_of({"type": "image_url", "image_url": {"url": "data:," + BASE64.decode()}})
    sent = json.loads(engine_request.body)
    lost = sent | {"messages": [{"role": "user", "content": "?"}]}
    copied = sent | {"user": sent["messages"][0]["content"][0]["image_url"]["url"]}
    twice = sent | {"messages": sent["messages"] * 2}
    for changed in (lost, copied, twice):
        body = json.dumps(changed).encode()
        with pytest.raises(PayloadTooLarge):
            check_held(ChatCompletionRequest.model_validate_json(body), engine_request.with_body(body), hosted, 10)
