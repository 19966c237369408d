"""The loader's Unix socket, and the weights that a reader receives."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from shared.contracts.loader_socket import loader_socket
from tests.integration.loader.conftest import LoaderProcess
from weights.client import Weights


def path_of(loader: LoaderProcess) -> Path:
    return loader_socket(loader.home / "nodes" / loader.node)


def assert_arrived(weights: Weights, expected: dict[str, np.ndarray[tuple[int, ...], np.dtype[np.float32]]]) -> None:
    found = {}
    for tensor, data in weights.tensors():
        found[tensor.name] = np.frombuffer(bytes(data), expected[tensor.name].dtype).reshape(tensor.shape)
        data.release()
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert np.array_equal(found[name], value)
