"""Wrong input gives an error with a remedy, as JSON if asked for, and never a traceback."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from decimal import Decimal
from pathlib import Path

import pytest

from shared.contracts.findings import Finding
from shared.contracts.keys import ApiKey, KeyList
from thaw.cli import init
from thaw.cli.api import Api
from thaw.cli.app import main
from thaw.cli.completions import Completion, _absorb, _events
from thaw.cli.gateway import Gateway
from thaw.errors import CommandError
from thaw.launcher.server_checks import check_nats, check_postgres
from thaw.units import parse_duration, parse_size

LARGE = "9" * 400


@pytest.fixture(autouse=True)
def without_a_mesh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("THAW_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("THAW_HOME", str(tmp_path))


def error_of(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """Run a command that fails, and return its error's message."""
    assert main([*arguments, "--json"]) in (1, 2)
    message: str = json.loads(capsys.readouterr().out)["error"]["message"]
    return message


@pytest.mark.parametrize(
    ("named", "arguments"),
    [
        ("--budget-day-money", ("keys", "change", "alice", "--budget-day-money", "1e30")),
        ("overlap_s", ("keys", "rotate", "alice", "--overlap", "60d")),
        ("expires", ("keys", "change", "alice", "--expires", "1900-01-01")),
        ("expires", ("keys", "add", "alice", "--expires", "1900-01-01")),
        ("--expires", ("keys", "change", "alice", "--expires", f"{LARGE}d")),
        ("--expires 2020-01-01 is not in the future", ("keys", "add", "alice", "--expires", "2020-01-01")),
        ("--expires 0 is not in the future", ("keys", "change", "alice", "--expires", "0")),
        ("models", ("keys", "change", "alice", *(["--models", "x"] * 300))),
        ("'a b'", ("keys", "add", "a b")),
        ("--since", ("usage", "--since", f"{LARGE}d")),
        ("--memory", ("models", "add", "x", "hf://a/b", "--memory", f"{LARGE}GB")),
        ("--what-if", ("explain", "m", "--what-if", f"budget=n/cuda:0:{LARGE}GB")),
        ("devices: Input should be greater than 0", ("explain", "m", "--what-if", "add-node=big:0")),
        ("node", ("pull", "m", "--node", "")),
    ],
)
def test_wrong_options_are_named(capsys: pytest.CaptureFixture[str], named: str, arguments: tuple[str, ...]) -> None:
    message = error_of(capsys, *arguments)
    assert named in message
    assert "\n" not in message


@pytest.mark.parametrize("place", ["user:pa#ss@host:4222", "user:pa/ss@host:4222", "host:abc", "[::1:4222", "host:4222,[::1:4222"])
@pytest.mark.parametrize(
    ("check", "scheme", "name"), [(check_nats, "nats", "THAW_NATS_URL"), (check_postgres, "postgresql", "THAW_DATABASE_URL")]
)
async def test_urls_of_servers_that_cannot_be_read_are_named_without_their_password(
    check: Callable[[str, int], Awaitable[Finding]], scheme: str, name: str, place: str
) -> None:
    found = await check(f"{scheme}://{place}", 1)
    assert (found.level, found.text) == ("fail", f"{name} cannot be read: its host or its port is not valid")
    assert "%23 for #" in found.remedy


@pytest.mark.parametrize("url", ["http://[bad", "http://host:abc", "http://host:99999"])
@pytest.mark.parametrize("arguments", [("ps",), ("batches", "list"), ("chat", "m", "hi"), ("models", "list")])
def test_a_wrong_address_of_the_gateway_is_named(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, url: str, arguments: tuple[str, ...]
) -> None:
    monkeypatch.setenv("THAW_URL", url)
    assert "THAW_URL" in error_of(capsys, *arguments)


@pytest.mark.parametrize("parse", [parse_duration, parse_size])
def test_numbers_without_end_are_no_amounts(parse: Callable[[str], float]) -> None:
    with pytest.raises(ValueError, match="is not"):
        parse(f"{LARGE}.0{'d' if parse is parse_duration else 'GB'}")


def test_a_key_that_expires_in_a_distant_future_is_listed(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    key = ApiKey(name="alice", created=int(time.time()), expires=10**18, money_per_day=Decimal(1))
    listed = KeyList(keys=(key,)).model_dump(mode="json")
    monkeypatch.setattr(Api, "request", lambda *_, **__: listed)
    assert main(["keys", "list"]) == 0
    assert "alice" in capsys.readouterr().out


@pytest.mark.parametrize("command", [("ps", "--json"), ("models", "list", "--json"), ("service", "show")])
def test_a_closed_output_gives_no_message_of_python(tmp_path: Path, command: tuple[str, ...]) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", "import sys; sys.stdin.read(); from thaw.cli.app import main; sys.exit(main())", *command],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"},
    )
    assert process.stdin is not None
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.close()
    process.stdin.close()  # it begins only now
    with process.stderr as errors:
        assert errors.read() == b""
    assert process.wait(60) == 1


@pytest.mark.parametrize("other", ["--csv", "--focus"])
def test_one_format_of_usage_is_printed(capsys: pytest.CaptureFixture[str], other: str) -> None:
    assert "--json" in error_of(capsys, "usage", other)


def test_csv_and_focus_exclude_each_other() -> None:
    assert main(["usage", "--csv", "--focus"]) == 2


def test_events_of_another_form_are_no_tracebacks() -> None:
    completion = Completion()
    for event in ({"choices": None}, {"choices": [{"delta": None, "finish_reason": "stop"}]}, {"usage": {"completion_tokens": 1}}):
        assert _absorb(event, completion) == ""
    assert completion.finish_reason == "stop"
    with pytest.raises(CommandError, match="not understood"):
        list(_events(iter(["data: [1]"]), lambda _: None))


@pytest.mark.parametrize("home", ["~nobody-of-that-name/t", "/" + "a" * 300, "{loop}/t"], ids=["user", "long", "loop"])
@pytest.mark.parametrize("arguments", [("ps",), ("down",), ("doctor",), ("logs", "gateway"), ("service", "show")])
def test_a_state_directory_that_cannot_be_found_is_named(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, home: str, arguments: tuple[str, ...]
) -> None:
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    monkeypatch.delenv("THAW_URL")
    monkeypatch.setenv("THAW_HOME", home.format(loop=tmp_path / "loop"))
    assert "state directory" in error_of(capsys, *arguments)


@pytest.mark.parametrize("host", ["ü..b", "ü" * 70])
def test_a_host_that_no_address_can_have_is_named(capsys: pytest.CaptureFixture[str], host: str) -> None:
    assert error_of(capsys, "up", "--host", host) == f"{host} is not an address of this machine."


@pytest.mark.parametrize("name", ["THAW_ADMIN_KEY", "THAW_API_KEY"])
@pytest.mark.parametrize("key", ["sk-secret\nX-Other: 1", "sk-secret\x7f", "sk-secrét"])
def test_a_key_that_no_header_can_have_is_not_shown(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, name: str, key: str
) -> None:
    monkeypatch.setenv(name, key)
    for arguments in (("ps",), ("keys", "list"), ("chat", "m", "hi"), ("batches", "list")):
        message = error_of(capsys, *arguments)
        assert name in message
        assert "secr" not in message


def test_white_space_around_a_key_is_no_part_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("THAW_API_KEY", " sk-one\n")
    assert Api.find().api_key == "sk-one"


@pytest.mark.parametrize("errno_", [errno.EACCES, errno.ENOSPC])
def test_files_that_cannot_be_used_are_named(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, errno_: int
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno_, os.strerror(errno_), str(tmp_path / "file"))

    monkeypatch.setattr(Api, "cluster", refuse)
    assert error_of(capsys, "models", "list") == f"{tmp_path / 'file'}: {os.strerror(errno_)}."


def test_requests_of_a_batch_that_cannot_be_read_are_named(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    path = tmp_path / "requests.jsonl"
    path.touch()
    opened = Path.open

    def refuse(self: Path, *arguments: object, **options: object) -> object:
        if self == path:
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return opened(self, *arguments, **options)  # type: ignore[call-overload] # the arguments of any overload

    monkeypatch.setattr(Path, "open", refuse)
    assert error_of(capsys, "batches", "run", str(path)) == f"{path} cannot be read: Permission denied."


@pytest.mark.parametrize("answer", [{}, [], {"status": "ok"}])
def test_another_server_is_no_gateway(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, answer: object) -> None:
    monkeypatch.setattr(Gateway, "request", lambda *_, **__: answer)
    assert "no gateway of Thaw" in error_of(capsys, "ps")


@pytest.mark.parametrize("size", ["inf%", "nan%", "1e999%", "-1", ""])
def test_sizes_that_are_none_are_asked_for_again(monkeypatch: pytest.MonkeyPatch, size: str) -> None:
    replies = iter([size, "50%"])
    monkeypatch.setattr("typer.prompt", lambda *_, **__: next(replies))
    assert init._ask_size("Memory", "90%", 2**30) == "50%"
