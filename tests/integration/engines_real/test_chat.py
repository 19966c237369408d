"""Requests to real engines: whole, streamed, cancelled, constrained, refused."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import psutil
import pytest

from services.enginehost.drivers.port import Launch
from services.enginehost.drivers.vllm import Vllm
from services.enginehost.http1 import Address, Client, HttpRequest, call
from services.enginehost.settings import HostSettings
from shared.contracts import subjects
from shared.contracts.engine import EngineProbed, ProbeEngine
from shared.contracts.inference import InferData, InferEnd
from shared.contracts.migration import ListRequests, RequestsListed
from shared.messaging import Mesh
from tests.integration.engines_real.conftest import PATIENCE_S, RealEngine, listening
from tests.support.engines import Stream
from tests.support.hosted import Hosts, hosted_card
from tests.support.mesh import Brake
from tests.support.servers import NatsServer

pytestmark = [pytest.mark.slow, pytest.mark.timeout(2 * PATIENCE_S)]
HELLO = [{"role": "user", "content": "Where does the ice go?"}]
LONG = 900


async def test_complete_and_streamed_responses_are_equal(mesh: Mesh, nats_server: NatsServer, real: RealEngine) -> None:
    hosts = await listening(mesh, nats_server.url, real)
    asked: dict[str, Any] = {"messages": HELLO, "max_tokens": 24, "temperature": 0}
    whole = await hosts.request(real.instance, "chat", **asked)
    streamed = await hosts.request(real.instance, "chat", **asked, stream=True)
    text = whole.json["choices"][0]["message"]["content"]
    assert whole.json["model"] == "demo"
    assert text
    assert streamed.text() == text
    assert whole.usage is not None
    assert whole.usage.completion_tokens == 24
    assert whole.usage.prompt_tokens == whole.json["usage"]["prompt_tokens"] > 0


async def test_probe_is_deterministic(mesh: Mesh, nats_server: NatsServer, real: RealEngine) -> None:
    await listening(mesh, nats_server.url, real)
    for _ in range(3):
        assert (await mesh.request(subjects.engine_control(real.instance), ProbeEngine(), EngineProbed)).same


# Since 0.2.0 vLLM on cpu starts without its development mode, on a Unix socket: this test has to
# start one of its own.
@pytest.mark.long
@pytest.mark.parametrize("level", [1, 2])
async def test_vllm_sleep_endpoints_behave_as_the_driver_expects(
    mesh: Mesh, nats_server: NatsServer, vllm: RealEngine, tmp_path: Path, level: int
) -> None:
    """vLLM's sleep endpoints behave as its driver expects.

    On cpu it frees no memory, but reads the weights again: calls, order and statuses equal those on
    a GPU.
    """
    hosts = await listening(mesh, nats_server.url, vllm)
    hosted = hosts.reports[vllm.instance][-1].hosted
    assert hosted is not None
    listeners = [
        c.laddr.port for pid in hosted.pids for c in psutil.Process(pid).net_connections("tcp") if c.status == psutil.CONN_LISTEN
    ]
    client = Client(Address(port=listeners[0]))
    driver = Vllm(Launch(hosted_card(tmp_path, "vllm"), "cuda:0", 0, "127.0.0.1", listeners[0], "", HostSettings()))

    async def sleeps() -> bool:
        asleep: bool = json.loads(await call(client, HttpRequest("GET", "/is_sleeping"), "asking"))["is_sleeping"]
        return asleep

    await driver.sleep(client, level)
    assert await sleeps()
    await driver.wake(client, level)
    assert not await sleeps()
    assert (await mesh.request(subjects.engine_control(vllm.instance), ProbeEngine(), EngineProbed)).same


async def test_log_probabilities_and_text_completions(mesh: Mesh, nats_server: NatsServer, real: RealEngine) -> None:
    hosts = await listening(mesh, nats_server.url, real)
    answer = await hosts.request(real.instance, "completion", prompt="The", max_tokens=5, temperature=0, logprobs=2)
    assert answer.status == 200, answer.body
    logprobs = answer.json["choices"][0]["logprobs"]
    assert len(logprobs["tokens"]) == 5
    assert all(p <= 0 for p in logprobs["token_logprobs"])


async def test_json_mode_reaches_the_engine(mesh: Mesh, nats_server: NatsServer, real: RealEngine) -> None:
    """JSON mode reaches the engine: random weights give JSON only if constrained."""
    hosts = await listening(mesh, nats_server.url, real)
    schema = {"type": "object", "properties": {"a": {"enum": ["ice"]}}, "required": ["a"], "additionalProperties": False}
    wanted: dict[str, Any] = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema, "strict": True}}
    if real.engine == "llamacpp":
        wanted = {"type": "json_object", "schema": schema}
    answer = await hosts.request(
        real.instance, "chat", messages=HELLO, max_tokens=200, temperature=0, response_format=wanted, stop=["}"]
    )
    assert answer.status == 200, answer.body
    assert json.loads(answer.json["choices"][0]["message"]["content"] + "}") == {"a": "ice"}


async def test_a_cancelled_request_stops_the_engine(mesh: Mesh, nats_server: NatsServer, real: RealEngine) -> None:
    hosts = await listening(mesh, nats_server.url, real)
    (pid, *_) = sorted(_pids(hosts, real), key=_cpu, reverse=True)
    idle = _cpu(pid)
    whole = await hosts.request(real.instance, "chat", messages=HELLO, max_tokens=LONG, temperature=0, **ENDLESS)
    assert whole.usage is not None
    assert whole.usage.completion_tokens == LONG
    cost = _cpu(pid) - idle
    generated = await _generated(hosts, real) if real.engine == "vllm" else 0
    stream, at_cancel = await _cancelled(hosts, real, pid)
    # The next request is served after it: an engine that had continued would have computed all of
    # it by then.
    short = await hosts.request(real.instance, "chat", messages=HELLO, max_tokens=2, temperature=0)
    assert short.status == 200
    if real.engine == "vllm":
        await hosts.eventually(lambda: _running(hosts, real), lambda n: n == 0)
        assert await _generated(hosts, real) - generated < LONG
    assert not any(isinstance(reply, InferEnd) for reply in stream.replies)
    assert _cpu(pid) - at_cancel < 0.5 * cost


async def _cancelled(hosts: Hosts, real: RealEngine, pid: int) -> tuple[Stream, float]:
    """Cancel a stream after its first data, before the engine can generate much more.

    The engine's process runs in short slices until then, so that it cannot end the response first.

    Returns:
        The stream, and the CPU seconds of the engine's process when its host had cancelled it.
    """
    brake = Brake(pid)
    try:
        asked: dict[str, Any] = {"messages": HELLO, "max_tokens": LONG, "temperature": 0, **ENDLESS}
        stream = await hosts.ask(real.instance, "chat", **asked, stream=True)
        while not any(isinstance(reply, InferData) for reply in stream.replies):
            brake.step(0.005)
            await asyncio.sleep(0.02)  # its data pass the host and NATS
        await hosts.cancel(real.instance, stream.request_id)
        control = subjects.engine_control(real.instance)
        await hosts.eventually(lambda: _list_requests(hosts, control), lambda ids: stream.request_id not in ids)
        return stream, _cpu(pid)
    finally:
        brake.resume()


async def _list_requests(hosts: Hosts, control: str) -> set[str]:
    """Return the ids of the requests that a host serves."""
    return {r.request_id for r in (await hosts.mesh.request(control, ListRequests(), RequestsListed)).requests}


ENDLESS: dict[str, Any] = {"ignore_eos": True, "logit_bias": {"2": -100}}


def _pids(hosts: Hosts, real: RealEngine) -> tuple[int, ...]:
    hosted = hosts.reports[real.instance][-1].hosted
    assert hosted is not None
    return hosted.pids


def _cpu(pid: int) -> float:
    times = psutil.Process(pid).cpu_times()
    return float(times.user + times.system)


async def _running(hosts: Hosts, real: RealEngine) -> float:
    return await _metric(hosts, real, "vllm:num_requests_running")


async def _generated(hosts: Hosts, real: RealEngine) -> float:
    return await _metric(hosts, real, "vllm:generation_tokens_total")


async def _metric(hosts: Hosts, real: RealEngine, name: str) -> float:
    text = (await hosts.request_route(real.instance, "/metrics", "GET")).body.decode()
    return sum(float(line.split()[-1]) for line in text.splitlines() if line.startswith(name))


async def test_vllm_refusal_keeps_its_status_and_message(mesh: Mesh, nats_server: NatsServer, vllm: RealEngine) -> None:
    hosts = await listening(mesh, nats_server.url, vllm)
    answer = await hosts.request(vllm.instance, "chat", messages=HELLO, max_tokens=100_000, stream=True)
    assert answer.status == 400
    assert answer.json["error"]["type"] == "BadRequestError"
    assert "max_tokens" in answer.json["error"]["message"]


async def test_vllm_reports_token_ids_and_resumes_from_them(mesh: Mesh, nats_server: NatsServer, vllm: RealEngine) -> None:
    hosts = await listening(mesh, nats_server.url, vllm)
    asked: dict[str, Any] = {"temperature": 0, "return_token_ids": True}
    whole = (await hosts.request(vllm.instance, "completion", prompt="The ice", max_tokens=12, **asked)).json["choices"][0]
    begun = [*whole["prompt_token_ids"], *whole["token_ids"][:5]]
    rest = (await hosts.request(vllm.instance, "completion", prompt=begun, max_tokens=7, **asked)).json["choices"][0]
    assert rest["token_ids"] == whole["token_ids"][5:]


async def test_other_routes_of_vllm(mesh: Mesh, nats_server: NatsServer, vllm: RealEngine) -> None:
    hosts = await listening(mesh, nats_server.url, vllm)
    answer = await hosts.request_route(vllm.instance, "/v1/messages", "POST", max_tokens=4, messages=HELLO)
    assert answer.status == 200, answer.body
    assert answer.json["type"] == "message"
    assert answer.usage is not None
    assert answer.usage.completion_tokens > 0
