"""The wheel works outside the checkout as the checkout does."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from importlib.metadata import Distribution, distributions
from pathlib import Path

import pytest

import thaw

ROOT = Path(__file__).parents[3]
PACKAGES = ("thaw", "services", "shared", "weights", "simulator")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Create a directory of installed packages that holds only the wheel."""
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("out")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source / name)
    for name in PACKAGES:
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    _run([sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(out), str(source)], out)
    (wheel,) = out.glob("*.whl")
    _run(
        [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--target", str(out / "site"), str(wheel)],
        out,
    )
    return out / "site"


def _run(command: list[str], cwd: Path, **environment: str) -> str:
    ran = subprocess.run(command, cwd=cwd, env={**os.environ, **environment}, capture_output=True, text=True, timeout=150)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return ran.stdout


def _installed(site: Path, *arguments: str) -> str:
    """Return the output of Python with the wheel's packages before the checkout's."""
    return _run([sys.executable, *arguments], site.parent, PYTHONPATH=str(site), THAW_HOME=str(site.parent / "home"))


def _distribution(site: Path) -> Distribution:
    (found,) = distributions(path=[str(site)])
    return found


def test_the_command_line_runs_from_the_wheel(site: Path) -> None:
    where = _installed(site, "-c", "import thaw; print(thaw.__file__, thaw.__version__)").split()
    assert where == [str(site / "thaw" / "__init__.py"), thaw.__version__]
    assert "simulate" in _installed(site, "-m", "thaw", "--help")


def test_doctor_looks_at_the_machine(site: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(site), "THAW_HOME": str(site.parent / "home")}
    command = [sys.executable, "-m", "thaw", "doctor", "--json"]
    ran = subprocess.run(command, cwd=site.parent, env=environment, capture_output=True, text=True, timeout=150)
    subjects = {f["subject"] for f in json.loads(ran.stdout)["findings"]}
    assert {"python", "memory", "nats", "postgres"} <= subjects


def test_wheel_has_its_entry_points_and_version(site: Path) -> None:
    found = _distribution(site)
    points = {(p.group, p.name): p.value for p in found.entry_points}
    assert points["console_scripts", "thaw"] == "thaw.cli.app:main"
    assert points["vllm.general_plugins", "thaw"] == "weights.vllm_plugin:register"
    assert ("thaw.policies", "serverlessllm") in points
    assert found.version == thaw.__version__


def test_wheel_has_every_data_file(site: Path) -> None:
    """The wheel has every data file.

    A tracked file of a package that is no Python source is needed at run time.
    """
    for package in PACKAGES:
        assert (site / package / "py.typed").is_file()
        for path in (ROOT / package).rglob("*"):
            if path.is_file() and path.suffix in (".ini", ".mako", ".conf", ".yaml", ".json"):
                assert (site / path.relative_to(ROOT)).is_file(), path
    assert (site / "thaw" / "thaw.example.yaml").is_file()
    console = Path("services/gateway/http/console/static")
    assert {p.name for p in (site / console).iterdir()} == {p.name for p in (ROOT / console).iterdir()}


def test_wheel_installs_the_manual_pages(site: Path) -> None:
    """`man` finds pages beside the `bin` directory of the command."""
    installed = {page.name: page.read_text() for page in (site / "share" / "man" / "man1").iterdir()}
    assert installed == {page.name: page.read_text() for page in (ROOT / "thaw" / "man").iterdir()}
    assert {"thaw.1", "thaw-up.1"} <= set(installed)


def test_wheel_requires_what_it_imports(site: Path) -> None:
    required = {r.split(";")[0].split(">")[0].split("[")[0].strip() for r in _distribution(site).requires or ()}
    assert {"starlette", "httpx2"} <= required
    assert "fastapi" not in required


def test_images_have_the_version_of_the_package() -> None:
    compose = (ROOT / "compose" / "compose.yaml").read_text()
    for image in ("thaw-mesh", "thaw-node"):
        assert f"{image}:{thaw.__version__}}}" in compose
