"""An engine without torch, with configurable faults.

It is a real process that implements the engine's side of the contracts.

Started as `python -m tests.support.stub_engine SPEC.json` (an `EngineStart`).
`card.spec.engine_args["stub"]` configures it:

    ready_after      seconds until ready (default 0); `never_ready`: stays loading
    progress_every   seconds between progress reports while loading
    fail             error body to report, then exit 1
    exit             exit status to end with while loading; `signal`: signal that ends it while
                     loading
    ignore_term      True: SIGTERM is ignored
    ignore_drain     True: a drain is acknowledged and nothing follows
    mute             True: neither reports nor answers once it was ready
    tokens, pace     chunks of an answer, and seconds between them; `Pace` lets it wait longer
    weights          True: attaches and holds weights at the loader
    ballast_mib      memory of its own, touched; `leak_mib`: as much again at each wake
    children         processes that it forks, each with a ballast of its own
    no_hold          True: it cannot be held (an engine that knows nothing of suspending)
    wake             "other": answers otherwise after a wake; "fail": refuses it; "mute": does not
                     answer it; "exit": dies of it; "bad_once": as "other" in the first process of
                     this instance only

A request whose body has `exit` ends the process at once with that status; `signal`: by that signal.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import nats
from nats.aio.client import Client
from nats.aio.msg import Msg

from shared.contracts import subjects
from shared.contracts.base import Done, ErrorBody, Failure, Message
from shared.contracts.engine import (
    ENGINE_CONTROL,
    DrainEngine,
    EngineAsleep,
    EngineLoad,
    EngineProbed,
    EngineReport,
    EngineStart,
    EngineState,
    PingEngine,
    SleepEngine,
    WakeEngine,
)
from shared.contracts.inference import (
    CancelInfer,
    ChoiceDelta,
    InferChunk,
    InferFailed,
    InferFinished,
    InferRequest,
    InferStarted,
    Usage,
)
from shared.contracts.loader import AttachWeights, WeightsAttached
from shared.contracts.phases import Phase, PhaseSpan
from shared.errors import EngineFailed, InstanceBusy, InstanceDraining, UnsupportedParameter
from shared.start_files import take_start_file
from tests.support.paced_zygote import wait_before_step


class StubEngine:
    def __init__(self, start: EngineStart) -> None:
        self.start = start
        self.stub: dict[str, Any] = start.card.spec.engine_args.get("stub", {})
        self.state: EngineState = "loading"
        self.progress = 0.0
        self.error: ErrorBody | None = None
        self.active: dict[str, asyncio.Task[None]] = {}
        self.completed = 0
        self.idle_since = time.monotonic()
        self.born = time.monotonic()
        self.ended = asyncio.Event()
        self.exit_status = 0
        self.nc = Client()
        self.phases: tuple[tuple[Phase, float, float], ...] = ()
        self.weights_id: str | None = None
        self.held = False
        self.ballast = [os.urandom(1 << 20) * int(self.stub.get("ballast_mib", 0))]
        self.children = [self.fork_child() for _ in range(int(self.stub.get("children", 0)))]

    def fork_child(self) -> int:
        """Fork a process that touches its own copy of the ballast and waits."""
        pid = os.fork()
        if pid == 0:
            ballast = os.urandom(1 << 20) * int(self.stub.get("ballast_mib", 0))
            while ballast:
                time.sleep(60)
            os._exit(0)
        return pid

    async def run(self) -> int:
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGTERM, self.on_term)
        self.nc = await nats.connect(os.environ["THAW_NATS_URL"], max_reconnect_attempts=-1, reconnect_time_wait=0.1)
        instance = self.start.instance_id
        await self.nc.subscribe(subjects.infer(instance), cb=self.on_infer)
        await self.nc.subscribe(subjects.engine_control(instance), cb=self.on_control)
        tasks = [asyncio.create_task(self.load()), asyncio.create_task(self.report_each_second())]
        await self.ended.wait()
        for task in tasks:
            task.cancel()
        await self.report()
        await self.nc.drain()
        return self.exit_status

    def on_term(self) -> None:
        if not self.stub.get("ignore_term"):
            self.state = "stopped"
            self.ended.set()

    async def load(self) -> None:
        await self.report()
        begun = time.monotonic()
        ready_after = float(self.stub.get("ready_after", 0.0))
        every = self.stub.get("progress_every")
        if self.stub.get("weights"):
            attach = AttachWeights(instance_id=self.start.instance_id, card=self.start.card, until="complete")
            answer = await self.nc.request(subjects.loader_command(self.start.node), attach.model_dump_json().encode(), timeout=10)
            self.weights_id = WeightsAttached.model_validate_json(answer.data).weights_id
        while time.monotonic() - begun < ready_after or self.stub.get("never_ready"):
            await asyncio.sleep(min(every or 0.02, max(0.0, ready_after - (time.monotonic() - begun)) or 0.02))
            if every:
                self.progress = min(0.99, self.progress + 0.01)
                await self.report()
        if "fail" in self.stub:
            self.state, self.error, self.exit_status = "failed", ErrorBody.model_validate(self.stub["fail"]), 1
            self.ended.set()
            return
        self.exit_if_requested(self.stub)
        self.phases = ((Phase.LIBRARIES, self.born, begun), (Phase.INIT, begun, time.monotonic()))
        self.state, self.progress = "ready", 1.0
        await self.report()

    def exit_if_requested(self, order: dict[str, Any]) -> None:
        if "exit" in order:
            sys.stderr.write("stub engine: exit as requested\n")
            sys.stderr.flush()
            os._exit(int(order["exit"]))
        if "signal" in order:
            os.kill(os.getpid(), int(order["signal"]))

    def make_report(self) -> EngineReport:
        now = time.monotonic()
        return EngineReport(
            instance_id=self.start.instance_id,
            pid=os.getpid(),
            state=self.state,
            phase=Phase.LOAD if self.state == "loading" else None,
            progress=self.progress,
            load=EngineLoad(
                active=len(self.active),
                completed=self.completed,
                idle_ms=0 if self.active else int((now - self.idle_since) * 1000),
            ),
            phases=tuple(
                PhaseSpan(phase=p, start_ms=(a - now) * 1e3, duration_ms=(b - a) * 1e3, process="stub") for p, a, b in self.phases
            ),
            error=self.error,
            weights_id=self.weights_id,
        )

    @property
    def mute(self) -> bool:
        return bool(self.stub.get("mute")) and self.state == "ready" and Path(self.start.log_path + ".mute").exists()

    async def report(self) -> None:
        if not self.mute:
            await self.nc.publish(subjects.engine_report(self.start.node), self.make_report().model_dump_json().encode())

    async def report_each_second(self) -> None:
        while True:
            await asyncio.sleep(1.0)
            await self.report()

    async def on_control(self, message: Msg) -> None:
        if self.mute:
            return
        control = ENGINE_CONTROL.validate_json(message.data)
        answer: Message
        match control:
            case PingEngine():
                answer = self.make_report()
            case DrainEngine(only_if_idle=True) if self.active:
                answer = Failure(error=InstanceBusy(f"{len(self.active)} requests are being served").body())
            case DrainEngine():
                answer = Done()
                if not self.stub.get("ignore_drain"):
                    self.state = "draining"
                    await self.report()
                    self.leave_when_idle()
            case CancelInfer():
                task = self.active.get(control.request_id)
                if task is not None:
                    task.cancel()
                answer = Done()
            case SleepEngine(level=0) if not self.stub.get("no_hold"):
                answer = Failure(error=InstanceBusy("requests are served").body()) if self.active else EngineAsleep(level=0)
                self.held = not self.active
            case WakeEngine() if not self.stub.get("no_hold"):
                found = self.wake()
                if found is None:
                    return
                answer = found
            case _:
                answer = Failure(error=UnsupportedParameter("a stub has no sleep levels").body())
        if message.reply:
            await self.nc.publish(message.reply, answer.model_dump_json().encode())

    def wake(self) -> Message | None:
        how = self.stub.get("wake")
        self.ballast += [os.urandom(1 << 20) * int(self.stub.get("leak_mib", 0))]
        marker = Path(self.start.log_path + ".woken")
        if how == "bad_once" and marker.exists():
            how = None
        marker.touch()
        if how == "exit":
            os._exit(3)
        if how == "mute":
            return None
        if how == "fail":
            return Failure(error=EngineFailed("it does not wake").body())
        same = how not in ("other", "bad_once")
        self.held = not same
        return EngineProbed(same=same, took_ms=1.0)

    def leave_when_idle(self) -> None:
        if self.state == "draining" and not self.active:
            self.state = "stopped"
            self.ended.set()

    async def on_infer(self, message: Msg) -> None:
        request = InferRequest.model_validate_json(message.data)
        if self.held:
            await self.send(message.reply, InferFailed(seq=0, error=InstanceDraining().body()))
            return
        task = asyncio.create_task(self.serve(request, message.reply))
        self.active[request.request_id] = task
        task.add_done_callback(lambda _: self.served(request.request_id))
        await self.report()

    def served(self, request_id: str) -> None:
        self.active.pop(request_id, None)
        self.completed += 1
        self.idle_since = time.monotonic()
        self.leave_when_idle()

    async def serve(self, request: InferRequest, reply: str) -> None:
        self.exit_if_requested({k: request.body[k] for k in ("exit", "signal") if k in request.body})
        count, pace = int(self.stub.get("tokens", 5)), float(self.stub.get("pace", 0.0))
        await self.send(reply, InferStarted(prompt_tokens=1))
        for i in range(count):
            await asyncio.sleep(max(pace, wait_before_step()))
            delta = ChoiceDelta(text=f" {i}", token_ids=(i,), finish_reason="stop" if i == count - 1 else None)
            await self.send(reply, InferChunk(seq=i + 1, choices=(delta,)))
        await self.send(reply, InferFinished(seq=count + 1, usage=Usage(prompt_tokens=1, completion_tokens=count)))

    async def send(self, reply: str, message: Message) -> None:
        await self.nc.publish(reply, message.model_dump_json().encode())


def main() -> int:
    start = EngineStart.model_validate_json(take_start_file(Path(sys.argv[1])))
    return asyncio.run(StubEngine(start).run())


if __name__ == "__main__":
    sys.exit(main())
