"""A model bound to a segment in device memory, here a block of host memory.

No parameter is copied, and the output is the same.
"""

from __future__ import annotations

import base64
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import transformers as tf

from services.engine.generation.runner import Row
from services.engine.model import device_segment, gpu_units, loading
from services.engine.model.architectures import ModelCache
from services.engine.model.bound_model import bind_model
from services.engine.model.model_files import read_files
from services.engine.model.ready_model import ReadyModel
from services.engine.process import prepare_environment
from services.engine.settings import EngineSettings
from shared.contracts.engine import EngineStart
from shared.contracts.segment import CudaIpcHandle, GpuUnitsHandle, MappedUnit
from shared.errors import EngineFailed
from tests.support.segments import WrittenSegment, card_of
from weights.store.units import address_range, cut_units

HANDLE = CudaIpcHandle(device="cuda:0", nbytes=1, bus_id="0000:00:00.0", ipc_handle=base64.b64encode(bytes(64)).decode())
IDS = [5, 6, 7, 8]


def test_gpus_have_the_numbers_of_the_node(monkeypatch: pytest.MonkeyPatch) -> None:
    """GPUs have the node's numbers.

    NVML orders GPUs by bus; CUDA by default puts the fastest first, and an engine would then
    compute on another GPU than its booking.
    """
    environment = {"CUDA_DEVICE_ORDER": "FASTEST_FIRST"}
    monkeypatch.setattr(os, "environ", environment)
    prepare_environment()
    assert environment["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"


def logits(computable: ReadyModel) -> torch.Tensor:
    assert computable.runner is not None
    return computable.runner.forward([Row(computable.runner.new_state(), 0, IDS)])[0]


class OnDevice:
    """A checkpoint bound as an engine binds it.

    Attributes:
        device: What its loader would have on a GPU.
    """

    def __init__(self, directory: Path, monkeypatch: pytest.MonkeyPatch, **spec: str) -> None:
        self.segment = WrittenSegment(directory).write()
        self.device = torch.frombuffer(bytearray(self.segment.path.read_bytes()), dtype=torch.uint8)
        self.opened: list[CudaIpcHandle] = []
        monkeypatch.setattr(device_segment, "open_on_gpu", self.open)
        self.directory = directory
        card = card_of(directory, **spec)
        self.start = EngineStart(instance_id="i", node="n", card=card, device="cpu:0", kv_bytes=64 << 20, log_path="unused")
        attached = self.segment.attached().model_copy(update={"handle": HANDLE})
        self.bound = bind_model(directory, attached, self.start, ModelCache())

    def open_units(self, handle: GpuUnitsHandle, *_: object) -> torch.Tensor:
        """Map units one after the other, each from a page on."""
        units = torch.zeros(handle.nbytes, dtype=torch.uint8)
        for u in handle.units:
            units[u.start : u.start + u.nbytes] = self.device[u.offset : u.offset + u.nbytes]
        self.device = units
        return units

    def open(self, handle: CudaIpcHandle) -> torch.Tensor:
        self.opened.append(handle)
        return self.device

    def complete(self, handle: CudaIpcHandle | GpuUnitsHandle | None = HANDLE) -> ReadyModel:
        files = read_files(self.directory, self.start, ModelCache())
        return loading.complete(self.bound, files, self.start, EngineSettings(), handle)

    def copied(self) -> list[str]:
        """Return parameters that are not in the device's memory."""
        start, end = self.device.data_ptr(), self.device.data_ptr() + self.device.numel()
        return [n for n, p in self.bound.model.named_parameters() if not start <= p.data_ptr() < end]


@pytest.fixture
def on_device(demo_directory: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[OnDevice]:
    found = OnDevice(demo_directory, monkeypatch)
    yield found
    found.segment.unlink()


def test_every_parameter_is_the_devices_memory(on_device: OnDevice, demo_directory: Path) -> None:
    computable = on_device.complete()
    assert on_device.opened == [HANDLE]  # early, and once: a process opens a handle once
    assert on_device.copied() == []
    reference = tf.AutoModelForCausalLM.from_pretrained(demo_directory, dtype=on_device.bound.model.dtype).eval()
    torch.testing.assert_close(
        logits(computable).float(), reference(torch.tensor([IDS])).logits[0, -1].float(), rtol=1e-3, atol=1e-3
    )
    on_device.device[on_device.segment.index.tensors[0].offset :] = 0
    assert all(p.count_nonzero() == 0 for p in on_device.bound.model.parameters())


def test_every_parameter_is_in_the_units_of_a_gpu(
    on_device: OnDevice, demo_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_units, "open_units", on_device.open_units)
    computable = on_device.complete(units_of(on_device))
    assert on_device.copied() == []
    reference = tf.AutoModelForCausalLM.from_pretrained(demo_directory, dtype=on_device.bound.model.dtype).eval()
    torch.testing.assert_close(
        logits(computable).float(), reference(torch.tensor([IDS])).logits[0, -1].float(), rtol=1e-3, atol=1e-3
    )


def units_of(found: OnDevice) -> GpuUnitsHandle:
    places = address_range(cut_units(found.segment.index.tensors, {}, "w"))
    units = [MappedUnit(offset=u.offset, nbytes=u.nbytes, start=s) for u, s in zip(places.units, places.starts, strict=True)]
    return GpuUnitsHandle(device="cuda:0", nbytes=places.nbytes, bus_id="0000:00:00.0", units=tuple(units))


@pytest.mark.parametrize("dtype", ["float32", "float16"], ids=["bound", "converted"])
def test_a_partial_load_leaves_all_weights_to_the_gpu(demo_directory: Path, monkeypatch: pytest.MonkeyPatch, dtype: str) -> None:
    found = OnDevice(demo_directory, monkeypatch, dtype=dtype)
    monkeypatch.setattr(gpu_units, "open_units", found.open_units)
    first = min(t.offset for t in found.segment.index.tensors)
    with found.segment.path.open("r+b") as file:  # host memory has the head alone
        file.seek(first)
        file.write(bytes(found.segment.total_bytes - first))
    found.bound.is_partial = True
    try:
        computable = found.complete(units_of(found))
        reference = tf.AutoModelForCausalLM.from_pretrained(demo_directory, dtype=getattr(torch, dtype)).eval()
        expected = reference(torch.tensor([IDS])).logits[0, -1].float()
        torch.testing.assert_close(logits(computable).float(), expected, rtol=1e-2, atol=1e-2)
        assert expected.abs().max() > 0.05
    finally:
        found.segment.unlink()


def test_odd_addresses_are_copied_from_the_device_once_all_is_there() -> None:
    base = torch.arange(64, dtype=torch.uint8)
    model = torch.nn.Module()
    model.odd = torch.nn.Parameter(torch.ones(2), requires_grad=False)
    assert device_segment.rebind(model, lambda _: 5, base, is_loaded=True) == 8
    assert model.odd.view(torch.uint8).tolist() == list(range(5, 13))


def test_units_of_a_gpu_are_refused_in_a_shared_process() -> None:
    handle = GpuUnitsHandle(device="cuda:0", nbytes=1, bus_id="0000:00:00.0", units=())
    loading.check_isolation(handle, is_shared=False)
    loading.check_isolation(HANDLE, is_shared=True)
    with pytest.raises(EngineFailed, match="THAW_CUDA_REUSE_BYTES"):
        loading.check_isolation(handle, is_shared=True)


def test_without_a_final_handle_the_model_stays_in_its_copies(on_device: OnDevice) -> None:
    on_device.complete(None)
    assert len(on_device.copied()) == len(list(on_device.bound.model.parameters()))
    assert on_device.bound.memory is None


def test_changed_final_handle_is_opened_again(on_device: OnDevice) -> None:
    other = HANDLE.model_copy(update={"nbytes": 2})
    on_device.complete(other)
    assert on_device.opened == [HANDLE, other]


def test_converted_parameters_are_copied(demo_directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = OnDevice(demo_directory, monkeypatch, dtype="float16")
    try:
        computable = found.complete()
        assert len(found.copied()) == len(list(found.bound.model.parameters()))
        assert torch.isfinite(logits(computable)).all()
    finally:
        found.segment.unlink()


def test_tied_parameters_stay_tied_and_odd_addresses_are_copied() -> None:
    base = torch.arange(64, dtype=torch.uint8)
    model = torch.nn.Module()
    model.first = torch.nn.Parameter(torch.zeros(2, 3), requires_grad=False)
    model.tied = model.first
    model.turned = torch.nn.Parameter(torch.zeros(3, 2).t(), requires_grad=False)
    model.odd = torch.nn.Parameter(torch.ones(2), requires_grad=False)
    model.empty = torch.nn.Parameter(torch.zeros(0, 4), requires_grad=False)
    offsets = {model.first.data_ptr(): 8, model.turned.data_ptr(): 32, model.odd.data_ptr(): 57}
    device_segment.rebind(model, lambda t: offsets.get(t.data_ptr()) if t.numel() else None, base)
    assert model.tied is model.first
    assert model.first.data_ptr() == base.data_ptr() + 8
    assert (model.turned.data_ptr(), model.turned.stride()) == (base.data_ptr() + 32, (1, 2))
    assert model.odd.tolist() == [1, 1]


def test_a_model_on_disk_with_tied_embeddings(tmp_path: Path, demo_directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = tf.LlamaConfig(hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2, vocab_size=1024)
    config.tie_word_embeddings = True
    model = tf.LlamaForCausalLM(config)
    model.save_pretrained(tmp_path)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((demo_directory / name).read_bytes())
    found = OnDevice(tmp_path, monkeypatch)
    try:
        found.complete()
        assert found.copied() == []
        assert found.bound.model.lm_head.weight is found.bound.model.model.embed_tokens.weight
    finally:
        found.segment.unlink()
