"""The built console is up to date, small, and self-contained."""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path

import pytest
from starlette.datastructures import Headers

from services.gateway.http.console.assets import MANIFEST, STATIC, Assets
from shared.errors import NotFound

CONSOLE = Path(__file__).parents[3] / "console"
MAX_BYTES = 200 * 1024
TOP = ("build.mjs", "package-lock.json", "package.json", "tsconfig.json")


def _manifest() -> dict[str, object]:
    found = json.loads((STATIC / MANIFEST).read_text())
    assert isinstance(found, dict)
    return found


def test_bundle_was_built_from_the_sources() -> None:
    """A difference means that `make console` has to be run, and its output committed."""
    names = [*TOP, *(p.relative_to(CONSOLE).as_posix() for p in (CONSOLE / "src").rglob("*") if p.is_file())]
    digest = hashlib.sha256()
    for name in sorted(names):
        body = (CONSOLE / name).read_bytes()
        digest.update(f"{name}\0{len(body)}\0".encode() + body)
    assert _manifest()["sources"] == digest.hexdigest()


@pytest.mark.parametrize("suffix", [".br", ".gz"])
def test_compressed_files_are_small(suffix: str) -> None:
    assert 0 < sum(p.stat().st_size for p in STATIC.glob(f"*{suffix}")) <= MAX_BYTES


def test_bundle_names_no_other_host_and_inserts_no_html() -> None:
    text = "".join(p.read_text() for p in STATIC.iterdir() if p.suffix in (".js", ".css", ".html"))
    assert set(re.findall(r"https?://[\w.]+", text)) <= {"http://www.w3.org"}  # names of namespaces
    for path in (CONSOLE / "src").rglob("*.ts*"):
        assert not re.search(r"dangerouslySetInnerHTML|innerHTML|localStorage|sessionStorage|eval\(", path.read_text()), path


def test_page_names_the_files_of_the_manifest() -> None:
    files = set(_manifest()["files"])  # type: ignore[call-overload]
    named = set(re.findall(r"/ui/assets/([\w.-]+)", (STATIC / "index.html").read_text()))
    assert named == files - {"index.html"}
    assert {p.name for p in STATIC.iterdir()} == {MANIFEST, *files, *(f"{f}{s}" for f in files for s in (".br", ".gz"))}


def test_files_are_sent_in_an_accepted_encoding_and_revalidated() -> None:
    assets = Assets()
    (script,) = (p.name for p in STATIC.glob("*.js"))
    for accepted, encoding in (("gzip, deflate, br", "br"), ("gzip;q=0.5", "gzip"), ("", None)):
        response = assets.respond(script, Headers({"accept-encoding": accepted}))
        assert response.headers.get("content-encoding") == encoding
        assert "immutable" in response.headers["cache-control"]
    page = assets.respond("index.html", Headers())
    assert page.headers["cache-control"] == "no-cache"
    assert assets.respond("index.html", Headers({"if-none-match": page.headers["etag"]})).status_code == 304


def test_other_files_are_not_served() -> None:
    for name in (MANIFEST, "../assets.py", "index.html.gz"):
        with pytest.raises(NotFound):
            Assets().respond(name, Headers())
