"""Measure the cost of `sync_interval: always`: `python -m bench.sync [DIRECTORY]`.

The writes are acknowledged ones, one after the other, and messages captured without
acknowledgement. The servers are one that syncs every two minutes and one that syncs each write; a
stream that opts out of that is measured, too (docs/adr/0048).
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import nats
from nats.js import JetStreamContext
from nats.js.api import PersistMode, StorageType, StreamConfig

from shared.percentiles import percentile
from shared.ports import free_port
from thaw.launcher.plan import listen_fault
from thaw.launcher.servers import nats_program

_BYTES = b"x" * 300
_ACKNOWLEDGED, _CAPTURED = 300, 3000


async def _measure(js: JetStreamContext, name: str, mode: PersistMode | None) -> str:
    config = StreamConfig(name=name, subjects=[f"{name}.>"], storage=StorageType.FILE, persist_mode=mode)
    await js.add_stream(config)
    took: list[float] = []
    for _ in range(_ACKNOWLEDGED):
        begun = time.perf_counter()
        await js.publish(f"{name}.acknowledged", _BYTES)
        took.append(time.perf_counter() - begun)
    begun = time.perf_counter()
    for _ in range(_CAPTURED):
        await js._nc.publish(f"{name}.captured", _BYTES)
    while (await js.stream_info(name)).state.messages < _ACKNOWLEDGED + _CAPTURED:  # noqa: ASYNC110 - another process stores them
        await asyncio.sleep(0.005)
    rate = _CAPTURED / (time.perf_counter() - begun)
    p50, p99 = percentile(took, 50) * 1e3, percentile(took, 99) * 1e3
    return f"acknowledged p50 {p50:.2f} ms, p99 {p99:.2f} ms; captured {rate:,.0f}/s"


async def _server(directory: Path, setting: str, modes: tuple[PersistMode | None, ...]) -> None:
    port = free_port()
    config = directory / "nats.conf"
    config.write_text(f'listen: "127.0.0.1:{port}"\njetstream {{ store_dir: "{directory}/js"\n{setting} }}\n')
    process = subprocess.Popen([nats_program(), "-c", str(config)], stderr=subprocess.DEVNULL)  # noqa: ASYNC220 - nothing else runs
    try:
        async with asyncio.timeout(20):
            while listen_fault("127.0.0.1", port) is None:  # noqa: ASYNC110 - another process begins to listen
                await asyncio.sleep(0.05)
        client = await nats.connect(f"nats://127.0.0.1:{port}")
        for mode in modes:
            found = await _measure(client.jetstream(timeout=30), mode.value if mode else "synced", mode)
            print(f"{setting or 'sync_interval: 2m':24} {mode.value if mode else 'default':8} {found}", flush=True)
        await client.close()
    except TimeoutError as e:
        raise SystemExit(f"nats-server does not start in {directory}. Name a directory that can be written.") from e
    finally:
        process.terminate()
        process.wait()


async def _main(parent: str | None) -> None:
    with tempfile.TemporaryDirectory(dir=parent) as directory:
        for name, setting, modes in (("plain", "", (None,)), ("always", "sync_interval: always", (None, PersistMode.ASYNC))):
            place = Path(directory) / name
            place.mkdir()
            await _server(place, setting, modes)


if __name__ == "__main__":
    asyncio.run(_main(sys.argv[1] if len(sys.argv) > 1 else None))
