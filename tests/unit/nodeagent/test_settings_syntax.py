"""Sizes, devices and labels in settings."""

from __future__ import annotations

import pytest

from services.nodeagent.settings import NodeagentSettings
from services.nodeagent.settings_syntax import WantedDevice, labels, parse_bytes, parse_devices
from shared.device_list import separate_devices
from shared.messaging.mesh import HALF_OPEN_WITHIN_S


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("4096", 4096),
        ("1500MiB", 1500 << 20),
        ("2 GB", 2 * 10**9),
        ("1.5GiB", 3 << 29),
        ("1g", 1 << 30),
        ("7kb", 7000),
        ("10B", 10),
    ],
)
def test_byte_sizes_are_parsed(text: str, value: int) -> None:
    assert parse_bytes(text) == value


@pytest.mark.parametrize("text", ["", "MiB", "12 apples", "-5MiB", "0", "1e3", "0.1B", "5000000TiB", f"{'9' * 400}GiB"])
def test_an_invalid_size_is_reported_with_an_example(text: str) -> None:
    with pytest.raises(ValueError, match="is not a size"):
        parse_bytes(text)


def test_device_settings_are_parsed() -> None:
    assert parse_devices("auto") is None
    assert parse_devices("cpu:0=1500MiB, cuda:1=50%,cuda:0") == (
        WantedDevice("cpu:0", bytes=1500 << 20),
        WantedDevice("cuda:1", share=0.5),
        WantedDevice("cuda:0"),
    )
    assert parse_devices("cpu:0=1g,cpu:1=4g/separate") == (
        WantedDevice("cpu:0", bytes=1 << 30),
        WantedDevice("cpu:1", bytes=4 << 30, is_separate=True),
    )
    assert separate_devices("cpu:0=1g,cpu:1=4g/separate") == {"cpu:1": WantedDevice("cpu:1", bytes=4 << 30, is_separate=True)}
    assert separate_devices("auto") == {}


def test_the_pace_of_separate_devices_is_parsed() -> None:
    devices = separate_devices("cpu:0=1g,cpu:1=4g/separate@2GiB/s@cpu:2=8GiB/s, cpu:2=4g/separate @ 500MB")
    assert devices["cpu:1"].host_bytes_per_second == 2 << 30
    assert devices["cpu:1"].peer_bytes_per_second == (("cpu:2", 8 << 30),)
    assert (devices["cpu:2"].host_bytes_per_second, devices["cpu:2"].peer_bytes_per_second) == (500_000_000, ())


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("cpu:0=1g@2GiB/s", "only a separate cpu device can be paced"),
        ("cpu:1=1g/separate@fast", "is not a bandwidth"),
        ("cpu:1=1g/separate@1g@2g", "two bandwidths from host memory"),
        ("cpu:1=1g/separate@cpu:2=1g@cpu:2=2g,cpu:2=1g/separate", "two bandwidths from cpu:2"),
        ("cpu:1=1g/separate@cpu:2=1g", "cpu:2 is no other separate device"),
        ("cpu:1=1g/separate@cpu:1=1g", "cpu:1 is no other separate device"),
        ("gpu:0", "is not a device"),
        ("cpu:1", "one cpu device"),
        ("cpu:1=4g", "one cpu device"),
        ("cpu:1=1MiB/separate", "at least 2MiB"),
        ("cuda:0=4g/separate", "only a cpu device"),
        ("cpu:0=50%/separate", "is not a size"),
        ("cuda:0,cuda:0", "named twice"),
        ("cpu:0=120%", "at most 100%"),
        ("cpu:0=much%", "at most 100%"),
        ("cpu:0=much", "is not a size"),
        ("cpu:0=", "is not a size"),
        ("", "is not a device"),
    ],
)
def test_invalid_device_settings_are_refused(text: str, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        parse_devices(text)


def test_node_labels_are_parsed() -> None:
    assert labels("") == {}
    assert labels("zone=a, rack = 12") == {"zone": "a", "rack": "12"}
    with pytest.raises(ValueError, match="is not a label"):
        labels("zone")


@pytest.mark.parametrize(
    "setting", [{"devices": "cpu"}, {"cpu_reserve": "some"}, {"labels": "x"}, {"engine_threads": 0}, {"adopt_timeout": 3}]
)
def test_settings_are_checked_at_the_start(setting: dict[str, str]) -> None:
    with pytest.raises(ValueError, match="validation error"):
        NodeagentSettings.model_validate(setting)


def test_engines_have_time_to_notice_a_half_open_connection() -> None:
    """A good engine would be ended otherwise."""
    assert NodeagentSettings().adopt_timeout > HALF_OPEN_WITHIN_S
