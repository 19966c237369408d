"""docs/check_words.py finds words outside the field's usage.

It only lets the number of findings fall.
"""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

SCRIPT = Path(__file__).parents[3] / "docs/check_words.py"
WORDS = """
[words]
told = "reported"
heard = "received"
"goes on" = "continues"

[[exceptions]]
word = "told"
path = "lib/wire.py"
text = "told_at"
reason = "a field of the wire contract"

[ceilings]
"lib" = 2
"services/gateway" = 1
"""


@pytest.fixture(scope="module")
def words() -> ModuleType:
    spec = importlib.util.spec_from_file_location("check_words", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["check_words"] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def repository(words: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Create an empty git repository, which the script checks instead of Thaw's."""
    subprocess.run(["git", "init", "-q", tmp_path], check=True)
    write(tmp_path, "docs/words.toml", WORDS)
    write(tmp_path, "lib/wire.py", "told_at = 1\n")
    monkeypatch.setattr(words, "_ROOT", tmp_path)
    monkeypatch.setattr(sys, "argv", ["check_words.py"])
    return tmp_path


def write(root: Path, path: str, text: str) -> None:
    (root / path).parent.mkdir(parents=True, exist_ok=True)
    (root / path).write_text(text)


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("heard_at = 0\n", ["heard"]),
        ("class LastHeard:\n    pass\n", ["heard"]),
        ("def f(told):\n    self.heard = told\n", ["heard", "told"]),
        ("import queue as told\n", ["told"]),
        ('def f():\n    """It goes on."""\n', ["goes on"]),
        ("x = 1  # nothing heard\n", ["heard"]),
        ('raise ValueError(f"not told {x}")\n', ["told"]),
        ("print(other.heard, other.told)\n", []),  # uses; the definition is counted
        ('x = {"told": 1}\n', []),  # a key, not prose
        ("untold = retold = 1\n", []),
    ],
)
def test_words_are_found_in_python(words: ModuleType, source: str, found: list[str]) -> None:
    pattern = words.Rules.parse(words.tomllib.loads(WORDS)).pattern
    assert sorted(finding.word for finding in words.check("lib/a.py", source, pattern)) == found


def test_words_in_markdown_code_are_ignored(words: ModuleType) -> None:
    pattern = words.Rules.parse(words.tomllib.loads(WORDS)).pattern
    text = "It goes on.\n```\ntold\n```\nThe key `told` is heard.\n"
    found = [(finding.line, finding.word) for finding in words.check("a.md", text, pattern)]
    assert found == [(1, "goes on"), (5, "heard")]


def test_a_file_name_is_checked(words: ModuleType) -> None:
    pattern = words.Rules.parse(words.tomllib.loads(WORDS)).pattern
    assert [finding.word for finding in words.check("lib/last_heard.py", "", pattern)] == ["heard"]


def test_findings_over_the_ceiling_fail(words: ModuleType, repository: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(repository, "lib/a.py", "heard = 1\nheard_at = 2\n")
    assert words.main() == 0
    write(repository, "lib/b.py", "# told\n")
    assert words.main() == 1
    out = capsys.readouterr().out
    assert "lib/b.py:1: " in out
    assert "lib: 3 words of docs/words.toml, 2 allowed" in out


def test_folder_without_a_ceiling_must_have_no_findings(words: ModuleType, repository: Path) -> None:
    write(repository, "other/a.py", "heard = 1\n")
    assert words.main() == 1


def test_ceilings_can_only_be_lowered(
    words: ModuleType, repository: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write(repository, "lib/a.py", "heard = 1\n")
    write(repository, "services/gateway/a.py", "heard = 1\ntold = 2\n")
    assert words.main() == 1
    assert "lib: the ceiling in docs/words.toml can be lowered from 2 to 1" in capsys.readouterr().out
    monkeypatch.setattr(sys, "argv", ["check_words.py", "--lower"])
    assert words.main() == 1
    assert (repository / "docs/words.toml").read_text() == WORDS.replace('"lib" = 2', '"lib" = 1')
    (repository / "lib/a.py").unlink()
    (repository / "services/gateway/a.py").unlink()
    assert words.main() == 0
    assert (repository / "docs/words.toml").read_text().endswith("[ceilings]\n")


def test_unused_exception_fails(words: ModuleType, repository: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(repository, "lib/wire.py", "sent_at = 1\n")
    assert words.main() == 1
    assert "no text needs the exception" in capsys.readouterr().out


def test_an_exception_needs_a_reason(words: ModuleType) -> None:
    with pytest.raises(ValueError, match="has no reason"):
        words.Rules.parse({"words": {"told": "reported"}, "exceptions": [{"word": "told"}]})


@pytest.mark.parametrize(
    ("name", "faults"),
    [
        ("request_over_size_limit_returns_413", 0),
        ("7_victim_with_the_shortest_queue_is_preempted_first", 0),
        ("what_if_query_changes_nothing", 0),
        ("it_becomes_ready", 1),
        ("4_who_waits_too_long_goes_first", 1),
        ("what_is_" + "very_" * 20 + "long", 2),
    ],
)
def test_test_name_must_begin_with_its_subject(words: ModuleType, name: str, faults: int) -> None:
    source = f"async def test_{name}() -> None: ..."
    assert len(words.test_name_faults("tests/test_a.py", source, ("what", "who", "it"))) == faults


def test_refused_test_name_fails_the_check(repository: Path, words: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    write(repository, "docs/words.toml", WORDS.replace("[ceilings]", '[test_names]\nsubjects = ["it"]\n\n[ceilings]'))
    write(repository, "tests/unit/test_a.py", "def test_it_fails(): ...\n")
    assert words.main() == 1
    assert "test_it_fails: begin the name with the subject" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("def _answered(): ...", ["_answered"]),
        ("class A:\n    async def whole(self): ...", ["whole"]),
        ("def record_answered(): ...", []),
        ("def feed(): ...", []),
        ("class A:\n    @property\n    def whole(self): ...", []),
        ("@contextlib.contextmanager\ndef attached(): ...", []),
    ],
)
def test_function_named_by_a_bare_state_is_found(words: ModuleType, source: str, found: list[str]) -> None:
    findings = words.function_names("lib/a.py", source, ("whole",), ("feed",))

    assert [f.text for f in findings] == found
