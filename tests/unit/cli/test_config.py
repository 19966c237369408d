"""thaw.yaml: all errors at once, each with place, given value, allowed values."""

from __future__ import annotations

import hashlib
from decimal import Decimal
from pathlib import Path

import pytest

from shared.contracts.models import ModelSpec
from thaw.config import ConfigError, Fault, ThawFile, load_config
from thaw.errors import CommandError
from thaw.units import format_duration, format_size, parse_duration, parse_size

ROOT = Path(__file__).resolve().parents[3]


def load(tmp_path: Path, text: str) -> ThawFile:
    path = tmp_path / "thaw.yaml"
    path.write_text(text)
    return load_config(path)


def faults(tmp_path: Path, text: str) -> tuple[Fault, ...]:
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, text)
    return caught.value.faults


def lines(tmp_path: Path, text: str) -> list[str]:
    return [f.text("f") for f in faults(tmp_path, text)]


def test_the_example_is_valid() -> None:
    file = load_config(ROOT / "thaw.example.yaml")
    assert [m.name for m in file.models] == ["qwen3", "embedder"]
    assert file.models[0].keep_alive == 600
    assert file.models[1].keep_alive == 300
    assert file.models[0].slo.ttft == 2.0
    assert file.mesh.port == 8080


def test_the_example_shows_every_key_of_a_model() -> None:
    text = (ROOT / "thaw.example.yaml").read_text()
    assert [key for key in ModelSpec.model_fields if f"{key}:" not in text] == []


def test_an_empty_file_is_an_empty_mesh(tmp_path: Path) -> None:
    assert load(tmp_path, "# nothing\n") == ThawFile()


def test_defaults_are_worked_into_each_model(tmp_path: Path) -> None:
    file = load(
        tmp_path,
        """
defaults:
  keep_alive: 1h30m
  replicas: {max: 3}
  engine_args: {a: 1, b: 2}
models:
  - {name: one, source: hf://a/b, replicas: {min: 1}, engine_args: {b: 3}}
  - {name: two, source: ., keep_alive: -1, engine_args: {kv_cache_bytes: 1GiB}}
""",
    )
    one, two = file.models
    assert (one.keep_alive, one.replicas.min, one.replicas.max, one.engine_args) == (5400, 1, 3, {"a": 1, "b": 3})
    assert (two.keep_alive, two.source) == (-1, str(tmp_path))
    assert two.engine_args["kv_cache_bytes"] == 2**30


def test_adapters_are_entries_of_their_base_or_top_level_entries(tmp_path: Path) -> None:
    file = load(
        tmp_path,
        """
defaults: {replicas: {min: 1}}
models:
  - {name: one, source: hf://a/b, adapters: {sql: ., poems: hf://a/poems}, engine_args: {adapter_cache_bytes: 1GiB}}
  - {name: two, source: hf://a/c, base: one}
""",
    )
    assert [(m.name, m.base, m.source) for m in file.models] == [
        ("one", None, "hf://a/b"),
        ("sql", "one", str(tmp_path)),
        ("poems", "one", "hf://a/poems"),
        ("two", "one", "hf://a/c"),
    ]
    assert [m.replicas.min for m in file.models] == [1, 0, 0, 0]
    assert file.models[0].engine_args["adapter_cache_bytes"] == 2**30


def test_a_missing_gguf_file_is_called_a_file(tmp_path: Path) -> None:
    errors = lines(tmp_path, "models:\n  - {name: a, source: ./a.gguf, engine: llamacpp}\n")
    assert errors[0].endswith(f"there is no file {tmp_path}/a.gguf")


def test_gguf_file_in_the_hubs_cache_is_a_link_to_a_blob(tmp_path: Path) -> None:
    (tmp_path / "blob").touch()
    (tmp_path / "a.gguf").symlink_to("blob")
    file = load(tmp_path, "models:\n  - {name: a, source: ./a.gguf, engine: llamacpp}\n")
    assert file.models[0].source == str(tmp_path / "a.gguf")


def test_a_source_with_a_zero_byte_is_a_fault_of_its_line(tmp_path: Path) -> None:
    errors = lines(tmp_path, 'models:\n  - name: a\n    source: "a\\0b"\n')
    assert len(errors) == 1
    assert "cannot be looked at" in errors[0]


def test_adapter_errors_name_line_and_key(tmp_path: Path) -> None:
    errors = lines(
        tmp_path,
        "models:\n  - name: a\n    source: hf://a/b\n    adapters:\n      a: hf://a/c\n      b: ./nowhere\n      'c d': hf://a/c\n"
        "  - {name: d, source: hf://a/b, adapters: [x]}\n",
    )
    assert errors[0].startswith("f:5:7: models[0].adapters.a: given 'a', which is a model's name or alias on line 2 already")
    assert errors[1].startswith("f:6:7: models[0].adapters.b.source: given './nowhere'; there is no directory")
    assert errors[2].startswith("f:7:7: models[0].adapters.c d: given 'c d'; allowed: text matching")
    assert errors[3].startswith("f:8:33: models[1].adapters: must be a mapping of names to sources")


def test_devices_accept_sizes_and_percentages(tmp_path: Path) -> None:
    file = load(tmp_path, "mesh:\n  nodes:\n    a: {cpu:0: 1500MiB, cuda:1: 90%}\n    b: {devices: {cpu:0: 1g}}\n    c:\n")
    assert file.mesh.nodes["a"].devices == {"cpu:0": 1500 * 2**20, "cuda:1": "90%"}
    assert file.mesh.nodes["b"].devices == {"cpu:0": 2**30}
    text = "mesh: {nodes: {a: {cpu:0: {size: 1GiB}, cpu:1: {size: 1GiB, memory: separate}}}}\n"
    assert load(tmp_path, text).mesh.nodes["a"].devices == {"cpu:0": 2**30, "cpu:1": f"{2**30}/separate"}
    assert file.mesh.nodes["c"].devices == {}


def test_the_pace_of_a_separate_device_is_read(tmp_path: Path) -> None:
    text = """
mesh:
  nodes:
    a:
      cpu:1: {size: 1GiB, memory: separate, bandwidth: 2GiB/s}
      cpu:2: {size: 1GiB, memory: separate, bandwidth: {host: 1GiB/s, cpu:1: 8GiB/s}}
"""
    devices = load(tmp_path, text).mesh.nodes["a"].devices
    assert devices == {
        "cpu:1": f"{2**30}/separate@{2 * 2**30}",
        "cpu:2": f"{2**30}/separate@{2**30}@cpu:1={8 * 2**30}",
    }


def test_memory_for_cached_weights(tmp_path: Path) -> None:
    file = load(
        tmp_path,
        "mesh:\n  nodes:\n    a: {cpu:0: 1GiB, dram: 512MiB}\n    b: {devices: {cpu:0: 1g}, dram: 0}\n    c: {dram: 1GiB}\n",
    )
    assert [(n.devices, n.dram) for n in file.mesh.nodes.values()] == [
        ({"cpu:0": 2**30}, 512 * 2**20),
        ({"cpu:0": 2**30}, 0),
        ({}, 2**30),
    ]


def test_all_errors_are_reported_together_with_their_lines(tmp_path: Path) -> None:
    errors = lines(
        tmp_path,
        """\
modles: []
mesh: {port: 99999}
models:
  - name: a
    source: hf://a/b
    keep_alive: 5 minuts
    keepalive: 3
    engine: vlm
  - name: b
    source: ./nowhere
    queue: {max_waiting: 0, timeot: 3}
    pin: perhaps
    pin: true
  - source: hf://a/b
""",
    )
    assert errors[0] == "f:1:1: modles: unknown key; did you mean 'models'?"
    assert errors[1] == "f:2:8: mesh.port: given 99999; allowed: 65535 or less"
    assert errors[2].startswith("f:6:5: models[0].keep_alive: unknown unit 'minuts'")
    assert errors[3] == "f:7:5: models[0].keepalive: unknown key; did you mean 'keep_alive'?"
    assert errors[4].startswith("f:8:5: models[0].engine: given 'vlm'; allowed: 'builtin', 'vllm', 'llamacpp'")
    assert errors[5] == f"f:10:5: models[1].source: given './nowhere'; there is no directory {tmp_path}/nowhere"
    assert errors[6] == "f:11:13: models[1].queue.max_waiting: given 0; allowed: 1 or more"
    assert errors[7] == "f:11:29: models[1].queue.timeot: unknown key; did you mean 'timeout'?"
    assert errors[8] == "f:12:5: models[1].pin: given 'perhaps'; allowed: true or false"
    assert errors[9] == "f:13:5: models[1].pin: the same key twice; it is on line 12 already"
    assert errors[10] == "f:14:5: models[2].name: is required"
    assert len(errors) == 11


def test_error_in_the_defaults_is_reported_once_at_the_defaults(tmp_path: Path) -> None:
    text = "defaults:\n  priority: 1000\nmodels:\n  - {name: a, source: hf://a/b}\n  - {name: b, source: hf://a/b}\n"
    assert lines(tmp_path, text) == ["f:2:3: defaults.priority: given 1000; allowed: 100 or less"]


def test_a_conflict_of_a_default_and_a_model_is_reported_at_the_model(tmp_path: Path) -> None:
    text = "defaults:\n  replicas: {max: 2}\nmodels:\n  - name: a\n    source: hf://a/b\n    replicas: {min: 3}\n"
    (error,) = lines(tmp_path, text)
    assert error.startswith("f:6:5: models[0].replicas:")
    assert "min (3) is over max (2)" in error


@pytest.mark.parametrize("second", ["name: a", "name: b\n    aliases: [a]", "name: b\n    aliases: [x, x]"])
def test_duplicate_names_and_aliases_are_refused(tmp_path: Path, second: str) -> None:
    errors = lines(tmp_path, f"models:\n  - name: a\n    source: hf://a/b\n  - {second}\n    source: hf://a/b\n")
    assert len(errors) == 1
    assert "already; allowed: each once" in errors[0]


@pytest.mark.parametrize(
    ("text", "line", "words"),
    [
        ("models:\n\t- name: a\n", 2, "a tab"),
        ("models: [a, b\nmesh: {}\n", 2, "not valid YAML"),
        ("- a\n- b\n", 1, "must be a mapping"),
        ("models: {a: 1}\n", 1, "must be a list"),
        ("models:\n  - just-a-name\n", 2, "must be a mapping with at least name and source"),
        ("models:\n  - {name: 12, source: hf://a/b}\n", 2, "put it in quotes"),
        ("models:\n  - {name: 'a b', source: hf://a/b}\n", 2, "text matching"),
        ("models:\n  - {name: a, source: 'ftp://x/y'}\n", 2, "allowed: a directory, hf://"),
        ("models:\n  - {name: a, source: 's3://'}\n", 2, "s3://bucket/prefix"),
        ("models:\n  - {name: a, source: hf://a/b, keep_alive: -5}\n", 2, "or -1 for 'until evicted'"),
        ("mesh:\n  nodes:\n    A: {cpu:0: 1GiB}\n", 3, "lower-case letters"),
        ("mesh:\n  nodes:\n    a: {gpu: 1GiB}\n", 3, "allowed: cpu:0 or cuda:N"),
        ("mesh:\n  nodes:\n    a: {cpu:0: lots}\n", 3, "a size such as"),
        ("mesh:\n  nodes:\n    a: {cpu:1: 1GiB}\n", 3, "only cpu:0 shares"),
        ("mesh:\n  nodes:\n    a: {cpu:0: {size: 1GiB, memory: own}}\n", 3, "must be a size, or"),
        ("mesh:\n  nodes:\n    a: {cpu:0: {memory: separate}}\n", 3, "must be a size, or {size: 4GiB, memory: separate}"),
        ("mesh:\n  nodes:\n    a: {cpu:0: {size: 50%, memory: separate}}\n", 3, "at least 2MiB"),
        ("mesh:\n  nodes:\n    a: {cuda:0: {size: 1GiB, memory: separate}}\n", 3, "must be a cpu device"),
        ("mesh:\n  nodes:\n    a: {cpu:0: {size: 1GiB, bandwidth: 1GiB/s}}\n", 3, "only a separate device can be paced"),
        ("mesh:\n  nodes:\n    a: {cpu:1: {size: 1g, memory: separate, bandwidth: fast}}\n", 3, "is not a bandwidth"),
        ("mesh:\n  nodes:\n    a: {cpu:1: {size: 1g, memory: separate, bandwidth: 0}}\n", 3, "a bandwidth over 0"),
        ("mesh:\n  nodes:\n    a: {cpu:1: {size: 1g, memory: separate, bandwidth: {disk: 1g}}}\n", 3, "allowed: host"),
        ("mesh:\n  nodes:\n    a: {cpu:1: {size: 1g, memory: separate, bandwidth: {cpu:2: 1g}}}\n", 3, "no other separate device"),
        ("mesh:\n  nodes:\n    a: {cuda:0: 120%}\n", 3, "at most 100%"),
        ("mesh:\n  nodes:\n    a: {cpu:0: .nan}\n", 3, "1 or more"),
        ("mesh:\n  nodes:\n    a: {cpu:0: 0GiB}\n", 3, "1 or more"),
        ("mesh:\n  nodes:\n    a: {dram: lots}\n", 3, "a size such as"),
        ("models:\n  - {name: a, source: hf://a}\n", 2, "allowed: hf://org/name"),
        ("models:\n  - {name: a, source: hf://a/b, keep_alive: .nan}\n", 2, "finite"),
        ("models:\n  - {name: a, source: hf://a/b, init_timeout: .inf}\n", 2, "finite"),
        ("models:\n  - {name: a, source: hf://a/b, engine_args: {kv_cache_bytes: -1}}\n", 2, "kv_cache_bytes must be"),
        ("models:\n  - {name: a, source: hf://a/b, engine_args: {kv_cache_bytes: lots}}\n", 2, "a size such as"),
        ("mesh: {api_keys: sk-1}\n", 1, "allowed: a list"),
        ("a: &x {b: 1}\n<<: 3\n", 1, "unknown key"),
    ],
)
def test_invalid_entry_is_reported_with_its_line(tmp_path: Path, text: str, line: int, words: str) -> None:
    found = faults(tmp_path, text)
    assert len(found) == 1, [f.text("f") for f in found]
    assert found[0].line == line
    assert words in found[0].message


def test_errors_of_conflicting_keys_do_not_print_the_values(tmp_path: Path) -> None:
    """Errors about conflicting keys omit the values, which may be credentials."""
    text = "models:\n  - {name: b, engine: openai, source: 'engine://b', memory: 1GiB, max_model_len: 8, env: {TOKEN: secret}}\n"
    (fault,) = faults(tmp_path, text)
    assert fault.message == "engine: openai needs a command, or a container"


def test_missing_file_is_reported(tmp_path: Path) -> None:
    with pytest.raises(CommandError, match="cannot be read"):
        load_config(tmp_path / "none.yaml")


@pytest.mark.parametrize(
    ("text", "seconds"), [("500ms", 0.5), ("30s", 30), ("5m", 300), ("1h30m", 5400), ("1.5h", 5400), ("2 min", 120), ("1d", 86400)]
)
def test_durations_are_parsed(text: str, seconds: float) -> None:
    assert parse_duration(text) == seconds


@pytest.mark.parametrize("text", ["", "5", "m", "5x", "-5m", "5m later", "1e3s"])
def test_invalid_duration_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        parse_duration(text)


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("1500MiB", 1500 * 2**20),
        ("8GB", 8 * 10**9),
        ("2 g", 2**31),
        ("4096", 4096),
        ("1.5GiB", 3 * 2**29),
        ("12b", 12),
        ("9007199254740993", 9007199254740993),
    ],
)
def test_sizes_are_parsed(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "lots", "5 parsecs", "GiB", "-1GiB", "²", "9" * 30, "9" * 5000, "5000000TiB"])
def test_invalid_size_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"is not a|unknown unit"):
        parse_size(text)


def test_sizes_and_durations_are_formatted_for_display() -> None:
    assert [format_size(v) for v in (0, 1023, 1536, 10 * 2**20, 1500 * 2**20, 3 * 2**40)] == [
        "0 B", "1023 B", "2 KiB", "10.0 MiB", "1.5 GiB", "3.0 TiB",
    ]  # fmt: skip
    assert [format_duration(v) for v in (0.0123, 1.25, 42, 600, 9000)] == ["12 ms", "1.2 s", "42 s", "10 min", "2.5 h"]


def test_unknown_scheduling_policy_is_refused_with_the_known_names(tmp_path: Path) -> None:
    assert load(tmp_path, "scheduler: {policy: lru}").scheduler.policy == "lru"
    assert load(tmp_path, "models: []").scheduler.policy is None
    (fault,) = faults(tmp_path, "scheduler:\n  policy: lur\n")
    assert (fault.line, fault.path) == (2, ("scheduler", "policy"))
    assert "'lur'" in fault.message
    assert "lru, native" in fault.message
    (other,) = faults(tmp_path, "scheduler: {polcy: lru}")
    assert "polcy" in other.text("f")
    assert "must be a mapping" in faults(tmp_path, "scheduler: thaw")[0].message


def test_prices_are_exact_and_faults_have_their_place(tmp_path: Path) -> None:
    prices = load(
        tmp_path, "prices: {currency: EUR, tokens: {prompt: 0.10}, device_seconds: {cuda: 0.0008}, models: {a: {prompt: 1}}}"
    ).prices
    assert prices is not None
    assert (prices.tokens.prompt, prices.device_seconds["cuda"]) == (Decimal("0.1"), Decimal("0.0008"))
    (fault,) = faults(tmp_path, "prices:\n  currency: EUR\n  tokens: {prompt: -1}\n")
    assert (fault.line, fault.path) == (3, ("prices", "tokens", "prompt"))


def test_keys_are_hashed_and_read_from_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CI_KEY", "sk-ci")
    digest = hashlib.sha256(b"sk-ci").hexdigest()
    path = tmp_path / "thaw.yaml"
    path.write_text(
        f"keys:\n  - {{name: a, key: '${{CI_KEY}}', models: [q*]}}\n  - {{name: b, key: {digest}, expires: 2030-01-01}}\n"
    )
    first, second = load_config(path).keys
    assert (first.name, first.sha256, first.models, first.scope) == ("a", digest, ("q*",), "inference")
    assert second.sha256 == digest
    assert second.expires is not None


@pytest.mark.parametrize(
    ("entry", "fault"),
    [
        ("{name: a}", "must be the key"),
        ("{name: a, key: '${UNSET_KEY}'}", "must be the key"),
        ("{name: a, key: k, scope: root}", "scope"),
        ("{name: a, key: k, request_per_minute: 1}", "request"),
    ],
)
def test_faulty_key_is_reported_without_its_value(entry: str, fault: str, tmp_path: Path) -> None:
    path = tmp_path / "thaw.yaml"
    path.write_text(f"keys:\n  - {entry}\n")
    with pytest.raises(ConfigError) as caught:
        load_config(path)
    assert fault in "\n".join(caught.value.lines())
