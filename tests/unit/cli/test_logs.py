"""`thaw logs`: file selection, last lines, and follow mode."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from rich.console import Console

from thaw.cli import logs
from thaw.cli.gateway import error_of
from thaw.cli.logs import _format_line, _new_lines, log_files
from thaw.errors import CommandError
from thaw.launcher import logfiles
from thaw.launcher.home import Home
from thaw.launcher.logfiles import bound_logs, tail, tail_with_end


@pytest.fixture
def home(tmp_path: Path) -> Home:
    home = Home(tmp_path)
    home.create()
    for name in ("gateway", "loader.node-0", "loader.node-1"):
        home.log(name).write_text("one\ntwo\nthree\n")
    engines = home.nodes / "node-0" / "logs"
    engines.mkdir(parents=True)
    (engines / "i-1234.engine.log").write_text("")
    return home


def test_service_has_a_log_per_node(home: Home) -> None:
    assert list(log_files(home, "gateway")) == ["gateway"]
    assert list(log_files(home, "loader")) == ["loader.node-0", "loader.node-1"]
    assert list(log_files(home, "loader.node-1")) == ["loader.node-1"]
    assert list(log_files(home, "i-1234")) == ["i-1234.engine"]
    assert list(log_files(home, "engine")) == ["i-1234.engine"]


@pytest.mark.parametrize("name", ["gate", "nobody", "../..", "*"])
def test_unknown_log_name_lists_the_available_ones(home: Home, name: str) -> None:
    with pytest.raises(CommandError) as caught:
        log_files(home, name)
    assert "gateway, loader.node-0" in caught.value.remedy


def test_tail_returns_the_last_lines(home: Home) -> None:
    assert tail(home.log("gateway"), 2) == ["two", "three"]
    assert tail(home.log("none"), 2) == []


def test_follow_mode_prints_whole_lines_and_survives_rotation(home: Home) -> None:
    path = home.log("gateway")
    positions, rest = {"g": path.stat().st_size}, {"g": b""}
    with path.open("a") as f:
        f.write("fo")
    assert list(_new_lines("g", path, positions, rest)) == []
    with path.open("a") as f:
        f.write("ur\nfive\n")
    assert list(_new_lines("g", path, positions, rest)) == ["four", "five"]
    path.write_text("six\n")
    assert list(_new_lines("g", path, positions, rest)) == ["six"]


def test_follow_mode_shows_a_character_whose_bytes_are_written_apart(home: Home) -> None:
    path = home.log("gateway")
    positions, rest = {"g": path.stat().st_size}, {"g": b""}
    found: list[str] = []
    for byte in "größer 🙂\n".encode():
        with path.open("ab") as f:
            f.write(bytes([byte]))
        found += _new_lines("g", path, positions, rest)
    assert found == ["größer 🙂"]


def test_follow_mode_drops_the_beginning_of_a_line_that_was_rotated(home: Home) -> None:
    path = home.log("gateway")
    positions, rest = {"g": path.stat().st_size}, {"g": b""}
    with path.open("a") as f:
        f.write("fo")
    assert list(_new_lines("g", path, positions, rest)) == []
    path.write_text("five\n")
    assert list(_new_lines("g", path, positions, rest)) == ["five"]


def test_a_line_that_ends_while_it_is_followed_is_shown_whole(home: Home) -> None:
    path = home.log("gateway")
    with path.open("ab") as f:
        f.write("gr\u00f6".encode()[:-1])
    shown, end = tail_with_end(path, 2)
    assert shown == ["two", "three"], "it is shown once, when it has ended"
    with path.open("ab") as f:
        f.write("\u00f6".encode()[-1:] + b"sser\n")
    assert list(_new_lines("g", path, {"g": end}, {"g": b""})) == ["gr\u00f6sser"]


def test_logs_are_rotated_at_the_size_limit(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logfiles, "LIMIT_BYTES", 8)
    path = home.log("gateway")
    with path.open("a") as writer:
        bound_logs(home)
        assert path.read_text() == ""
        writer.write("after\n")
    assert path.read_text() == "after\n"
    assert path.with_suffix(".log.1").read_text() == "one\ntwo\nthree\n"


def test_lines_written_while_the_first_are_printed_are_followed(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    gateway, gone = home.log("gateway"), home.log("gone")
    gone.write_text("last\n")
    printed: list[str] = []

    def print_and_write(_: object, found: dict[str, list[str]]) -> None:
        if not printed:
            with gateway.open("a") as f:
                f.write("four\n")
            gone.unlink()
        printed.extend(line for lines in found.values() for line in lines)

    monkeypatch.setattr(logs, "_print", print_and_write)
    monkeypatch.setattr(logs, "_follow", lambda print_new, _: print_new())
    logs._show_local(Console(quiet=True), {"gateway": gateway, "gone": gone}, 2, follow=True)
    assert printed == ["two", "three", "last", "four"]


def test_json_lines_are_for_people() -> None:
    line = '{"time": "2026-11-20T10:30:22.036Z", "level": "info", "service": "s", "logger": "l", "message": "hello", "pid": 3}'
    assert _format_line(line, "").plain == "10:30:22.036 info    hello pid=3"
    assert _format_line("plain [x] text", "nats").plain == "nats plain [x] text"


def test_remedy_of_an_engine_failure_names_its_own_log() -> None:
    """A failed engine's remedy names its own log: the nodeagent's lacks its output."""
    body = {"error": {"code": "engine_failed", "message": "the engine ended with exit status 7"}}
    assert "thaw logs INSTANCE" in error_of(500, "/v1/models", json.dumps(body).encode()).remedy


def test_terminal_sequences_of_libraries_are_not_shown() -> None:
    assert _format_line("\x1b[32mINFO\x1b[0m:     started\x07", "").plain == "INFO:     started"
    line = '{"time": "2026-01-01T00:00:00.000Z", "level": "info", "message": "\\u001b[1mhi", "color": "\\u001b[31mred"}'
    assert _format_line(line, "").plain.endswith("hi color=red")


def test_fields_without_a_value_are_not_shown() -> None:
    line = (
        '{"time": "2026-01-01T00:00:00.000Z", "level": "info", "message": "m", "error": null, "status": 200, "color_message": "m"}'
    )
    assert _format_line(line, "").plain == "00:00:00.000 info    m status=200"


def test_control_characters_in_any_field_reach_no_terminal() -> None:
    hostile = "\x1b]0;title\x07\x1b[31m\x9b31m"
    entry = {"time": f"2026-11-29T10:00:00.000{hostile}", "level": hostile, "exception": f"first\nsecond {hostile}"}
    shown = _format_line(json.dumps(entry), "").plain
    assert not set("\x1b\x07\x9b") & set(shown)
    assert "first\nsecond" in shown


@pytest.mark.parametrize("time", [1764410400.25, None, {"s": 1}])
def test_lines_of_engines_with_another_form_of_time_are_shown(time: object) -> None:
    assert "hello" in _format_line(json.dumps({"time": time, "message": "hello"}), "").plain
