"""Build the images of compose/Dockerfile stage by stage, as BuildKit does.

At each `COPY --from` the classic builder hashes the whole tree that it would copy, also if its
cache has the result: 40,000 files of Python packages for a change of one source file. Here each
stage is an image whose tag is a hash of its inputs, and a stage whose image exists is not built.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

_STAGE = re.compile(r"^FROM (?P<base>\S+) AS (?P<name>\S+)\n", re.MULTILINE)
_COPIED = re.compile(r"^COPY (?!--from)(.*) \S+$", re.MULTILINE)
_FROM = re.compile(r"(?<=^COPY --from=)\S+", re.MULTILINE)
_ARGUMENT = re.compile(r"^ARG (\w+)", re.MULTILINE)
_TIMEOUT_S = 900


@dataclass(frozen=True)
class Stage:
    """A stage of a Dockerfile.

    Attributes:
        base: A stage or an image.
        text: The lines after its FROM.
    """

    name: str
    base: str
    text: str

    @cached_property
    def uses(self) -> set[str]:
        """Return the stages or images that it copies from."""
        return set(_FROM.findall(self.text))

    @cached_property
    def copied(self) -> list[str]:
        """Return the paths that it copies from the build context."""
        return [name for line in _COPIED.findall(self.text) for name in line.split()]


def read_stages(dockerfile: str) -> dict[str, Stage]:
    starts = list(_STAGE.finditer(dockerfile))
    ends = [*(s.start() for s in starts[1:]), len(dockerfile)]
    return {s["name"]: Stage(s["name"], s["base"], dockerfile[s.end() : end]) for s, end in zip(starts, ends, strict=True)}


class Builder:
    """Builds stages of one Dockerfile, and the stages that they need."""

    def __init__(self, root: Path, context: Path, python_image: str, extra: Callable[[str], list[Path]]) -> None:
        """Prepare to build.

        Args:
            root: The folder that paths in the Dockerfile are relative to.
            context: An empty directory for build contexts.
            python_image: The image that `${PYTHON_IMAGE}` names.
            extra: Returns files that are added to a copied folder.
        """
        self._root, self._context, self._extra = root, context, extra
        text = (root / "compose" / "Dockerfile").read_text().replace("${PYTHON_IMAGE}", python_image)
        self._stages = read_stages(text)
        self._images: dict[str, str] = {}

    def build(self, name: str) -> str:
        """Return the image of a stage; build it if it does not exist."""
        if name not in self._stages:
            return name
        if name not in self._images:
            self._images[name] = self._build(self._stages[name])
        return self._images[name]

    def _build(self, stage: Stage) -> str:
        base = self.build(stage.base)
        text = f"FROM {base}\n" + _FROM.sub(lambda found: self.build(found[0]), stage.text)
        given = {a: os.environ[a] for a in _ARGUMENT.findall(stage.text) if os.environ.get(a)}
        context = self._context / stage.name
        context.mkdir()
        files = dict(self._files(stage))
        # The tags of other stages say what is in them; an image of another origin has an id.
        origin = "" if stage.base in self._stages else _id_of(base)
        digest = hashlib.sha256(f"{origin}\n{text}\n{sorted(given.items())}\n".encode())
        for path, file in sorted(files.items()):
            digest.update(f"{path}\n{file.stat().st_mode:o}\n".encode() + file.read_bytes())
        image = f"thaw-{stage.name}:test-{digest.hexdigest()[:12]}"
        if not _id_of(image):
            for path, file in files.items():
                target = context / path
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(file, target)
            options = [f"--build-arg={name}={value}" for name, value in given.items()]
            command = ["docker", "build", "-q", "--network=host", *options, "-t", image, "-f", "-", str(context)]
            done = subprocess.run(command, input=text, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)
            assert done.returncode == 0, f"{stage.name} could not be built:\n{done.stdout[-2000:]}{done.stderr[-4000:]}"
        _remove_earlier(stage.name, image)
        return image

    def _files(self, stage: Stage) -> Iterator[tuple[str, Path]]:
        """Return the stage's build context: paths in it, and their files."""
        for name in stage.copied:
            found = self._root / name
            for file in (f for f in [found, *found.rglob("*")] if f.is_file() and "__pycache__" not in f.parts):
                yield str(file.relative_to(self._root)), file
            for file in self._extra(name):
                yield f"{name}/{file.name}", file


def _id_of(image: str) -> str:
    """Return the id of a local image, or an empty string."""
    command = ["docker", "image", "inspect", "--format", "{{.Id}}", image]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stdout.strip() if done.returncode == 0 else ""


def _remove_earlier(name: str, image: str) -> None:
    """Remove the images of the stage from earlier trees; the layers that later images use stay."""
    listing = ["docker", "images", "-q", "--filter", f"reference=thaw-{name}:test-*", "--filter", f"before={image}"]
    earlier = {*subprocess.run(listing, capture_output=True, text=True, check=False).stdout.split()}
    if earlier:
        subprocess.run(["docker", "rmi", "-f", *earlier], capture_output=True, check=False)
