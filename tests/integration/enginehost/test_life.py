"""Life cycle of a hosted engine that is slow, hung, forking, dying or replaced."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import uuid
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import psutil
import pytest

from shared.contracts import subjects
from shared.contracts.engine import EngineAsleep, EngineProbed, SleepEngine, WakeEngine
from shared.contracts.phases import Phase
from shared.processes import end_all
from tests.support.forking import executed
from tests.support.hosted import FAKE, MIB, Hosts, fake_card, hosted_card, reapers, token_of
from tests.support.stopping import stop


async def test_engine_is_ready_once_it_has_generated_a_token(hosts: Hosts) -> None:
    start = hosts.host(fake_card())
    report = await hosts.settled(start.instance_id)
    assert report.state == "ready"
    assert {Phase.LIBRARIES, Phase.INIT, Phase.PROFILE} <= {s.phase for s in report.phases}
    assert report.hosted is not None
    assert set(report.hosted.pids) == hosts.marked(start.instance_id)
    assert report.pid not in report.hosted.pids


async def test_healthy_engine_that_generates_nothing_never_becomes_ready(hosts: Hosts) -> None:
    start = hosts.host(fake_card("--mute"))
    report = await hosts.settled(start.instance_id)
    assert report.state == "failed"
    assert report.error is not None
    assert "generated no token" in report.error.message
    await hosts.left_nothing(start.instance_id)


async def test_engine_that_ends_after_its_refusal_is_explained_by_the_refusal(hosts: Hosts) -> None:
    """vLLM ends after an error of its core, with status 0."""
    start = hosts.host(fake_card("--mute-end"))
    report = await hosts.settled(start.instance_id)
    assert report.state == "failed"
    assert report.error is not None
    assert "generated no token" in report.error.message
    assert "answered 500" in report.error.message
    assert "then it ended with exit status 0" in report.error.message
    await hosts.left_nothing(start.instance_id)


async def test_slow_start_reports_progress_and_becomes_ready(hosts: Hosts, tmp_path: Path) -> None:
    may_end = tmp_path / "may end"
    start = hosts.host(fake_card("--ready-with", str(may_end)))

    def shown() -> list[float]:
        return [r.progress for r in hosts.reports[start.instance_id] if r.state == "loading"]

    await hosts.reported(start.instance_id, lambda _: len(set(shown())) >= 3)
    may_end.touch()
    assert (await hosts.settled(start.instance_id)).state == "ready"
    assert shown() == sorted(shown())


async def test_ready_timeout_limits_the_whole_start(hosts: Hosts) -> None:
    loading = ["sh", "-c", "while sleep 0.1; do echo still loading; done", "engine", "{port}"]
    start = hosts.host(hosted_card("engine://m", command=loading, memory=MIB, ready_timeout=5))
    report = await hosts.settled(start.instance_id)
    assert report.error is not None
    assert "ready_timeout" in report.error.message
    assert "still loading" in report.error.message
    await hosts.left_nothing(start.instance_id)


async def test_missing_program_is_named(hosts: Hosts) -> None:
    start = hosts.host(hosted_card("engine://m", command=["/nowhere/engine"], memory=MIB))
    report = await hosts.settled(start.instance_id)
    assert report.error is not None
    assert "/nowhere/engine cannot be started: No such file" in report.error.message


@pytest.mark.parametrize(
    ("engine", "settings", "variable"),
    [
        ("vllm", {"THAW_VLLM_PYTHON": sys.executable}, "THAW_VLLM_PYTHON"),
        ("vllm", {"THAW_VLLM_PYTHON": "/nowhere/python"}, "THAW_VLLM_PYTHON"),
        ("llamacpp", {"THAW_LLAMACPP_PYTHON": sys.executable}, "THAW_LLAMACPP_PYTHON or THAW_LLAMACPP_SERVER"),
        ("tensorrt-llm", {"THAW_TRTLLM_SERVE": "/nowhere/trtllm-serve"}, "THAW_TRTLLM_SERVE"),
    ],
)
async def test_a_missing_engine_is_reported_with_the_setting(
    hosts: Hosts, tmp_path: Path, engine: str, settings: dict[str, str], variable: str
) -> None:
    weights = tmp_path / "m.gguf"
    weights.touch()
    start = hosts.host(hosted_card(str(weights), engine=engine, memory=MIB), **settings)
    report = await hosts.settled(start.instance_id)
    assert report.error is not None
    assert f"set {variable}" in report.error.message


async def test_engine_on_cpu_has_lower_priority_than_the_mesh(hosts: Hosts) -> None:
    own = psutil.Process().nice()
    for device, expected in (("cpu:0", min(19, own + 3)), ("cuda:0", own)):
        start = hosts.host(fake_card(), device=device, THAW_ENGINE_NICENESS="3")
        report = await hosts.settled(start.instance_id)
        assert report.hosted is not None
        assert {psutil.Process(pid).nice() for pid in report.hosted.pids} == {expected}
        assert psutil.Process(report.pid).nice() == own


async def test_forked_processes_end_with_their_engine(hosts: Hosts) -> None:
    start = hosts.host(fake_card("--fork", "--ignore-term"), THAW_KILL_GRACE="1")
    report = await hosts.settled(start.instance_id)
    assert report.hosted is not None
    assert len(hosts.marked(start.instance_id)) == 2
    os.kill(report.pid, signal.SIGTERM)
    assert (await hosts.reported(start.instance_id, lambda r: r.state == "stopped")).error is None
    await hosts.left_nothing(start.instance_id)


async def test_engine_ends_with_its_killed_host(hosts: Hosts) -> None:
    """The engine ends with its host.

    All of its processes end, also those in sessions of their own, without a nodeagent.
    """
    start = hosts.host(fake_card("--fork", "--ignore-term"))
    report = await hosts.settled(start.instance_id)
    assert len(hosts.marked(start.instance_id)) == 2
    os.kill(report.pid, signal.SIGKILL)
    await hosts.left_nothing(start.instance_id)


async def test_processes_that_hide_their_environment_end_with_the_host(hosts: Hosts) -> None:
    start = hosts.host(fake_card("--retitle"))
    report = await hosts.settled(start.instance_id)
    (engine,) = hosts.marked(start.instance_id)
    (hidden,) = psutil.Process(engine).children()
    os.kill(report.pid, signal.SIGKILL)
    await hosts.left_nothing(start.instance_id)
    await hosts.eventually(lambda: asyncio.to_thread(hidden.is_running), lambda running: not running)


async def test_clean_exit_of_a_host_leaves_no_reaper(hosts: Hosts) -> None:
    start = hosts.host(fake_card())
    report = await hosts.settled(start.instance_id)
    token = token_of(next(iter(hosts.marked(start.instance_id))))
    assert len(reapers(token)) == 1
    assert not reapers(token) & set(report.hosted.pids if report.hosted else ())
    os.kill(report.pid, signal.SIGTERM)
    await hosts.reported(start.instance_id, lambda r: r.state == "stopped")
    await hosts.eventually(lambda: asyncio.to_thread(reapers, token), lambda found: not found)


async def test_idle_engine_that_stops_generating_fails(hosts: Hosts) -> None:
    start = hosts.host(fake_card(), THAW_PROBE_INTERVAL="0.2")
    assert (await hosts.settled(start.instance_id)).state == "ready"
    assert (await hosts.request(start.instance_id, "chat", messages=[], fake={"mute": True})).status == 500
    failed = await hosts.reported(start.instance_id, lambda r: r.state == "failed")
    assert failed.error is not None
    assert "generated no token" in failed.error.message
    await hosts.left_nothing(start.instance_id)


def _members(group: Path) -> list[int]:
    return list(map(int, (group / "cgroup.procs").read_text().split()))


@pytest.fixture
def narrow_group() -> Iterator[Path]:
    """Yield the file that adds pids to a control group with room for 150 MiB."""
    for root, limit in ((Path("/sys/fs/cgroup/memory"), "memory.limit_in_bytes"), (Path("/sys/fs/cgroup"), "memory.max")):
        group = root / f"thaw-test-{uuid.uuid4().hex[:8]}"
        try:
            group.mkdir()
        except OSError:
            continue
        if (group / limit).exists():
            (group / limit).write_text(str(150 * MIB))
            # Keep the group from swapping.
            for name in ("memory.swappiness", "memory.swap.max"):
                if (group / name).exists():
                    (group / name).write_text("0")
            yield group / "cgroup.procs"
            end_all(partial(_members, group))
            group.rmdir()
            return
        group.rmdir()
    pytest.skip("needs a memory control group that may be written")


@pytest.mark.usefixtures("kernel_kills")
async def test_the_out_of_memory_killer_is_named(hosts: Hosts, narrow_group: Path) -> None:
    start = hosts.host(fake_card(), cgroup_procs=str(narrow_group))
    report = await hosts.settled(start.instance_id)
    assert report.hosted is not None
    assert set(map(int, narrow_group.read_text().split())) == set(report.hosted.pids)
    await hosts.ask(start.instance_id, "chat", messages=[], fake={"eat": True})
    failed = await hosts.reported(start.instance_id, lambda r: r.state == "failed")
    assert failed.error is not None
    assert "out-of-memory" in failed.error.message


async def test_engine_is_stopped_by_the_configured_signal(hosts: Hosts) -> None:
    handler = "import signal,sys,os;signal.signal(signal.SIGINT,lambda *_:(os.write(2,b'asked by SIGINT\\n'),os._exit(0)));"
    run = f"{handler}sys.argv=sys.argv[1:];from tests.support import fake_openai as f;import uvicorn;uvicorn.Server.capture_signals={KEEP};f.main()"
    card = hosted_card("engine://m", command=[sys.executable, "-c", run, *FAKE[2:]], memory=MIB, stop_signal="SIGINT")
    start = hosts.host(card)
    report = await hosts.settled(start.instance_id)
    assert report.state == "ready", report.error
    os.kill(report.pid, signal.SIGTERM)
    await hosts.reported(start.instance_id, lambda r: r.state == "stopped")
    assert "asked by SIGINT" in Path(start.log_path).read_text()


KEEP = "lambda self:__import__('contextlib').nullcontext()"
"""uvicorn would replace the program's signal handlers."""


async def test_sleeping_engine_is_not_probed_and_wakes_with_the_same_output(hosts: Hosts) -> None:
    start = hosts.host(fake_card(), THAW_PROBE_INTERVAL="0.1")
    report = await hosts.settled(start.instance_id)
    assert report.hosted is not None
    control = subjects.engine_control(start.instance_id)
    await hosts.mesh.request(control, SleepEngine(), EngineAsleep)
    await hosts.reported(start.instance_id, lambda r: r.state == "asleep")
    # Stopped, as by a freezer: the host sends no probes meanwhile.
    process = psutil.Process(report.hosted.pids[0])
    stop(process.pid)
    received = len(hosts.reports[start.instance_id])
    # Wait for two more reports: ten probes would be due in that second or more.
    await hosts.reported(start.instance_id, lambda r: len(hosts.reports[start.instance_id]) > received + 1)
    process.resume()
    probed = await hosts.mesh.request(control, WakeEngine(), EngineProbed)
    assert probed.same
    assert hosts.reports[start.instance_id][-1].state in ("asleep", "ready")
    assert (await hosts.request(start.instance_id, "chat", messages=[])).status == 200


_STRANGER = """
import os, sys, time
if os.path.exists({state!r}):
    os.execv(sys.argv[2], sys.argv[2:])
child = os.fork()
if not child:
    os.setsid()
    if os.fork():
        os._exit(0)
    with open({state!r}, "w") as file:
        file.write(str(os.getpid()))
    os.execve(sys.argv[2], sys.argv[2:], {{k: v for k, v in os.environ.items() if not k.startswith("THAW_INSTANCE")}})
os.waitpid(child, 0)
time.sleep(60)
"""
"""First, a process outside the family serves the port: a grandchild whose parent has ended, without
the marks of the instance and of its host.
"""


async def test_process_that_took_the_port_is_not_killed(hosts: Hosts, tmp_path: Path) -> None:
    state = tmp_path / "state"
    command = [sys.executable, "-c", _STRANGER.format(state=str(state)), "x", *FAKE]
    start = hosts.host(hosted_card("engine://m", command=command, memory=MIB))
    report = await hosts.settled(start.instance_id)
    assert report.state == "ready", report.error
    attempts = [s.detail.get("attempt") for s in report.phases if s.phase is Phase.INIT]
    assert attempts == [1, 2]
    # Other tests of this machine have such servers, too: only this one is the stranger.
    stranger = psutil.Process(int(state.read_text()))
    assert stranger.status() != psutil.STATUS_ZOMBIE
    stranger.kill()


async def test_credentials_of_the_mesh_are_not_the_engines(hosts: Hosts) -> None:
    card = fake_card(env={"GIVEN": "${HOME_OF_TEST}!", "GIVEN_NOT": "${THAW_NATS_URL}"})
    start = hosts.host(card, HOME_OF_TEST="here")
    assert (await hosts.settled(start.instance_id)).state == "ready"
    env = (await hosts.request_route(start.instance_id, "/stats", "GET")).json["env"]
    assert env["GIVEN"] == "here!"
    assert env["GIVEN_NOT"] == ""
    assert sorted(k for k in env if k.startswith("THAW_")) == ["THAW_INSTANCE", "THAW_INSTANCE_HOST"]


async def test_a_host_is_small(hosts: Hosts) -> None:
    with executed():  # a forked host shares the memory of its imports
        start = hosts.host(fake_card())
    report = await hosts.settled(start.instance_id)
    assert psutil.Process(report.pid).memory_info().rss < 80 * MIB
