"""Completion that `thaw --install-completion` installs, in real shells."""

from __future__ import annotations

import os
import pty
import re
import select
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.support.launcher import ROOT

TIMEOUT_S = 60
PROMPT = "READY>"
_SEQUENCE = re.compile(r"\x1b(\[[0-?]*[ -/]*[@-~]|[=>])")


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """Return an environment with `thaw` on its path, and an empty home but for work/thaw.yaml."""
    command = tmp_path / "bin" / "thaw"
    command.parent.mkdir()
    command.write_text(f'#!/bin/sh\nexec {sys.executable} -m thaw.cli.app "$@"\n')
    command.chmod(0o755)
    (tmp_path / "work").mkdir()
    (tmp_path / "work" / "thaw.yaml").touch()
    path = f"{command.parent}:{os.environ['PATH']}"
    return {"HOME": str(tmp_path), "PATH": path, "PYTHONPATH": str(ROOT), "TERM": "xterm", "LC_ALL": "C.UTF-8"}


def run(environment: dict[str, str], *command: str) -> str:
    work = Path(environment["HOME"]) / "work"
    done = subprocess.run(command, cwd=work, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    assert (done.returncode, done.stderr) == (0, ""), done
    return done.stdout


def install(environment: dict[str, str], shell: str) -> None:
    """Install as a user does: the command finds the shell that runs it."""
    if shutil.which(shell) is None:
        pytest.skip(f"no {shell} is installed: apt-get install {shell}")
    # The last word keeps the shell from replacing itself.
    assert f"{shell} completion installed" in run(environment, shell, "-c", "thaw --install-completion; true")


def test_bash_completes_commands_options_and_files(environment: dict[str, str]) -> None:
    install(environment, "bash")
    for words, expected in (
        ("thaw serv", ["service"]),
        ("thaw service ", ["install", "remove", "show"]),
        ("thaw up --dem", ["--demo"]),
        ("thaw up --config tha", []),  # bash then completes files
    ):
        ask = 'source ~/.bashrc; COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); _thaw_completion thaw; printf "%s\\n" "${COMPREPLY[@]}"'
        assert sorted(run(environment, "bash", "-c", ask, "bash", *words.split(" ")).split()) == expected
    assert "-o default" in run(environment, "bash", "-c", "source ~/.bashrc; complete -p thaw")


def test_fish_completes_commands_options_and_files(environment: dict[str, str]) -> None:
    install(environment, "fish")
    for words, expected in (
        ("thaw serv", ["service"]),
        ("thaw service ", ["install", "remove", "show"]),
        ("thaw up --dem", ["--demo"]),
        ("thaw up --config tha", ["thaw.yaml"]),
    ):
        lines = run(environment, "fish", "-c", f'complete --do-complete "{words}"').splitlines()
        assert sorted(line.partition("\t")[0] for line in lines) == expected
    (line,) = run(environment, "fish", "-c", 'complete --do-complete "thaw slee"').splitlines()
    assert line.startswith("sleep\tFree a model's devices")


@contextmanager
def terminal(environment: dict[str, str], *command: str) -> Iterator[int]:
    """Run an interactive shell.

    Yields:
        The descriptor of its terminal.
    """
    pid, descriptor = pty.fork()
    if pid == 0:
        os.chdir(Path(environment["HOME"]) / "work")
        os.execvpe(command[0], command, environment)
    try:
        yield descriptor
    finally:
        os.close(descriptor)  # the shell gets SIGHUP
        os.waitpid(pid, 0)


def read_until(descriptor: int, text: str) -> str:
    """Return what the terminal shows up to `text`, without control sequences."""
    shown, end = "", time.monotonic() + TIMEOUT_S
    while text not in shown:
        readable, _, _ = select.select([descriptor], [], [], max(0.0, end - time.monotonic()))
        assert readable, f"{text!r} is not shown, but {shown!r}"
        shown = _SEQUENCE.sub("", shown + os.read(descriptor, 65536).decode(errors="replace"))
    return shown


def test_zsh_completes_commands_options_and_files_at_the_first_tab(environment: dict[str, str]) -> None:
    install(environment, "zsh")
    with (Path(environment["HOME"]) / ".zshrc").open("a") as file:
        file.write(f"\nPS1='{PROMPT}'\nunsetopt beep\n")
    for typed, expected in (
        ("thaw serv", "service "),
        ("thaw up --dem", "--demo "),
        ("thaw up --config tha", "thaw.yaml"),
        ("thaw s", "Simulate scheduling policies"),
    ):
        with terminal(environment, "zsh", "-i") as descriptor:
            read_until(descriptor, PROMPT)
            os.write(descriptor, f"{typed}\t".encode())
            shown = read_until(descriptor, expected)
    assert "Free a model's devices" in shown
