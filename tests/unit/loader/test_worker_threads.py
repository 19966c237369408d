"""Threads for blocking work: as many as are needed, and reused."""

from __future__ import annotations

import threading
from concurrent.futures import Future
from functools import partial

import pytest

from services.loader.adapters import worker_threads
from services.loader.adapters.worker_threads import WorkerThreads

WITHIN_S = 60.0


def report(done: Future[threading.Thread], barrier: threading.Barrier) -> None:
    barrier.wait(WITHIN_S)
    done.set_result(threading.current_thread())


def run_together(threads: WorkerThreads, count: int) -> list[threading.Thread]:
    """Run work that ends only when all of it has begun, and return its threads."""
    barrier = threading.Barrier(count)
    ended = [Future[threading.Thread]() for _ in range(count)]
    for done in ended:
        threads.run(partial(report, done, barrier))
    return [done.result(WITHIN_S) for done in ended]


def test_blocked_work_does_not_delay_other_work() -> None:
    threads = WorkerThreads("test")
    for _ in range(3):
        used = run_together(threads, 20)
        assert len(set(used)) == 20
        assert all(t.daemon for t in used)


def test_threads_are_reused() -> None:
    threads = WorkerThreads("test")
    assert len({run_together(threads, 1)[0] for _ in range(50)}) < 50


def test_surplus_threads_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_threads, "_KEPT_IDLE", 0)
    for thread in run_together(WorkerThreads("test"), 5):
        thread.join(WITHIN_S)
        assert not thread.is_alive()


def test_threads_end_when_they_are_closed() -> None:
    threads = WorkerThreads("test")
    used = run_together(threads, 3)
    is_free = threading.Event()
    busy: Future[threading.Thread] = Future()

    def work() -> None:
        busy.set_result(threading.current_thread())
        is_free.wait(WITHIN_S)

    threads.run(work)
    used.append(busy.result(WITHIN_S))
    threads.close()
    assert used[-1].is_alive(), "its work continues"
    is_free.set()
    for thread in used:
        thread.join(WITHIN_S)
        assert not thread.is_alive()
