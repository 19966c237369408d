"""Batches of a real mesh, by the real openai client."""

from __future__ import annotations

import json
from typing import Any

import openai

from tests.e2e.batches import lines, results, start, wait
from tests.support.launcher import Thaw

SHARED = True


def test_batch_has_the_answers_of_its_requests(client: openai.OpenAI) -> None:
    batch = wait(client, start(client, lines(3)))
    assert (batch.status, batch.metadata, batch.model) == ("completed", {"k": "v"}, "one")
    assert batch.request_counts is not None
    assert (batch.request_counts.total, batch.request_counts.completed, batch.request_counts.failed) == (3, 3, 0)
    assert batch.error_file_id is None
    answered = results(client, batch.output_file_id)
    assert [answer["custom_id"] for answer in answered] == ["request-0", "request-1", "request-2"]
    for i, answer in enumerate(answered):
        assert (answer["error"], answer["response"]["status_code"]) == (None, 200)
        asked: Any = {"model": "one", "temperature": 0, "max_tokens": 4}
        alone = client.chat.completions.create(**asked, messages=[{"role": "user", "content": f"Number {i}"}])
        assert answer["response"]["body"]["choices"][0]["message"]["content"] == alone.choices[0].message.content
    assert batch.id in [found.id for found in client.batches.list(limit=1)]


def test_command_writes_the_results(mesh: Thaw) -> None:
    requests, output, errors = (mesh.home / name for name in ("in.jsonl", "out.jsonl", "out.errors.jsonl"))
    refused = lines(1, max_tokens=10**6).replace(b"request-0", b"too-long")
    requests.write_bytes(lines(2) + refused)
    status, out = mesh.inside("batches", "run", str(requests), "--output", str(output), "--json")
    batch = json.loads(out)
    assert (status, batch["ok"], batch["status"]) == (1, False, "completed")
    assert batch["request_counts"] == {"total": 3, "completed": 2, "failed": 1}
    assert batch["written"] == {"output": str(output), "error": str(errors)}
    assert [json.loads(line)["custom_id"] for line in output.read_text().splitlines()] == ["request-0", "request-1"]
    assert [json.loads(line)["custom_id"] for line in errors.read_text().splitlines()] == ["too-long"]
    assert batch["id"] == mesh.json("batches", "list", "--limit", "1")["batches"][0]["id"]
    # What has ended is not cancelled, and its results can be fetched again.
    assert mesh.json("batches", "cancel", batch["id"])["status"] == "completed"
    output.unlink()
    assert mesh.inside("batches", "show", batch["id"], "--output", str(output))[0] == 1
    assert len(output.read_text().splitlines()) == 2


def test_command_names_the_faults_of_a_file(mesh: Thaw, client: openai.OpenAI) -> None:
    requests = mesh.home / "faulty.jsonl"
    requests.write_bytes(lines(1) + lines(1))
    status, out = mesh.inside("batches", "run", str(requests), "--wait")
    assert status == 1
    assert "failed" in out
    assert "line 2: " in out
    files = [file.id for file in client.files.list(limit=5)]
    requests.write_text("no JSON\n")
    assert mesh.error("batches", "run", str(requests))["code"] == "no_endpoint"
    assert mesh.error("batches", "run", str(mesh.home / "absent.jsonl"))["code"] == "no_file"
    assert mesh.error("batches", "run", str(requests), "--output", str(mesh.home / "absent" / "out"))["code"] == "no_output"
    assert mesh.error("batches", "run", str(requests), "--endpoint", "/v1/absent")["code"] == "invalid_request"
    assert [file.id for file in client.files.list(limit=5)] == files, "the file of a refused batch stays"
    assert mesh.error("batches", "show", "batch_absent")["code"] == "not_found"
