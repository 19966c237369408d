"""Bodies larger than a NATS message in a whole mesh, with the real openai client."""

from __future__ import annotations

import base64
import hashlib
import json
import random
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import openai
import psutil
import pytest
import yaml

from tests.support.launcher import ROOT, Thaw, until

COMMAND = [sys.executable, "-m", "tests.support.fake_openai", "--port", "{port}"]
SOUND = random.Random(7).randbytes(1 << 20) * 96
"""About 100 MB."""
DIGEST = f"{len(SOUND)} {hashlib.sha256(SOUND).hexdigest()}"


@pytest.fixture(scope="module")
def mesh() -> Iterator[Thaw]:
    thaw = Thaw()
    model = {
        "name": "ear",
        "source": "engine://m",
        "engine": "openai",
        "memory": "600MiB",
        "max_model_len": 4096,
        "command": COMMAND,
        "env": {"PYTHONPATH": str(ROOT)},
        "routes": ["/v1/audio/transcriptions"],
    }
    config = thaw.home / "thaw.yaml"
    config.write_text(yaml.safe_dump({"mesh": {"port": thaw.port, "nodes": {"node-0": {"cpu:0": "1GiB"}}}, "models": [model]}))
    try:
        thaw.json("up", "--detach", "--config", str(config))
        yield thaw
    finally:
        thaw.close()


@pytest.fixture
def client(mesh: Thaw) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{mesh.url}/v1", api_key="none", timeout=300, max_retries=0) as client:
        yield client


def transcribe(client: openai.OpenAI, **fields: Any) -> str:
    return str(client.audio.transcriptions.create(model="ear", file=("sound.wav", SOUND), **fields).text)


def peak_bytes(pid: int) -> int:
    """Return the most memory that a process has had."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("VmHWM:"))


def host_of(mesh: Thaw) -> int:
    """Return the engine's host."""
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
    urls = ["data:image/png;base64," + base64.b64encode(SOUND[: size << 20]).decode() for size in (40, 1, 30)]
    images: list[Any] = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    content: list[Any] = [{"type": "text", "text": "Which of them is née?"}, *images]
    answer = client.chat.completions.create(
        model="ear", messages=[{"role": "user", "content": content}], extra_body={"fake": {"digests": True}}
    )
    expected = [[len(url), hashlib.sha256(url.encode()).hexdigest()] for url in urls]
    assert json.loads(answer.choices[0].message.content or "") == expected


def test_an_upload_survives_the_death_of_its_engine(mesh: Thaw, client: openai.OpenAI) -> None:
    died = mesh.home / "died"
    assert transcribe(client, prompt=f"exit {died}") == DIGEST
    assert died.exists()


def test_bodies_over_the_limit_are_refused(client: openai.OpenAI) -> None:
    with pytest.raises(openai.APIStatusError) as refused:
        client.audio.transcriptions.create(model="ear", file=("sound.wav", SOUND + SOUND[: 8 << 20]))
    body: Any = refused.value.body
    assert (refused.value.status_code, body["code"]) == (413, "payload_too_large")
