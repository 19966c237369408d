"""Install the peer loaders of `bench.loader`, once: `python -m bench.peers`.

They get an environment of their own in the cache directory (`${XDG_CACHE_HOME:-~/.cache}/thaw`),
because the product needs none of them. The command prints its interpreter, which `bench.loader`
takes by default. `make peers` does the same. Later calls change nothing; an installation that was
interrupted is made again.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

PACKAGES = ("torch==2.13.0", "numpy==2.4.6", "safetensors==0.8.0", "fastsafetensors==0.5.0", "runai-model-streamer==0.17.0")
WHOLE = ".whole"


def directory() -> Path:
    """Return the environment's place, by versions, interpreter and machine."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    python = os.path.realpath(sys.executable)  # a checkout's environment may be somewhere else each time
    key = "\n".join((*PACKAGES, platform.python_version(), platform.machine(), platform.libc_ver()[1], python))
    return cache / "thaw" / "peers" / hashlib.sha256(key.encode()).hexdigest()[:16]


def python() -> str | None:
    """Return the interpreter of a complete installation; None if there is none."""
    found = directory()
    return str(found / "bin" / "python") if (found / WHOLE).exists() else None


def install() -> str:
    """Install what is missing, and return the interpreter.

    Raises:
        subprocess.CalledProcessError: pip failed; its output says why.
    """
    if (found := python()) is not None:
        return found
    target = directory()
    shutil.rmtree(target, ignore_errors=True)
    subprocess.run([sys.executable, "-m", "venv", str(target)], check=True)
    interpreter = str(target / "bin" / "python")
    subprocess.run([interpreter, "-m", "pip", "--disable-pip-version-check", "install", "-q", *PACKAGES], check=True)
    (target / WHOLE).touch()
    return interpreter


if __name__ == "__main__":
    try:
        print(install())
    except subprocess.CalledProcessError as e:
        sys.exit(f"The peers could not be installed ({e}). Check the package index, then run the command again")
