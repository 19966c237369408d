"""SIGTERM, as `timeout` sends it, ends a benchmark and what it has started."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from bench.termination import STATUS
from shared.ports import free_port

ROOT = Path(__file__).resolve().parents[3]

_BEGIN = "import asyncio, os, signal, time; from bench.termination import end_on_sigterm; end_on_sigterm()"
_WAITS = {
    "thread": """
try:
    print("ready", flush=True)
    time.sleep(60)
finally:
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(0)
    print("ended", flush=True)
""",
    "event loop": """
async def wait():
    try:
        print("ready", flush=True)
        await asyncio.sleep(60)
    finally:
        os.kill(os.getpid(), signal.SIGTERM)
        await asyncio.sleep(0)
        print("ended", flush=True)
asyncio.run(wait())
""",
}


def start(code: str) -> subprocess.Popen[str]:
    return subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, cwd=ROOT)


@pytest.mark.parametrize("wait", _WAITS)
def test_the_first_signal_ends_a_benchmark_cleanly_and_a_second_one_does_not_interrupt_it(wait: str) -> None:
    with start(_BEGIN + _WAITS[wait]) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        process.terminate()
        assert process.stdout.read() == "ended\n"
        assert process.wait(60) == STATUS


def test_a_fork_of_a_benchmark_ends_at_once() -> None:
    code = f"""{_BEGIN}
reading, writing = os.pipe()
child = os.fork()
if not child:
    os.write(writing, b"x")
    time.sleep(60)
    os._exit(0)
os.read(reading, 1)
os.kill(child, signal.SIGTERM)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""
    with start(code) as process:
        assert process.stdout is not None
        assert process.stdout.read() == f"{-signal.SIGTERM}\n"


def test_a_benchmark_that_is_run_as_a_module_handles_the_signal() -> None:
    # Not an ephemeral port: the client of an earlier server could connect before the benchmark.
    with socket.create_server(("127.0.0.1", free_port())) as server:
        server.settimeout(60)
        arguments = ["-m", "bench.load_client", "--port", str(server.getsockname()[1]), "--model", "m"]
        with subprocess.Popen([sys.executable, *arguments], cwd=ROOT) as process:
            connection, _ = server.accept()
            with connection:
                process.terminate()
                assert process.wait(60) == STATUS


def test_a_process_that_imports_a_benchmark_keeps_its_own_handler() -> None:
    code = "import signal, bench; print(signal.getsignal(signal.SIGTERM) == signal.SIG_DFL)"
    with start(code) as process:
        assert process.stdout is not None
        assert process.stdout.read() == "True\n"
