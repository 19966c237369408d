"""Parameters that transformers converts, converted again layer by layer as their tensors arrive.

A mixture of experts has its experts' weights fused, and another dtype than the checkpoint's needs a
cast. Such a parameter is a copy. `checkpoint.bind` makes it from bytes that may not have arrived;
a layer makes it again when they have.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping

import torch
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    WeightConverter,
    WeightRenaming,
    convert_and_load_state_dict_in_model,
    rename_source_key,
)
from transformers.modeling_utils import LoadStateDictConfig

_LAYER = re.compile(r"\.\d+\.")


class LateConversion:
    """The parameters of a bound model that have to be converted once their tensors are there."""

    def __init__(self, model: PreTrainedModel, copied: Collection[str], names: Iterable[str]) -> None:
        """Find the sources of the copied parameters.

        Args:
            model: A bound model.
            copied: Names of its parameters that are copies.
            names: Names of the checkpoint's tensors.
        """
        self._model = model
        self._tensor: Callable[[str], torch.Tensor] | None = None
        self._mapping = get_model_conversion_mapping(model)
        self._aliases: dict[int, list[str]] = {}
        for name, parameter in model.named_parameters(remove_duplicate=False):
            self._aliases.setdefault(id(parameter), []).append(name)
        places = {self._place(name) for name in copied}
        found = self._targets(names)
        self._sources = {place: [n for n, target in found.items() if _is_within(target, place)] for place in places}
        self._left = set(self._sources)

    @property
    def is_possible(self) -> bool:
        """False if the sources of a parameter are unknown: it is converted after the whole load."""
        return all(self._sources.values())

    def read_from(self, tensor: Callable[[str], torch.Tensor]) -> None:
        """Set the function that returns a tensor of the checkpoint, once its bytes are there."""
        self._tensor = tensor

    def _place(self, name: str) -> str:
        """Return what is converted with a parameter: its layer, or the parameter alone."""
        layer = _LAYER.search(name)
        return name[: layer.end()] if layer is not None else name

    def _targets(self, names: Iterable[str]) -> Mapping[str, str]:
        """Return the (first) parameter that each of the checkpoint's tensors is converted to."""
        renamings = [m for m in self._mapping if isinstance(m, WeightRenaming)]
        converters = [m for m in self._mapping if isinstance(m, WeightConverter)]
        state, prefix = self._model.state_dict(), self._model.base_model_prefix
        found = {}
        for name in names:
            target, _ = rename_source_key(name, renamings, converters, prefix, state)
            if target not in state and name in state:
                target = name
            found[name] = target
        return found

    def places(self, tensors: Iterable[torch.Tensor]) -> frozenset[str]:
        """Return the places that have to be converted before these parameters are read."""
        names = [name for t in tensors for name in self._aliases.get(id(t), ())]
        return frozenset(place for place in self._sources if any(_is_within(name, place) for name in names))

    def sources(self, places: Iterable[str]) -> list[str]:
        """Return the names of the checkpoint's tensors that these places are converted from."""
        return [name for place in places for name in self._sources[place]]

    def all_sources(self) -> list[str]:
        """Return the names of all tensors of the checkpoint that parameters are converted from."""
        return sorted(set(self.sources(self._sources)))

    def convert(self, places: Collection[str]) -> None:
        """Convert these places, except those that are converted. All their tensors have arrived."""
        if not (left := self._left.intersection(places)):
            return
        assert self._tensor is not None
        before = dict(self._model.named_parameters(remove_duplicate=False))
        with torch.inference_mode(False), torch.no_grad():  # parameters that later steps may read in either mode
            tensors = {name: self._tensor(name) for name in self.sources(left)}
            convert_and_load_state_dict_in_model(
                self._model, tensors, LoadStateDictConfig(dtype=self._model.dtype, weight_mapping=self._mapping)
            )
            for name, parameter in before.items():
                self._keep(name, parameter)
        self._left -= left

    def convert_rest(self) -> None:
        """Convert what no step has read yet. All tensors have arrived."""
        self.convert(tuple(self._left))

    def _keep(self, name: str, parameter: torch.nn.Parameter) -> None:
        """Give a parameter its new bytes: tied modules share the object."""
        path, _, own = name.rpartition(".")
        module = self._model.get_submodule(path)
        if (new := getattr(module, own)) is not parameter:
            parameter.data = new.data
            setattr(module, own, parameter)


def _is_within(name: str, place: str) -> bool:
    return name == place or (place.endswith(".") and name.startswith(place))
