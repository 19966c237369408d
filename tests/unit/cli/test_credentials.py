"""Credentials of a thaw.yaml: variables of the environment, and messages that do not show them."""

from __future__ import annotations

import hashlib
from datetime import UTC, datetime
from pathlib import Path

import pytest

from shared.contracts.models import strip_credentials
from thaw.config import ConfigError, Fault, ThawFile, load_config


def load(tmp_path: Path, text: str) -> ThawFile:
    path = tmp_path / "thaw.yaml"
    path.write_text(text)
    return load_config(path)


def faults(tmp_path: Path, text: str) -> tuple[Fault, ...]:
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, text)
    return caught.value.faults


@pytest.mark.parametrize("unset", ["empty", "absent"])
@pytest.mark.parametrize(
    ("text", "path"),
    [
        ("keys:\n  - {name: a, key: 'sk-${CI_KEY}'}\n", ("keys", 0, "key")),
        ("keys:\n  - {name: a, key: $CI_KEY}\n", ("keys", 0, "key")),
        ("mesh:\n  api_keys: [sk-one, '${CI_KEY}']\n", ("mesh", "api_keys", 1)),
        ("mesh:\n  api_keys: ['sk-${CI_KEY}']\n", ("mesh", "api_keys", 0)),
        ("mesh:\n  admin_key: ${CI_KEY}\n", ("mesh", "admin_key")),
        ("mesh:\n  admin_key: $CI_KEY\n", ("mesh", "admin_key")),
    ],
)
def test_a_variable_that_is_not_set_gives_no_key_that_a_reader_of_the_file_knows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, unset: str, text: str, path: tuple[str | int, ...]
) -> None:
    if unset == "empty":
        monkeypatch.setenv("CI_KEY", "")
    else:
        monkeypatch.delenv("CI_KEY", raising=False)
    (fault,) = faults(tmp_path, text)
    assert (fault.line, fault.path) == (2, path)


def test_keys_of_the_mesh_are_read_from_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CI_KEY", "from-the-environment")
    file = load(
        tmp_path,
        "mesh:\n  admin_key: ${CI_KEY}\n  api_keys: [$CI_KEY, 'sk-${CI_KEY}', cost$CI_KEY]\nkeys:\n  - {name: a, key: 'x-$CI_KEY'}\n",
    )
    assert file.mesh.admin_key == "from-the-environment"
    assert file.mesh.api_keys == ("from-the-environment", "sk-from-the-environment", "cost$CI_KEY"), "other dollar signs are text"
    assert file.keys[0].sha256 == hashlib.sha256(b"x-from-the-environment").hexdigest()
    assert file.variables == {"CI_KEY"}


def test_variables_are_those_of_keys_and_local_sources_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "one").mkdir()
    for name, value in (("ONE", "one-of-the-keys"), ("TWO", "two"), ("FOLDER", str(tmp_path)), ("TEXT", "x"), ("IN_ENV", "y")):
        monkeypatch.setenv(name, value)
    file = load(
        tmp_path,
        "mesh:\n  admin_key: cost$TEXT-of-it\n  api_keys: ['sk-${ONE}']\nkeys:\n  - {name: a, key: x-$TWO}\n"
        "models:\n  - {name: m, source: $FOLDER/one, engine: vllm, env: {A: $IN_ENV}}\n",
    )
    assert file.variables == {"ONE", "TWO", "FOLDER"}


@pytest.mark.parametrize(
    "text",
    [
        "mesh: {admin_key: 4815162342}\n",
        "mesh: {admin_key: '48151'}\n",
        "mesh: {api_keys: [sk-one, 4815162342]}\n",
        "mesh: {api_keys: '4815162342'}\n",
        "models:\n  - {name: a, source: hf://a/b, env: {TOKEN: 4815162342}}\n",
    ],
)
def test_messages_about_a_credential_do_not_show_it(tmp_path: Path, text: str) -> None:
    (fault,) = faults(tmp_path, text)
    assert fault.message.startswith("allowed: ")
    assert "48151" not in fault.message


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("https://user:4815162342@host/a b?token=4815162342", "https://host/a b"),
        ("https://user:pa/4815162342@host/a b", "https://"),
        ("https://user:pa#4815162342@host/a b", "https://"),
        ("https://user:4815162342@[::1/a b", "https://"),
        ("ftp://user:4815162342@host:21/a?token=4815162342", "ftp://host:21/a"),
        ("s3://key:4815162342@bucket/a", "s3://bucket/a"),
    ],
)
def test_a_faulty_url_is_shown_without_its_credentials(tmp_path: Path, url: str, shown: str) -> None:
    (fault,) = faults(tmp_path, f'models:\n  - {{name: a, source: "{url}"}}\n')
    assert fault.message.startswith(f"given '{shown}'; allowed: ")


@pytest.mark.parametrize(
    "source",
    [
        "hf://org/name@main",
        "engine://qwen3:0.6b",
        "s3://bucket/a//b",
        "az://container",
        "https://host:8443/a@b",
        "http://[::1]:80/a",
        "/a/b",
    ],
)
def test_a_source_without_credentials_is_shown_as_it_is(source: str) -> None:
    assert strip_credentials(source) == source


def test_a_key_expires_at_the_time_of_the_file_and_a_date_at_its_beginning(tmp_path: Path) -> None:
    file = load(
        tmp_path,
        "keys:\n  - {name: a, key: k, expires: 2030-01-02T12:30:00Z}\n  - {name: b, key: l, expires: 2030-01-02 12:30:00}\n"
        "  - {name: c, key: m, expires: 2030-01-02}\n",
    )
    noon = datetime(2030, 1, 2, 12, 30, tzinfo=UTC)
    local = datetime(2030, 1, 2, 12, 30).astimezone()
    assert [key.expires for key in file.keys] == [
        int(at.timestamp()) for at in (noon, local, local.replace(hour=0, minute=0).astimezone())
    ]
