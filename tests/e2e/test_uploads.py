"""Bodies larger than a NATS message in a whole mesh, with the real clients of each API."""

from __future__ import annotations

import base64
import hashlib
import random
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import anthropic
import openai
import psutil
import pytest
import yaml

from tests.support.fake_digests import ASKED, digests
from tests.support.launcher import ROOT, Thaw, until

COMMAND = [sys.executable, "-m", "tests.support.fake_openai", "--port", "{port}"]
SOUND = random.Random(7).randbytes(1 << 20) * 96
"""About 100 MB."""
IMAGES = [base64.b64encode(SOUND[: size << 20]).decode() for size in (41, 1, 30)]
"""96 MiB in all."""
IMAGE = base64.b64encode(SOUND[: 9 << 20]).decode()
OTHER_APIS = ["/v1/messages", "/v1/messages/count_tokens", "/v1/responses"]
TEXT: list[Any] = [{"type": "text", "text": ASKED}]
DIGEST = f"{len(SOUND)} {hashlib.sha256(SOUND).hexdigest()}"


@pytest.fixture(scope="module")
def mesh() -> Iterator[Thaw]:
    thaw = Thaw()
    model = {
        "source": "engine://m",
        "engine": "openai",
        "memory": "600MiB",
        "max_model_len": 4096,
        "command": COMMAND,
        "env": {"PYTHONPATH": str(ROOT)},
    }
    models = [
        model | {"name": "ear", "routes": ["/v1/audio/transcriptions"]},
        model | {"name": "eye", "routes": OTHER_APIS},
    ]
    config = thaw.home / "thaw.yaml"
    config.write_text(yaml.safe_dump({"mesh": {"port": thaw.port, "nodes": {"node-0": {"cpu:0": "2GiB"}}}, "models": models}))
    try:
        thaw.json("up", "--detach", "--config", str(config))
        yield thaw
    finally:
        thaw.close()


@pytest.fixture
def client(mesh: Thaw) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{mesh.url}/v1", api_key="none", timeout=300, max_retries=0) as client:
        yield client


@pytest.fixture
def messages(mesh: Thaw) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=mesh.url, api_key="none", timeout=300, max_retries=0) as client:
        yield client


def transcribe(client: openai.OpenAI, **fields: Any) -> str:
    return str(client.audio.transcriptions.create(model="ear", file=("sound.wav", SOUND), **fields).text)


def peak_bytes(pid: int) -> int:
    """Return the most memory that a process has had."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("VmHWM:"))


def host_of(mesh: Thaw) -> int:
    """Return the host of the engine of the model `ear`."""
    pids = mesh.instance("ear")["pids"]
    return int(next(p for p in pids if "tests.support.fake_openai" not in psutil.Process(p).cmdline()))


def open_bodies(mesh: Thaw) -> int:
    """Return the files of bodies that the gateway has open."""
    directory = str(mesh.home / "gateway" / "bodies")
    links = (Path(f"/proc/{mesh.pid('gateway')}/fd")).iterdir()
    return sum(str(link.readlink()).startswith(directory) for link in links if link.is_symlink())


def test_a_large_upload_is_transcribed_with_little_memory(mesh: Thaw, client: openai.OpenAI) -> None:
    client.chat.completions.create(model="ear", messages=[{"role": "user", "content": "Hello"}], max_tokens=1)
    processes = (mesh.pid("gateway"), host_of(mesh))
    before = [peak_bytes(p) for p in processes]
    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(lambda _: transcribe(client, language="fr"), range(2))) == [DIGEST] * 2
    for pid, peak in zip(processes, before, strict=True):
        assert peak_bytes(pid) - peak < len(SOUND) / 2, pid
    until(lambda: open_bodies(mesh) == 0, what="the gateway has closed the bodies")


def test_large_images_of_a_chat_arrive_unchanged(client: openai.OpenAI) -> None:
    urls = [f"data:image/png;base64,{image}" for image in IMAGES]
    images: list[Any] = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    answer = client.chat.completions.create(model="ear", messages=[{"role": "user", "content": [*TEXT, *images]}])
    assert answer.choices[0].message.content == digests(urls)


def image_block(image: str) -> Any:
    return {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": image}}


def response_input(image: str) -> Any:
    url = f"data:image/png;base64,{image}"
    return [{"role": "user", "content": [{"type": "input_text", "text": ASKED}, {"type": "input_image", "image_url": url}]}]


def test_large_images_of_a_message_arrive_unchanged_with_little_memory(mesh: Thaw, messages: anthropic.Anthropic) -> None:
    """The gateway translates the message to a chat completion."""
    asked: dict[str, Any] = {"model": "ear", "max_tokens": 5}
    messages.messages.create(**asked, messages=[{"role": "user", "content": "Hello"}])
    processes = (mesh.pid("gateway"), host_of(mesh))
    before = [peak_bytes(p) for p in processes]
    content: Any = [*TEXT, *map(image_block, IMAGES)]
    answer: Any = messages.messages.create(**asked, messages=[{"role": "user", "content": content}])
    assert answer.content[0].text == digests([f"data:image/png;base64,{image}" for image in IMAGES])
    for pid, peak in zip(processes, before, strict=True):
        assert peak_bytes(pid) - peak < len(SOUND) / 2, pid
    until(lambda: open_bodies(mesh) == 0, what="the gateway has closed the bodies")


def test_large_images_of_other_apis_are_translated(mesh: Thaw, client: openai.OpenAI) -> None:
    expected = digests([f"data:image/png;base64,{IMAGE}"])
    assert client.responses.create(model="ear", input=response_input(IMAGE)).output_text == expected
    ollama = pytest.importorskip("ollama").Client(host=mesh.url, timeout=300)
    try:
        picture = base64.b64decode(IMAGE)
        assert ollama.chat("ear", [{"role": "user", "content": ASKED, "images": [picture]}]).message.content == expected
        assert ollama.generate("ear", ASKED, images=[picture]).response == expected
    finally:
        ollama._client.close()


def test_an_engine_that_serves_the_routes_receives_large_bodies(client: openai.OpenAI, messages: anthropic.Anthropic) -> None:
    conversation: Any = [{"role": "user", "content": [*TEXT, image_block(IMAGE)]}]
    answer: Any = messages.messages.create(model="eye", max_tokens=5, messages=conversation)
    assert answer.content[0].text == digests([IMAGE])
    assert messages.messages.count_tokens(model="eye", messages=conversation).input_tokens == len(IMAGE)
    response = client.responses.create(model="eye", input=response_input(IMAGE))
    assert response.output_text == digests([f"data:image/png;base64,{IMAGE}"])


def test_an_upload_survives_the_death_of_its_engine(mesh: Thaw, client: openai.OpenAI) -> None:
    died = mesh.home / "died"
    assert transcribe(client, prompt=f"exit {died}") == DIGEST
    assert died.exists()


def test_bodies_over_the_limit_are_refused(client: openai.OpenAI, messages: anthropic.Anthropic) -> None:
    with pytest.raises(openai.APIStatusError) as refused:
        client.audio.transcriptions.create(model="ear", file=("sound.wav", SOUND + SOUND[: 8 << 20]))
    body: Any = refused.value.body
    assert (refused.value.status_code, body["code"]) == (413, "payload_too_large")
    content: Any = [*TEXT, *map(image_block, (*IMAGES, IMAGE))]
    with pytest.raises(anthropic.RequestTooLargeError):
        messages.messages.create(model="ear", max_tokens=5, messages=[{"role": "user", "content": content}])
