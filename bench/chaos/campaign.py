"""Inject a plan of faults into a mesh under load, and record what clients and operators see.

The processes of a fault are struck at the same instant, and probes are sent at once. The mesh has
recovered when the probes are answered and killed services run again. The next fault follows the
recovery, after `PAUSE_S` at least and `PACE_S` at most: a longer recovery, as from most stops,
overlaps with the next faults.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import httpx
import psutil

from bench.chaos.bed import Bed
from bench.chaos.device_time import DeviceTime, Meters, measure
from bench.chaos.faults import STOP_S, Fault, Strike
from bench.chaos.load import CALLERS, PROBE, PROMPTS, Asker, Client, Served, jobs, retry_deferred
from bench.chaos.metering import Sent, expect, find_faults, find_spending_faults, read_rows
from bench.chaos.verdict import BAD, Answer, Exchange, Fate, Job, Reference, judge

PAUSE_S, PACE_S = 1.0, 4.0
_RECOVERED_WITHIN_S = 180.0
_FIND_WITHIN_S = 180.0
"""Faults that are left at the end of the plan are skipped if no victim has started by then."""
_REPLACED_S, _FIND_RETRY_S = 5.0, 0.1
_OPERATOR_S = 1.0
"""Time after which an operator (a unit of systemd) restarts a killed supervisor."""
_SETTLE_S = 120.0
_METERED_WITHIN_S = 120.0
"""Gateways report usage every two seconds; a restarted one reports what its predecessor did not."""
_DRAIN_S = 200.0
_ENGINES = ("engine", "engine host", "hosted engine")
"""Processes whose end ends the meter of an engine."""
Say = Callable[[str], None]


@dataclass
class Injection:
    """A fault that was injected. Times are seconds of the monotonic clock.

    Attributes:
        processes: Names of the processes that were struck.
        recovered_at: None if the mesh did not recover within its bound.
        until: A request that was active between `at` and this time counts for the fault.
    """

    fault: Fault
    at: float
    processes: list[str]
    recovered_at: float | None = None
    until: float = 0.0

    @property
    def recovery_s(self) -> float | None:
        return None if self.recovered_at is None else self.recovered_at - self.at


@dataclass
class Findings:
    """The results of a campaign.

    Attributes:
        hosted: The hosted engine that ran, as `Bed.hosted`.
        duration_s: From the first request until the last fault was injected.
        skipped: Faults without a victim.
        fates: The fate of each exchange.
        is_metered_exactly: No gateway was struck during a request: the ledger must equal the sum of
            the answers.
        left: Names of processes, shared memory and control groups after the shutdown, by kind.
    """

    hosted: str = ""
    duration_s: float = 0.0
    injections: list[Injection] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)
    exchanges: list[Exchange] = field(default_factory=list)
    fates: list[Fate] = field(default_factory=list)
    overbooked: list[str] = field(default_factory=list)
    booking_faults: list[str] = field(default_factory=list)
    metering_faults: list[str] = field(default_factory=list)
    metered_requests: int = 0
    device_time: DeviceTime = DeviceTime()
    is_metered_exactly: bool = False
    left: dict[str, list[str]] = field(default_factory=dict)

    def failures(self) -> list[str]:
        """Return a line for each fault that a campaign must not find."""
        found = [f"{f}: {e.job} {e.answer} {e.broken or ''}" for e, f in zip(self.exchanges, self.fates, strict=True) if f in BAD]
        found += [f"not recovered within {_RECOVERED_WITHIN_S:.0f} s: {i.fault}" for i in self.injections if i.recovered_at is None]
        found += [f"booked twice: {o}" for o in self.overbooked] + [f"booking: {b}" for b in self.booking_faults]
        found += [f"metering: {m}" for m in self.metering_faults]
        return found + [f"left behind: {kind} {name}" for kind, names in self.left.items() for name in names]


class Campaign:
    """A load on a mesh, and the faults that are injected meanwhile."""

    def __init__(self, bed: Bed, seed: int, clients: int, say: Say) -> None:
        """Prepare `clients` clients of the mesh of `bed`.

        Args:
            say: Called with a line for each fault, and for each request that went wrong.
        """
        self._bed = bed
        self._seed = seed
        self._say = say
        self._served = bed.list_served()
        self._references: dict[tuple[str, str, int], Reference] = {}
        self._findings = Findings(hosted=bed.hosted)
        self._lock = threading.Lock()
        self._random = random.Random(seed)
        self._operators: list[threading.Thread] = []
        self._timers: list[threading.Timer] = []
        self._recoveries: list[threading.Thread] = []
        self._cluster: dict[str, Any] = {"nodes": []}
        self._meters = Meters()
        self._stopped = threading.Event()
        self._clients = [
            Client(n, bed.balancer.url, jobs(self._served, seed, n), bed.balancer.gateway_of, self._was_struck, self._finish)
            for n in range(clients)
        ]
        self._probes = 0
        self._waker: threading.Thread | None = None

    def run(self, plan: tuple[Fault, ...], until_s: float | None = None) -> Findings:
        """Inject the faults of `plan`, then check what the mesh has booked and metered.

        Without load the mesh must become idle, and reservations must match the live instances.

        Args:
            until_s: No fault is injected later than so many seconds after the first request.
        """
        watcher = threading.Thread(target=self._watch_bookings, name="watcher", daemon=True)
        watcher.start()
        self._read_references()
        began = time.monotonic()
        for client in self._clients:
            client.start()
        time.sleep(PAUSE_S)
        try:
            self._inject_all(plan, began, until_s)
        finally:
            self._findings.duration_s = time.monotonic() - began
            self._stop_load()
            self._stopped.set()
            watcher.join(60)
        self._findings.booking_faults = self._bed.settle(_SETTLE_S)
        self._check_metering()
        return self._findings

    def _check_metering(self) -> None:
        """Wait until the ledger has each request that it must have, and record how it differs."""
        findings = self._findings
        sent = [Sent(e, self._is_disturbed(e)) for e in findings.exchanges]
        expected = expect(sent, [(PROBE, model, r.answer) for (model, _, _), r in self._references.items()])
        findings.is_metered_exactly = all(b.least == b.most for b in expected.values())
        deadline = time.monotonic() + _METERED_WITHIN_S
        while True:
            try:
                rows = self._bed.read_usage()
                ledger, spending = read_rows(rows), [self._bed.read_spending(port) for port in self._bed.gateway_ports]
                self._read_cluster()
            except httpx.HTTPError as e:
                findings.metering_faults = [f"no view of the ledger: {e!r}"[:300]]
            else:
                findings.metered_requests = sum(u.requests for u in ledger.values())
                findings.metering_faults = find_faults(expected, ledger) + find_spending_faults(CALLERS, rows, spending)
                findings.device_time = self._measure_device_time(rows)
                if fault := findings.device_time.find_fault():
                    findings.metering_faults.append(fault)
            is_final = findings.device_time.is_settled or time.monotonic() > deadline
            if is_final and (not findings.metering_faults or time.monotonic() > deadline):
                return
            time.sleep(0.25)

    def _measure_device_time(self, rows: list[dict[str, Any]]) -> DeviceTime:
        killed = sum(s.victim in _ENGINES and s.action == "kill" for i in self._findings.injections for s in i.fault.strikes)
        return measure(self._meters, rows, killed)

    def _is_disturbed(self, exchange: Exchange) -> bool:
        """Return whether a gateway was struck, or had not recovered, during the exchange."""
        return any(
            i.at <= exchange.ended
            and exchange.sent <= max(i.until, i.at + STOP_S)
            and any(name.startswith("gateway") for name in i.processes)
            for i in self._findings.injections
        )

    def close_bed(self) -> None:
        """Shut the mesh down and look for what it leaves behind."""
        self._findings.left = self._bed.shut_down()

    # The undisturbed answers.

    def _read_references(self) -> None:
        """Request every undisturbed answer, from all models at the same time."""
        threads = [threading.Thread(target=self._read_references_of, args=(s,), daemon=True) for s in self._served]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        wanted = sum(len(PROMPTS) * len(s.tokens) for s in self._served)
        if len(self._references) != wanted:
            raise RuntimeError(f"only {len(self._references)} of {wanted} undisturbed answers arrived")
        self._say(f"read {len(self._references)} undisturbed answers")

    def _read_references_of(self, served: Served) -> None:
        asker = Asker(self._bed.balancer.url, PROBE, self._bed.balancer.gateway_of)
        for prompt in PROMPTS:
            for tokens in served.tokens:
                job = Job(0, served.name, prompt, tokens, False, engine=served.engine, caller=PROBE)
                self._references[job.question] = asker.reference(job, gaps=served.near_ties)
        asker.close()

    # Exchanges of the clients.

    def _finish(self, exchange: Exchange) -> None:
        exchange.ended = exchange.ended or time.monotonic()
        fate = judge(exchange, self._references.get(exchange.job.question))
        with self._lock:
            self._findings.exchanges.append(exchange)
            self._findings.fates.append(fate)
        if fate in BAD:
            self._say(f"  {fate.upper()}: {self._describe(exchange)}")

    def _describe(self, exchange: Exchange) -> str:
        took = exchange.ended - exchange.sent
        answer, others = exchange.answer, [f"{r.response_id} {r.error or r.text[:40]!r}" for r in exchange.repeats]
        reference = self._references.get(exchange.job.question)
        expected = repr(reference.answer.text[:60]) if reference and exchange.job.exact and not answer.error else ""
        return (
            f"{exchange.job.kind} {exchange.job.model} {exchange.job.tokens} tokens, key {exchange.job.key}, sent {took:.1f} s ago, "
            f"statuses {exchange.statuses}, cuts {exchange.cuts}: {exchange.broken or answer.error or answer.response_id} "
            f"{answer.finish} {answer.tokens} {answer.text[:60]!r} {expected} {others}"
        )

    def _was_struck(self, gateway: str | None, since: float) -> bool:
        """Return whether a fault has struck this gateway (None: any) since then.

        A connection to a stopped gateway may also break later: the supervisor may replace the
        gateway at any time before it would continue.
        """
        with self._lock:
            injections = list(self._findings.injections)
        for i in injections:
            grace_s = STOP_S + 10 if i.fault.kind == "stop" else 1.0
            if i.at >= since - grace_s and any(n == gateway or (gateway is None and n.startswith("gateway")) for n in i.processes):
                return True
        return False

    # Faults.

    def _inject_all(self, plan: tuple[Fault, ...], began: float, until_s: float | None) -> None:
        """Inject all faults in order.

        A fault whose victim does not run waits until the victim runs, and is skipped at the end.
        """
        waiting: deque[Fault] = deque()
        for fault in plan:
            if until_s is not None and time.monotonic() - began > until_s:
                break
            waiting.append(fault)
            self._inject_possible(waiting, began)
        deadline = time.monotonic() + _FIND_WITHIN_S
        while waiting and time.monotonic() < deadline:
            if not self._inject_possible(waiting, began):
                time.sleep(_FIND_RETRY_S)
        for fault in waiting:
            self._findings.skipped.append(str(fault))
            self._say(f"{fault.number}: {fault} skipped for want of a victim")

    def _inject_possible(self, waiting: deque[Fault], began: float) -> bool:
        """Inject the waiting faults whose victims run; return whether there were any."""
        before = len(waiting)
        for _ in range(before):
            if not self._inject(fault := waiting.popleft(), began):
                waiting.append(fault)
        return len(waiting) < before

    def _inject(self, fault: Fault, began: float) -> bool:
        """Inject a fault; return False if one of its victims does not run now."""
        targets = [(strike, self._find_victim(strike)) for strike in fault.strikes]
        if any(process is None for _, process in targets):
            return False
        cold = self._cold_model()
        found = [(s, p) for s, p in targets if p is not None]
        injection = Injection(fault, time.monotonic(), [self._bed.name_of(s.victim, p) for s, p in found])
        with self._lock:
            self._findings.injections.append(injection)
        for strike, process in found:
            self._strike(strike, process)
        recovery = threading.Thread(
            target=self._report_recovery, args=(injection, found, cold, began), name=f"fault {fault.number}", daemon=True
        )
        recovery.start()
        self._recoveries.append(recovery)
        recovery.join(PACE_S)
        time.sleep(max(0.0, injection.at + PAUSE_S - time.monotonic()))
        return True

    def _report_recovery(self, injection: Injection, found: list[tuple[Strike, psutil.Process]], cold: str, began: float) -> None:
        """Wait for the recovery, and report it."""
        self._await_recovery(injection, found, cold)
        ended = injection.recovered_at or time.monotonic()
        injection.until = max(ended, injection.at + STOP_S) if injection.fault.kind == "stop" else ended
        took = f"{injection.recovery_s:.1f} s" if injection.recovery_s is not None else "NOT RECOVERED"
        pids = ", ".join(f"{name} {p.pid}" for name, (_, p) in zip(injection.processes, found, strict=True))
        bad = sum(f in BAD for f in self._findings.fates)
        clock = time.strftime("%H:%M:%S", time.gmtime(time.time() - (time.monotonic() - injection.at)))
        self._say(
            f"{injection.fault.number}: {injection.fault} ({pids}) at {clock} (+{injection.at - began:.0f} s): {took}; "
            f"{len(self._findings.fates)} requests, {bad} bad"
        )

    def _find_victim(self, strike: Strike) -> psutil.Process | None:
        """Return a living process of the strike's kind, or None.

        Waits up to `_REPLACED_S` for a process that is being restarted. A hosted engine starts on
        demand: a request starts it, and a later call finds it.
        """
        deadline = time.monotonic() + _REPLACED_S
        while True:
            if found := self._bed.victims(strike.victim):
                return found[strike.choose(len(found))]
            if strike.victim in ("engine host", "hosted engine"):
                self._start_hosted_engine()
                return None
            if time.monotonic() > deadline:
                return None
            time.sleep(_FIND_RETRY_S)

    def _start_hosted_engine(self) -> None:
        if self._waker is None or not self._waker.is_alive():
            self._waker = threading.Thread(target=self._probe, args=("llama",), daemon=True)
            self._waker.start()

    def _strike(self, strike: Strike, process: psutil.Process) -> None:
        with contextlib.suppress(psutil.NoSuchProcess):
            if strike.action == "kill":
                process.kill()
            else:
                # PostgreSQL's work is done by the children of its first process.
                stopped = [process, *(process.children(recursive=True) if strike.victim == "postgres" else [])]
                for p in stopped:
                    os.kill(p.pid, signal.SIGSTOP)
                timer = threading.Timer(STOP_S, _continue, [stopped])
                timer.daemon = True
                timer.start()
                self._timers.append(timer)
        if strike.victim == "supervisor" and strike.action == "kill":
            operator = threading.Thread(target=self._restart_supervisor, name="operator", daemon=True)
            operator.start()
            self._operators.append(operator)

    def _restart_supervisor(self) -> None:
        time.sleep(_OPERATOR_S)
        for _ in range(5):
            try:
                self._bed.start_mesh()
                return
            except (AssertionError, OSError) as e:
                self._say(f"  `thaw up` after the supervisor's death failed: {str(e)[:1500]}")
                time.sleep(1)

    def _await_recovery(self, injection: Injection, found: list[tuple[Strike, psutil.Process]], cold: str) -> None:
        """Wait until the mesh has recovered from a fault, and note when.

        It has recovered once a warm model and a cold one have answered requests sent after the
        fault, and killed services run again.
        """
        answered: list[float] = []
        probes = [threading.Thread(target=self._probe_until, args=(m, answered, injection.at), daemon=True) for m in ("one", cold)]
        for probe in probes:
            probe.start()
        deadline = injection.at + _RECOVERED_WITHIN_S
        replaced = 0.0
        while time.monotonic() < deadline:
            if not replaced and all(self._is_replaced(s, p) for s, p in found):
                replaced = time.monotonic()
            if replaced and len(answered) == len(probes):
                injection.recovered_at = max(replaced, *answered)
                return
            time.sleep(0.02)

    def _is_replaced(self, strike: Strike, process: psutil.Process) -> bool:
        """Return whether a killed service runs again.

        Engines and zygotes start on demand; stopped processes continue by themselves.
        """
        if strike.action == "stop" or strike.victim in ("engine", "engine host", "hosted engine", "zygote"):
            return True
        wanted = 2 if strike.victim in ("gateway", "scheduler", "nodeagent", "loader") else 1
        return len([p for p in self._bed.victims(strike.victim) if p.pid != process.pid]) >= wanted

    def _probe_until(self, model: str, answered: list[float], since: float) -> None:
        while time.monotonic() < since + _RECOVERED_WITHIN_S:
            if self._probe(model):
                answered.append(time.monotonic())
                return

    def _probe(self, model: str) -> bool:
        """Send one short request, judge it as all others, and return whether it was answered."""
        served = next((s for s in self._served if s.name == model), self._served[0])
        asker = Asker(self._bed.balancer.url, PROBE, self._bed.balancer.gateway_of)
        self._probes += 1
        job = Job(self._probes, served.name, PROMPTS[0], served.tokens[0], False, engine=served.engine, caller=PROBE)
        exchange = Exchange(job, time.monotonic())
        exchange.answer = retry_deferred(exchange, asker, self._was_struck)
        exchange.statuses = [s for s in asker.statuses if s >= 400]
        exchange.server_errors = sum(s >= 500 for s in asker.statuses)
        asker.close()
        self._finish(exchange)
        return exchange.answer.error is None

    def _cold_model(self) -> str:
        """Return a builtin model without an instance, by the last view of the cluster.

        If all have one, return any but the warm model.
        """
        live = {i["model"] for n in self._cluster["nodes"] for i in n["instances"]}
        names = [s.name for s in self._served if s.engine == "builtin" and s.name in ("two", "three", "five")]
        return self._random.choice([n for n in names if n not in live] or names)

    def _watch_bookings(self) -> None:
        """Check twice a second that no memory is booked twice."""
        while not self._stopped.wait(0.5):
            with contextlib.suppress(httpx.HTTPError, ValueError, KeyError, OSError):
                self._read_cluster()
                for fault in self._bed.find_overbooked(self._cluster):
                    self._say(f"  OVERBOOKED: {fault}")
                    self._findings.overbooked.append(fault)

    def _read_cluster(self) -> None:
        self._cluster = self._bed.cluster()
        self._meters.read(self._cluster)

    # The end.

    def _stop_load(self) -> None:
        """Wait for all recoveries, then for the clients' last requests."""
        for waiter in (*self._timers, *self._recoveries):
            waiter.join()
        for operator in self._operators:
            operator.join(180)
        for client in self._clients:
            client.stop()
        deadline = time.monotonic() + _DRAIN_S
        for client in self._clients:
            client.join(max(0.1, deadline - time.monotonic()))
            if client.is_alive() and (hanging := client.current) is not None:
                hanging.answer = Answer(error=f"no answer after {time.monotonic() - hanging.sent:.0f} s")
                self._finish(hanging)


def _continue(processes: list[psutil.Process]) -> None:
    for process in processes:
        with contextlib.suppress(psutil.Error, ProcessLookupError):
            if process.is_running():
                process.resume()


def say(line: str) -> None:
    """Print a line to standard error, with the time of day."""
    print(f"{time.strftime('%H:%M:%S', time.gmtime())} {line}", file=sys.stderr, flush=True)
