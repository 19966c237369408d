"""compose/locks matches pyproject.toml and constraints.txt.

The images install the locked packages, pinned by version and hash.
"""

from __future__ import annotations

import re
import runpy
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement

from tests.docker.engine import ROOT
from tests.docker.stages import read_stages

COMPOSE = ROOT / "compose"
LOCKS = ("build", "mesh", "node")
TARGET = {"python_version": "3.11", "python_full_version": "3.11.16", "platform_system": "Linux", "sys_platform": "linux"}
NOT_SHARED = re.compile(r"^(nvidia-.*|cuda-.*|triton)$")
"""Requirements of torch's CUDA builds only."""

_tool: dict[str, Any] = runpy.run_path(str(COMPOSE / "lock.py"))


def name_of(requirement: str) -> str:
    name: str = _tool["name_of"](requirement)
    return name


def wanted(lock: str) -> list[Requirement]:
    """Return the packages that the lock must contain on the images' platform."""
    return [r for r in map(Requirement, _tool["requirements"]()[lock]) if r.marker is None or r.marker.evaluate(TARGET)]


def pins(text: str) -> dict[str, str]:
    return {name_of(name): version for name, version in re.findall(r"^([\w.-]+)==([^\s;]+)", text, re.MULTILINE)}


def read(lock: str) -> str:
    return (COMPOSE / "locks" / f"{lock}.txt").read_text()


def closure(requirements: list[Requirement]) -> set[str]:
    """Return direct and indirect requirements, as the installed packages declare them.

    Leaves torch out.
    """
    found: set[tuple[str, str]] = set()
    waiting = [(name_of(r.name), extra) for r in requirements for extra in ("", *r.extras)]
    while waiting:
        name, extra = waiting.pop()
        if name == "torch" or (name, extra) in found:
            continue
        found.add((name, extra))
        for needed in map(Requirement, metadata.requires(name) or ()):
            if needed.marker is None or needed.marker.evaluate(TARGET | {"extra": extra}):
                waiting += [(name_of(needed.name), e) for e in ("", *needed.extras)]
    return {name for name, _ in found}


@pytest.mark.parametrize("lock", LOCKS)
def test_every_pinned_version_equals_the_constraints(lock: str) -> None:
    tested = pins((ROOT / "constraints.txt").read_text())
    locked = pins(read(lock))
    assert locked
    assert {name: version for name, version in locked.items() if tested.get(name) != version} == {}, "run `make lock`"


@pytest.mark.parametrize("lock", LOCKS)
def test_lock_has_only_pins_with_hashes(lock: str) -> None:
    entries = re.sub(r" *\\\n +", " ", read(lock)).splitlines()
    assert entries.pop(0).startswith("#")
    for entry in entries:
        assert re.fullmatch(r"[\w.-]+==[^\s;]+( ; [^-]+)?( --hash=sha256:[0-9a-f]{64})+", entry), entry


@pytest.mark.parametrize("lock", LOCKS)
def test_every_requirement_allows_its_locked_version(lock: str) -> None:
    locked = pins(read(lock))
    for requirement in wanted(lock):
        assert requirement.specifier.contains(locked[name_of(requirement.name)], prereleases=True), (
            f"run `make lock`: {requirement}"
        )


@pytest.mark.parametrize("lock", ["mesh", "node"])
def test_lock_contains_exactly_the_required_packages(lock: str) -> None:
    """The lock has exactly the required packages: pip installs it with --no-deps."""
    assert set(pins(read(lock))) == closure(wanted(lock)), "run `make lock`"


def test_node_lock_contains_the_requirements_of_every_torch_build() -> None:
    needed = [
        r for r in map(Requirement, metadata.requires("torch") or ()) if not r.marker or r.marker.evaluate(TARGET | {"extra": ""})
    ]
    shared = {name for r in needed if not NOT_SHARED.match(name := name_of(r.name))}
    assert shared == set(_tool["OF_TORCH"])
    assert shared <= set(pins(read("node")))


def test_the_images_install_by_hash_and_otherwise_only_our_wheel_and_torch() -> None:
    commands = re.findall(r"pip (?:install|wheel) (.*)", (COMPOSE / "Dockerfile").read_text())
    by_hash = {c for c in commands if c.startswith("--require-hashes --no-deps --only-binary :all: -r ")}
    assert {c.rpartition(" ")[2] for c in by_hash} == {f"{lock}.txt" for lock in LOCKS}
    others = [c for c in commands if c not in by_hash and "--no-index" not in c]
    assert [c.endswith('"$TORCH"') for c in others] == [True]


def test_build_context_contains_the_files_that_images_copy() -> None:
    """.dockerignore keeps none of the files out that the images copy."""
    allowed = [line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")]
    copied = [path for stage in read_stages((COMPOSE / "Dockerfile").read_text()).values() for path in stage.copied]
    assert "compose/locks/node.txt" in copied
    for path in map(Path, copied):
        assert (ROOT / path).exists(), path
        assert any(path.is_relative_to(a) for a in allowed), f".dockerignore keeps {path} out"
